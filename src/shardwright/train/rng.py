"""Random numbers of training as a pure function of the position in training.

Before each microbatch every generator is seeded from (seed, update, number of the microbatch within the update). So a
resumed run draws what an uninterrupted one would, on any rank and any world size, and nothing has to be saved. The
microbatch's number is global: rows [index * B, (index + 1) * B) draw the same whichever rank holds them, so dropout does
not depend on the layout as long as per_device_train_batch_size stays. Decision 0003.

Under a pipeline the generators are seeded before each stage's forward of each microbatch, from the stage's number too,
since a stage cannot know how many numbers the stages before it have drawn. Masks are then a function of (seed, update,
microbatch, stage): the same in a resumed run and under every schedule with the same cut, but not those of another pp_size.

Context-parallel ranks hold different tokens of a row, so their rank is part of the seed. Tensor-parallel ranks are seeded alike
and draw numbers of their own where their work is divided (`parallel/tensor/tp_rng.py`). So masks depend on the sizes of pp, cp
and tp; their distribution does not.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np

from shardwright.models.initialization import seed_generators


def stream_seed(seed: int, *position: int) -> int:
    """63 bits from (seed, position), equal on every platform and version."""
    text = "/".join(str(number) for number in (seed, *position))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_microbatch(seed: int, update: int, index: int, stage: int = 0, cp_rank: int = 0) -> None:
    """Seeds python's, NumPy's and torch's generators (CPU and GPUs) for one microbatch on one pipeline stage."""
    more = (stage, cp_rank) if cp_rank else (stage,) if stage else ()
    value = stream_seed(seed, update, index, *more)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    seed_generators(value)

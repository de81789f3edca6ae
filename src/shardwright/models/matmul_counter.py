"""What a causal language model multiplies for each token, counted by running it on the meta device.

T tokens. A forward of one row costs 2 (a T + b T^2) FLOPs: a weights multiply every token, and each token's attention has 2
products of width b / 2 with every key, summed over layers. Two lengths give both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import ModelError, ShardwrightError

LENGTHS = (7, 14)
"""Short, for models that loop over tokens, and no multiple of a block or chunk, so that what is padded to one shows."""


def count_products(model: nn.Module) -> tuple[float, float]:
    """(weights that multiply every token, width of attention summed over layers) of `model`, which is on the meta device.

    Raises `ModelError` where its forward needs values.
    """
    short, long = (_forward_flops(model, length) for length in LENGTHS)
    n = LENGTHS[0]
    return (4 * short - long) / (4 * n), (long - 2 * short) / (8 * n**2)


def _forward_flops(model: nn.Module, length: int) -> int:
    """FLOPs of one row of `length` tokens."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    ways: list[dict[str, Any]] = [{}]
    if hasattr(model, "config") and hasattr(model, "generate"):
        # A mask that is already there keeps Transformers from looking at values to decide about one.
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        mask = torch.zeros(1, 1, length, length, dtype=dtype, device="meta")
        ways = [{"use_cache": False, "attention_mask": mask}, {"use_cache": False}]
    reasons = []
    for arguments in ways:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(input_ids=ids, **arguments) if arguments else model(ids)
            return int(counter.get_total_flops())
        except ShardwrightError:
            raise
        except Exception as error:  # a model's own code, on tensors without values
            reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise ModelError(reasons[0])

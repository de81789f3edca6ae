"""What the pipeline's tests share: `trained` of `tests/gloo/engine.py` for ranks that hold different parameters.

Rank 0 gathers whole tensors; copies of tied parameters are compared on the ranks that hold them.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.gloo.engine import UPDATES, Outcome, batches_for, gathered_moments, make_engine
from tests.gloo.ranks import run_ranks
from tests.stock_torch import without_gloo_package
from torch import Tensor

from shardwright.config.load import Loaded
from shardwright.tools.check.gather import whole_on_first_rank
from shardwright.train.update import UpdateEngine


def weights(engine: UpdateEngine) -> dict[str, Tensor]:
    return whole_on_first_rank({name: p.detach() for name, p in engine.module.named_parameters()})


def gradients(engine: UpdateEngine) -> dict[str, Tensor]:
    return whole_on_first_rank({local.name: local.wrap(g) for local, g in engine.gradients()})


def moments(engine: UpdateEngine) -> dict[str, dict[str, Tensor]]:
    return gathered_moments(engine)


def digest(engine: UpdateEngine) -> dict[str, str]:
    """A hash of this rank's part of each parameter, under its name and place in the data-parallel mesh."""
    place = {axis: at for axis, at in engine.axes.coordinates(engine.rank).items() if axis != "pp"}
    return {
        f"{local.name} {place}": hashlib.sha1(
            (local.tensor.to_local() if hasattr(local.tensor, "to_local") else local.tensor)
            .detach()
            .contiguous()
            .numpy()
            .tobytes()
        ).hexdigest()
        for local in engine.params
    }


def trained(loaded: Loaded, updates: int = UPDATES, **rows: Any) -> Outcome:
    """What the engine makes of the first updates, whole on rank 0."""
    torch.manual_seed(dist.get_rank())
    engine = make_engine(loaded)
    outcome = Outcome(start=weights(engine))
    for update in range(updates):
        engine.forward_backward(batches_for(engine, update, **rows))
        outcome.gradients.append(gradients(engine))
        outcome.results.append(engine.step())
    outcome.weights, outcome.moments = weights(engine), moments(engine)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (digest(engine), outcome.results))
    seen: dict[str, str] = {}
    for rank, (digests, results) in enumerate(parts):
        different = [name for name, value in digests.items() if seen.setdefault(name, value) != value]
        if different or results != parts[0][1]:
            outcome.disagreement = f"rank {rank}: {different or results}"
    return outcome


def all_trained(cases: dict[str, Loaded], **rows: Any) -> dict[str, Outcome]:
    """`trained` for every case, in one start of the ranks. `torch ...`: under torch's runtime, whatever the schedule."""
    found = {}
    for name, loaded in cases.items():
        try:
            with without_gloo_package() if name.startswith("torch ") else nullcontext():
                found[name] = trained(loaded, **rows)
        except Exception as error:
            raise AssertionError(f"case {name}") from error
    return found


def on_ranks(world_size: int, cases: dict[str, Loaded], **rows: Any) -> dict[str, Outcome]:
    """`all_trained` on gloo ranks: what rank 0 has gathered."""
    return run_ranks(partial(all_trained, **rows), world_size, cases)[0]

"""The Python API on the example's own model, loss and data against a plain loop, in float64.

Covers A03, A11 and A13 of the known faults for callers' own losses.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.custom_loop import TP_PLAN, loss_sum, make_model, rows_of
from tests import tolerance
from tests.gloo.ranks import run_ranks
from torch import Tensor, nn

from shardwright import api
from shardwright.errors import ConfigError
from shardwright.mesh.shard_geometry import full_tensor

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

UPDATES, RATE = 3, 0.01
TARGETS = sum(int((~wanted.isnan()).sum()) for _, wanted in [rows_of(0)])
FP64 = {f"precision__{name}_dtype": "fp64" for name in ("param", "reduce", "master")}
TP = {"parallelism__tp_plan": TP_PLAN, "parallelism__sequence_parallel": False}
LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {}, "zero1+tp2": TP, "ddp+tp2": TP}


def _engine(layout: str, **options: Any) -> api.Engine:
    options = {"training__learning_rate": RATE, "training__lr_scheduler_type": "constant", **FP64, **options}
    return api.Engine(make_model, loss_sum, layout=layout, updates=UPDATES, **options)


def _rows(update: int) -> list[tuple[Tensor, Tensor]]:
    pairs, wanted = rows_of(update)
    return list(zip(pairs.double().split(4), wanted.double().split(4)))


def _trained(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for layout, options in layouts.items():
        engine = _engine(layout, **options)
        start = {name: full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
        results = []
        for update in range(UPDATES):
            own = _rows(update)[engine.data_rank :: engine.data_ranks]
            engine.forward_backward(own, engine.total(sum(int((~y.isnan()).sum()) for _, y in own)))
            results.append(engine.step())
        end = {name: full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
        found[layout] = (start, results, end)
    return found


def _plain(start: dict[str, Tensor]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model: nn.Module = make_model().double()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    scalars = []
    for update in range(UPDATES):
        pairs, wanted = (torch.cat(parts) for parts in zip(*_rows(update)))
        known = ~wanted.isnan()
        loss = (model(pairs[known])[:, 0] - wanted[known]).abs().mean()
        loss.backward()
        scalars.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return scalars, model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_loss_of_your_own(world_size: int) -> None:
    """A03 A11 A13: losses, norms and weights of three updates, with targets that differ between microbatches."""
    layouts = {layout: more for layout, more in LAYOUTS.items() if world_size > 1 or "tp" not in layout}
    found = run_ranks(_trained, world_size, layouts)
    for layout in layouts:
        start, results, end = found[0][layout]
        scalars, weights = _plain(start)
        rounding, moved = tolerance.of_model(start, TARGETS), tolerance.moved(start, TARGETS)
        for result, (loss, norm) in zip(results, scalars):
            assert (
                abs(result.loss / loss - 1) <= tolerance.LATER * rounding and abs(result.grad_norm / norm - 1) <= moved
            )
        for name, value in weights.items():
            assert (end[name] - value).abs().max() <= moved * value.abs().max(), (layout, name)
        assert all(other[layout][1] == results for other in found)


def _resumed(directory: str) -> list[float]:
    """Largest differences between an uninterrupted run and one that goes through a checkpoint and another layout."""
    long, short = _engine("zero3"), _engine("zero3")
    for engine, updates in ((long, range(3)), (short, range(2))):
        for update in updates:
            own = _rows(update)[engine.data_rank :: engine.data_ranks]
            engine.forward_backward(own, engine.total(sum(int((~y.isnan()).sum()) for _, y in own)))
            engine.step()
    short.save(directory)
    differences = []
    for layout, more in (("zero3", {}), ("zero1+tp2", TP)):
        fresh = _engine(layout, training__seed=9, **more)
        fresh.load(directory)
        own = _rows(fresh.update)[fresh.data_rank :: fresh.data_ranks]
        fresh.forward_backward(own, fresh.total(sum(int((~y.isnan()).sum()) for _, y in own)))
        fresh.step()
        now = dict(fresh.module.named_parameters())
        differences.append(
            max(
                float((full_tensor(p.detach()) - full_tensor(now[n].detach())).abs().max())
                for n, p in long.module.named_parameters()
            )
        )
    return differences


def test_checkpoints_of_another_layout() -> None:
    """A checkpoint goes on where it was, under its own layout to the bit and under another to rounding."""
    with tempfile.TemporaryDirectory() as directory:
        same, other = run_ranks(_resumed, 2, directory)[0]
    shapes = make_model().state_dict()
    assert same == 0.0 and other <= tolerance.moved(shapes, TARGETS)


def _refused() -> list[str]:
    def inner() -> nn.Module:
        return make_model()

    def text(function: Any) -> str:
        try:
            function()
        except ConfigError as error:
            return str(error)
        return "not refused"

    engine, rank = _engine("zero3"), dist.get_rank()
    rows = _rows(0)
    return [
        text(lambda: api.Engine(inner, loss_sum, updates=1)),
        text(lambda: _engine("pp2")),
        text(lambda: _engine("ddp", training__global_batch_size=8)),
        text(lambda: engine.forward_backward(rows[: 1 + rank], 5)),
        text(lambda: engine.forward_backward(rows[:1], 5 + rank)),
        text(partial(engine.forward_backward, [], 5)),
    ]


def test_refusals() -> None:
    """What could not work is said by name, on every rank alike."""
    found = run_ranks(_refused, 2)
    assert found[0] == found[1]
    words = (
        "is not defined at the top",
        "pp_size",
        "no effect",
        "1 to 2 microbatches",
        "5 to 6 targets",
        "without a microbatch",
    )
    for word, message in zip(words, found[0], strict=True):
        assert word in message, message

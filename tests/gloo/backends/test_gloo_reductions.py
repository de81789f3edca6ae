"""Reductions of `fully_shard` that return at once: the same sums as its own, in float32, in a fixed order, and few at a time.

Against one process of plain torch they stand in test_parity.py and test_precision.py; what they send in test_traffic.py.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.engine import (
    LLAMA,
    ODD,
    ROWS,
    T,
    batches_for,
    make_engine,
    run_file,
    trained,
    whole_gradients,
    worst,
)
from tests.gloo.ranks import run_ranks
from tests.stock_torch import without_gloo_package
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.backends.facts import GLOO_FACTS
from shardwright.backends.gloo.reductions import ExchangedReductions
from shardwright.config.load import Loaded
from shardwright.layout.zero import STAGES
from shardwright.measure.communication import CommunicationRecorder
from shardwright.mesh.device_mesh import axis_of_groups
from shardwright.parallel.fsdp import FSDP, ShardOptions, Unit

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

HYBRID = {"parallelism__dp_replicate_size": 2}
BF16 = {f"precision__{name}_dtype": "bf16" for name in ("param", "reduce")} | {"precision__master_dtype": "fp32"}


def case(kind: str, model: str = LLAMA, **options: Any) -> Loaded:
    return run_file(model, parallelism__data_parallel=kind, **options)


SAME = {
    "zero1": case("zero1"),
    "zero2": case("zero2"),
    "zero3": case("zero3"),
    "zero3, one unit": case("zero3", parallelism__unit="root"),
    "zero1 hybrid": case("zero1", **HYBRID),
    "zero2 hybrid": case("zero2", **HYBRID),
    "zero3 hybrid": case("zero3", **HYBRID),
    "zero2 hybrid, unused and 0-dim": case("zero2", ODD, **HYBRID),
}
"""Float64, four ranks, two microbatches in an update (four in a hybrid of two data ranks would be one row each)."""


def bf16_sum(stage: str, replicas: int) -> Tensor:
    """Gradients of two microbatches on four ranks, sent in bf16: 256 and three times 1, then 1 on all."""
    model = nn.Sequential(nn.Linear(1, 8, bias=False))
    shape = (replicas, 4 // replicas) if replicas > 1 else (4,)
    options = ShardOptions(STAGES[stage], False, 1, torch.float32, torch.bfloat16, cpu_offload=False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    kind = FSDP(model, [Unit([model[0]])], mesh, options)
    for k in range(2):
        with kind.microbatch(last=k == 1):
            value = 256.0 if dist.get_rank() == 0 and k == 0 else 1.0
            (kind(torch.tensor([[value]])).sum()).backward()
    kind.finish_gradients()
    gradient: Any = model[0].weight.grad
    return gradient.full_tensor()


def gradients(loaded: Loaded, delayed: bool = False) -> dict[str, Tensor]:
    """Of one update, with backward slowed down at random on each rank."""
    engine = make_engine(loaded)
    if delayed:
        pause = torch.Generator().manual_seed(dist.get_rank())
        for module in engine.module.modules():
            if isinstance(module, nn.Linear):
                module.register_full_backward_hook(
                    lambda *_: time.sleep(0.004 * torch.rand((), generator=pause).item())
                )
    engine.forward_backward(batches_for(engine, 0))
    return whole_gradients(engine)


def in_flight(loaded: Loaded) -> tuple[int, int, Counter[str]]:
    """(exchanges at a time at most, exchanges in an update, collectives over the shards by kind)."""
    counts: list[int] = []
    send = ExchangedReductions.send

    def counted(reductions: ExchangedReductions, *arguments: Any) -> None:
        send(reductions, *arguments)
        counts.append(len(reductions._exchanges))

    engine = make_engine(loaded)
    with (
        mock.patch.object(ExchangedReductions, "send", counted),
        CommunicationRecorder(axis_of_groups(engine.mesh)) as recorder,
    ):
        engine.forward_backward(batches_for(engine, 0))
    kinds = Counter[str]()
    for sent in recorder.traffic():
        if sent.axis == "dp_shard":
            kinds[sent.collective] += int(sent.count)
    return max(counts), len(counts), kinds


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loaded in SAME.items():
        mine = trained(loaded, updates=2)
        with without_gloo_package():
            stock = trained(loaded, updates=2)
        first = tolerance.of_model(mine.start, ROWS * T)
        bounds = (first, first * tolerance.GROWTH, first * tolerance.GROWTH)
        pairs = [*zip(mine.gradients, stock.gradients), (mine.weights, stock.weights)]
        found[name] = [
            (difference, bound, tensor) for bound, (a, b) in zip(bounds, pairs) for difference, tensor in [worst(a, b)]
        ]
    for stage, replicas in (("zero2", 1), ("zero3", 1), ("zero1", 1), ("zero2", 2)):
        found[f"sum {stage} {replicas}"] = bf16_sum(stage, replicas)
    for options in ({}, HYBRID):
        loaded = case("zero3", **BF16, **options)
        calm, delayed = gradients(loaded), gradients(loaded, delayed=True)
        found["delayed", bool(options)] = [
            name for name, value in calm.items() if not torch.equal(value, delayed[name])
        ]
    found["in flight"] = in_flight(case("zero2"))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 4)


@pytest.mark.parametrize("name", SAME)
def test_sums_are_those_of_fully_shard(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for difference, bound, tensor in rank[name]:
            assert difference <= bound, tensor


@pytest.mark.parametrize("stage", ["zero2 1", "zero3 1"])
def test_bf16_pieces_are_summed_in_float32(stage: str, ranks: list[dict[str, Any]]) -> None:
    """256 + 1 + 1 + 1 + (1 + 1 + 1 + 1) is 263; bf16 has no number between 256 and 258."""
    for rank in ranks:
        assert rank[f"sum {stage}"].tolist() == [[263.0]] * 8


def test_zero1_sends_the_sum_of_its_microbatches(ranks: list[dict[str, Any]]) -> None:
    """256 + 1 is rounded to 256 in bf16 before it is sent; 2 from each other rank come on top."""
    for rank in ranks:
        assert rank["sum zero1 1"].tolist() == [[262.0]] * 8


def test_replicas_are_summed_once_from_what_all_microbatches_made(ranks: list[dict[str, Any]]) -> None:
    """Shards have 256 + 1 + 2 = 259 and 4; they travel as bf16, 260 and 4, and come to 264."""
    for rank in ranks:
        assert rank["sum zero2 2"].tolist() == [[264.0]] * 8


@pytest.mark.parametrize("hybrid", [False, True])
def test_sums_do_not_depend_on_who_is_late(hybrid: bool, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["delayed", hybrid] == []


def test_few_units_are_in_flight_and_gloo_reduces_nothing(ranks: list[dict[str, Any]]) -> None:
    """Two microbatches of three blocks, embedding, and norm with head."""
    for rank in ranks:
        most, count, kinds = rank["in flight"]
        assert most == GLOO_FACTS.exchanged_units
        assert count == kinds["all-to-all"] == 2 * 5
        assert set(kinds) == {"all-gather", "all-to-all"}


def _dies() -> None:
    """Rank 1 ends before its backward."""
    engine = make_engine(case("zero2"))
    batch = batches_for(engine, 0)
    if dist.get_rank() == 1:
        engine.loss_sum(batch.microbatches[0])
        os._exit(7)
    engine.forward_backward(batch)


def test_a_rank_that_is_gone_is_an_error_at_once() -> None:
    """It says that the connection is gone, not that waiting has taken too long."""
    with pytest.raises(AssertionError, match=r"rank 0 failed[\s\S]*[Cc]onnection"):
        run_ranks(_dies, 2)

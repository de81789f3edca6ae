"""Every layout on two gloo ranks without the package `backends/gloo`: torch's own implementations train the same, in float64.

What is right does not rest on that package: it makes runs on CPUs faster. The reference is one process of plain torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
from tests.gloo.engine import (
    LLAMA,
    SMALL,
    Outcome,
    assert_same_training,
    batches_for,
    make_engine,
    reference,
    run_file,
)
from tests.gloo.pipelines import all_trained
from tests.gloo.ranks import run_ranks
from tests.stock_torch import without_gloo_package

from shardwright.backends.backend import Backend, choose_backend
from shardwright.backends.facts import GLOO, TORCH_FACTS, backend_facts
from shardwright.config.load import Loaded
from shardwright.measure.communication import CommunicationRecorder
from shardwright.mesh.device_mesh import axis_of_groups

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LENGTH, UPDATES = 12, 2
BLOCKS = {"model__config_overrides": {**SMALL[LLAMA], "num_hidden_layers": 4}}
KINDS = ("ddp", "zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")


def layout(kind: str, **parallelism: Any) -> Loaded:
    keys = {f"parallelism__{key}": value for key, value in parallelism.items()}
    return run_file(LLAMA, parallelism__data_parallel=kind, data__max_length=LENGTH, **BLOCKS, **keys)


LAYOUTS = {
    **{kind: layout(kind) for kind in KINDS},
    **{f"hsdp2 {kind}": layout(kind, dp_replicate_size=2, dp_shard_size=1) for kind in ("zero1", "zero3")},
    "tp2": layout("ddp", tp_size=2),
    "tp2 whole sequences": layout("ddp", tp_size=2, sequence_parallel=False),
    "zero3+tp2": layout("zero3", tp_size=2),
    **{f"pp2:{schedule}": layout("ddp", pp_size=2, pp_schedule=schedule) for schedule in SCHEDULES},
    "zero3+pp2": layout("zero3", pp_size=2),
    **{f"{kind}+cp2": layout(kind, cp_size=2) for kind in KINDS},
    "zero2+cp2 ring": layout("zero2", cp_size=2, cp_attention="ring"),
}


@dataclass
class Found:
    """Of one rank.

    outcomes: what each layout makes of the updates.
    all_reduces: of one update of hsdp2.
    imported: modules of the package.
    """

    outcomes: dict[str, Outcome]
    all_reduces: int
    imported: list[str]


def on_torch_alone() -> Found:
    with without_gloo_package():
        assert type(choose_backend("cpu")) is Backend and backend_facts("cpu") is TORCH_FACTS
        outcomes = all_trained(LAYOUTS, length=LENGTH, updates=UPDATES)
        engine = make_engine(LAYOUTS["hsdp2 zero3"])
        with CommunicationRecorder(axis_of_groups(engine.mesh)) as recorder:
            engine.forward_backward(batches_for(engine, 0, length=LENGTH))
        counts = [int(sent.count) for sent in recorder.traffic() if sent.collective == "all-reduce"]
        imported = [name for name, module in sys.modules.items() if name.startswith(GLOO) and module is not None]
        return Found(outcomes, sum(counts), imported)


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return run_ranks(on_torch_alone, 2)


@pytest.fixture(scope="module")
def right(ranks: list[Found]) -> Outcome:
    return reference(layout("ddp"), ranks[0].outcomes["ddp"].start, length=LENGTH, updates=UPDATES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str, ranks: list[Found], right: Outcome) -> None:
    assert_same_training(ranks[0].outcomes[name], right)


def test_replicas_are_summed_once_an_update(ranks: list[Found]) -> None:
    """Four microbatches; four blocks, the embedding, and the final norm with the head."""
    assert [rank.all_reduces for rank in ranks] == [6, 6]


def test_nothing_imports_the_package(ranks: list[Found]) -> None:
    assert [rank.imported for rank in ranks] == [[], []]

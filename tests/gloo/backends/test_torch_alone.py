"""Every layout on two gloo ranks without the package `backends/gloo`: torch's own ways train the same, in float64.

What is right does not rest on that package: it makes runs on CPUs faster. The reference is one process of plain torch.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.gloo.engine import LLAMA, SMALL, Outcome, assert_same_training, reference, run_file
from tests.gloo.pipelines import all_trained
from tests.gloo.ranks import run_ranks
from tests.stock_torch import without_gloo_package

from shardwright.backends.backend import Backend, choose_backend
from shardwright.backends.facts import GLOO, TORCH_FACTS, backend_facts
from shardwright.config.load import Loaded

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


def on_torch_alone() -> tuple[dict[str, Outcome], list[str]]:
    """(what each layout makes of the updates, modules of the package that were imported) of this rank."""
    with without_gloo_package():
        assert type(choose_backend("cpu")) is Backend and backend_facts("cpu") is TORCH_FACTS
        found = all_trained(LAYOUTS, length=LENGTH, updates=UPDATES)
        return found, [name for name, module in sys.modules.items() if name.startswith(GLOO) and module is not None]


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, Outcome], list[str]]]:
    return run_ranks(on_torch_alone, 2)


@pytest.fixture(scope="module")
def right(ranks: list[tuple[dict[str, Outcome], list[str]]]) -> Outcome:
    return reference(layout("ddp"), ranks[0][0]["ddp"].start, length=LENGTH, updates=UPDATES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str, ranks: list[tuple[dict[str, Outcome], list[str]]], right: Outcome) -> None:
    assert_same_training(ranks[0][0][name], right)


def test_nothing_imports_the_package(ranks: list[tuple[dict[str, Outcome], list[str]]]) -> None:
    assert [imported for _, imported in ranks] == [[], []]

"""What each rank sends, recorded from the collectives, equals what the planner predicts: calls and bytes, on every axis.

Known-fault rows: none. The third update is recorded: the first verifies, and then ddp's ranks agree on an order of gradients.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gloo.engine import GPT2, LLAMA, QWEN3, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks

from shardwright.arch.config_json import shape_from_config
from shardwright.arch.shape import Shape
from shardwright.config.load import Loaded
from shardwright.layout.legality import check_run
from shardwright.layout.traffic import Traffic
from shardwright.measure.communication import CommunicationRecorder, compare_traffic
from shardwright.mesh.device_mesh import axis_of_groups
from shardwright.planner.problem import layout_of, problem_of
from shardwright.planner.traffic import ShardCoordinates, traffic

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LENGTH = 16
BF16 = {f"precision__{n}_dtype": "bf16" if n == "param" else "fp32" for n in ("param", "reduce", "master")}


TWO_ROWS = {"training__per_device_train_batch_size": 2}
FIVE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "head_dim": 8}


def case(model: str, kind: str, **options: Any) -> Loaded:
    sizes = ("pp", "cp", "tp", "dp_replicate")
    axes = {f"parallelism__{key}_size": options.pop(key) for key in sizes if key in options}
    options = {**TWO_ROWS, **axes, **options}
    return run_file(model, parallelism__data_parallel=kind, data__max_length=LENGTH, **options)


def recompute(mode: str) -> dict[str, str]:
    return {"memory__activation_checkpointing": mode}


def schedule(name: str) -> dict[str, Any]:
    return {"parallelism__pp_schedule": name, "model__config_overrides": FIVE}


WHOLE = {"parallelism__sequence_parallel": False}
CASES = {
    "ddp": case(GPT2, "ddp", **BF16),
    "zero3, two blocks a unit": case(LLAMA, "zero3", parallelism__unit=2),
    "hybrid": case(LLAMA, "zero3", dp_replicate=2, **BF16),
    "tp, whole sequences": case(QWEN3, "ddp", tp=2, **WHOLE, **recompute("full")),
    "tp, fused attention": case(GPT2, "zero3", tp=2),
    "tp, selective": case(LLAMA, "ddp", tp=2, **BF16, **recompute("selective")),
    "tp, alternate, whole sequences": case(LLAMA, "ddp", tp=2, **WHOLE, **recompute("alternate")),
    "pp, tied": case(QWEN3, "zero3", pp=2),
    "pp, zbv": case(LLAMA, "ddp", pp=2, **BF16, **schedule("zbv")),
    "pp tp, tied": case(QWEN3, "ddp", pp=2, tp=2),
    "cp pp": case(LLAMA, "zero3", cp=2, pp=2, **schedule("interleaved_1f1b"), **recompute("full")),
    "cp, ring": case(LLAMA, "ddp", cp=4, parallelism__cp_attention="ring", **BF16),
}
"""Vocabulary 257: pieces are uneven."""


Recorded = tuple[tuple[int, ShardCoordinates], tuple[Traffic, ...]]


def _recorded(loaded: Loaded) -> Recorded:
    """((pipeline rank, place among its peers), what this rank sent in the third update)."""
    engine = make_engine(loaded)
    recorder = CommunicationRecorder(axis_of_groups(engine.mesh))
    for update in range(2):
        engine.forward_backward(batches_for(engine, update, length=LENGTH))
        engine.step()
    with recorder:
        engine.forward_backward(batches_for(engine, 2, length=LENGTH))
    at = engine.axes.coordinates(engine.rank)
    shard = at["dp_shard"] * engine.axes.cp + at["cp"] if loaded.run.parallelism.data_parallel != "ddp" else 0
    return (at["pp"], ShardCoordinates(at["tp"], shard)), recorder.traffic()


def _all(cases: dict[str, Loaded]) -> dict[str, Recorded]:
    return {name: _recorded(loaded) for name, loaded in cases.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Recorded]]:
    return run_ranks(_all, 4, CASES)


def _shape(loaded: Loaded) -> Shape:
    spec = loaded.run.model
    config = json.loads((Path(spec.model_name_or_path) / "config.json").read_text())
    return shape_from_config(config | spec.config_overrides)


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_recorded(name: str, ranks: list[dict[str, Recorded]]) -> None:
    run, ddp = CASES[name].run, CASES[name].run.parallelism.data_parallel == "ddp"
    problem, layout = problem_of(run, _shape(CASES[name])), layout_of(run, check_run(CASES[name], 4))
    for rank in ranks:
        (stage, place), recorded = rank[name]
        rows = compare_traffic(traffic(problem, layout, stage, place=place), recorded, buckets=ddp)
        assert rows
        assert [row for row in rows if not row.equal] == [], (stage, place)


def test_the_comparison_can_tell(ranks: list[dict[str, Recorded]]) -> None:
    """One call more or one byte more is seen, and so is an axis that one side does not know."""
    _, recorded = ranks[0]["hybrid"]
    assert {t.axis for t in recorded} == {"dp_replicate", "dp_shard"}
    assert all(row.equal for row in compare_traffic(recorded, recorded, buckets=False))
    first, *rest = recorded
    for changed in (
        replace(first, count=first.count + 1),
        replace(first, payload_bytes=first.payload_bytes + 4),
    ):
        assert sum(not row.equal for row in compare_traffic([changed, *rest], recorded, buckets=False)) == 1
    unknown = replace(first, axis="tp")
    assert {r.axis for r in compare_traffic([*recorded, unknown], recorded, buckets=False) if not r.equal} == {"tp"}

"""Evaluation is one sum over targets under every layout: ranks that hold the same loss count once. Rows A03, A116."""

from __future__ import annotations

import pytest
from tests import tolerance
from tests.gloo.engine import (
    ROWS,
    batches_for,
    make_engine,
    plain_model,
    run_file,
)
from tests.gloo.ranks import run_ranks

from shardwright.config.load import Loaded

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
LENGTH = 16
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2},
    "tp2 cp2": {"tp_size": 2, "cp_size": 2},
    "tp2 zero3": {"tp_size": 2, "data_parallel": "zero3"},
}


def _loss(runs: dict[str, Loaded]) -> dict[str, tuple[float, int]]:
    found = {}
    for name, run in runs.items():
        engine = make_engine(run)
        found[name] = engine.evaluate([batches_for(engine, 0, length=LENGTH)])
    return found


def _run(**parallelism: object) -> Loaded:
    keys = {f"parallelism__{key}": value for key, value in {"data_parallel": "ddp", **parallelism}.items()}
    return run_file(data__max_length=LENGTH, **keys)


def test_evaluation_counts_each_target_once() -> None:
    """Four ranks under each layout against one."""
    rounding = tolerance.of_model(dict(plain_model(_run()).named_parameters()), ROWS * LENGTH)
    right = run_ranks(_loss, 1, {"one": _run()})[0]["one"]
    for rank in run_ranks(_loss, 4, {name: _run(**sizes) for name, sizes in LAYOUTS.items()}):
        for name, (loss, targets) in rank.items():
            assert targets == right[1], name
            assert loss == pytest.approx(right[0], rel=rounding), name

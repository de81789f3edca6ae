"""Training time and interruptions: the notes' example, Llama 3's figures, and the optimum against brute
force.
"""

from __future__ import annotations

import csv

import pytest
from tests.places import REFERENCE

from shardwright.planner.reliability import (
    DAY,
    daly_interval,
    effective_fraction,
    interruptions,
    mean_time_between_failures,
    training_flops,
    young_interval,
)


def test_the_notes_example_588e23_flops_and_about_272_days() -> None:
    assert training_flops(70e9, 1.4e12) == pytest.approx(5.88e23)
    assert round(training_flops(70e9, 1.4e12) / 25e15 / DAY) == 272


def test_default_rate_is_llama_3s_table() -> None:
    with (REFERENCE / "llama3_t5_failures.csv").open(newline="") as file:
        total = sum(int(row["count"]) for row in csv.DictReader(file))
    assert total == 419
    assert mean_time_between_failures(16384) == pytest.approx(54 * DAY / total)
    assert mean_time_between_failures(8) == pytest.approx(54 * DAY / total * 2048)


@pytest.mark.parametrize(("save", "mtbf"), [(2.0, 11135.0), (60.0, 11135.0), (300.0, 3600.0), (30.0, 1e6)])
def test_daly_interval_is_the_minimum_of_the_expected_time(save: float, mtbf: float) -> None:
    best = max(
        (effective_fraction(t, save, 600, mtbf), t)
        for t in (daly_interval(save, mtbf) * f / 1000 for f in range(200, 3000))
    )
    # tolerance: the best of a grid; near the best, the fraction is flat
    found = (effective_fraction(daly_interval(save, mtbf), save, 600, mtbf), daly_interval(save, mtbf))
    assert found == (pytest.approx(best[0], rel=1e-3), pytest.approx(best[1], rel=0.06))  # tolerance: as above


def test_young_is_dalys_first_order() -> None:
    assert young_interval(50, 1e8) == pytest.approx(1e5)
    # tolerance: the two formulas meet where saves are rare
    assert daly_interval(1.0, 1e9) == pytest.approx(young_interval(1.0, 1e9), rel=1e-4)
    assert daly_interval(100.0, 40.0) == 40.0


def test_effective_time_falls_with_devices() -> None:
    few, many = interruptions(1024, 5e12, 128), interruptions(16384, 5e12, 2048)
    assert many.effective < few.effective < 1
    assert many.failures_per_day == pytest.approx(419 / 54)

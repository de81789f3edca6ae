"""Peak memory on published rows that nothing was fitted on. Known-fault rows: none."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planner_memory_rows as published

OUTCOMES = [one for one in published.errors(published.all_memory_rows()) if one.row.validation]
ERRORS = {one.row.label: one.error for one in OUTCOMES if one.error is not None}


def test_the_median_error_is_within_ten_percent() -> None:
    """139 rows of nanotron, torchtitan and Megatron-LM; the bar is 10%, we hold 6%."""
    assert len(ERRORS) == 139
    assert median(abs(error) for error in ERRORS.values()) < 0.06


def test_hardly_any_row_is_under_estimated() -> None:
    """By more than 10%: one row of nanotron, at 12.3%, so the bar is missed by it. Rows there that need equal memory differ
    by up to 16%. It needs 4 bytes per parameter more, as much as a copy of its gradients; no run of the calibration half on
    as many replicas does, so nothing is added for it (benchmarks/planner_validation.py).
    """
    low = {label: error for label, error in ERRORS.items() if error < -0.10}
    assert list(low) == ["8.86B dp32 pp2 tp2 zero1 microbatch 1 x 8"]
    assert low.popitem()[1] > -0.125


def test_allocated_memory_of_megatron_is_within_five_percent() -> None:
    """Rows of simumax, whose own planner is within 1.4%: ours has no number fitted to them."""
    own = [one.error for one in OUTCOMES if one.row.source == "simumax" and one.error is not None]
    assert len(own) == 8
    assert max(abs(error) for error in own) < 0.035


def test_rows_with_an_unrecorded_setting_lie_between_both() -> None:
    """nanotron with tensor parallelism: 220 of 246 within 10% of the range; all others but one are over-estimated."""
    inside = [one for one in OUTCOMES if one.inside is not None]
    outside = [one for one in inside if not one.inside]
    assert len(outside) / len(inside) < 0.11
    assert sum(one.row.measured > one.predicted for one in outside) == 1


def test_runs_that_ran_out_of_memory_are_predicted_to() -> None:
    """Both published by torchtitan; every run of its that worked is predicted to fit."""
    failed = list(published.out_of_memory_rows())
    assert len(failed) == 2 and all(needed > capacity for _, needed, capacity in failed)
    ran = [row for row in published.torchtitan_rows() if not row.excluded]
    assert all(row.predicted() < 94 * published.GIB for row in ran)


def test_the_fragmentation_of_nanotron_is_the_fitted_one() -> None:
    """Found again from the calibration half alone."""
    rows = [
        row for row in published.all_memory_rows() if row.source == "nanotron" and row.layout.axes.tp <= 2
    ]
    assert published.fitted_fragmentation(rows, published.NANOTRON) == pytest.approx(
        published.NANOTRON.fragmentation, abs=0.01
    )

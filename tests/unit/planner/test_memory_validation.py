"""Peak memory on published rows that nothing was fitted on. Known-fault rows: none."""

from __future__ import annotations

import sys
from statistics import median

import pytest
from tests.places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import planner_memory_rows as published

OUTCOMES = [one for one in published.errors(published.all_memory_rows()) if one.row.validation]
ERRORS = {one.row.label: one.error for one in OUTCOMES if one.error is not None}


def test_the_median_error_is_within_ten_percent() -> None:
    """137 rows of nanotron, torchtitan and Megatron-LM; the bar is 10%."""
    assert len(ERRORS) == 137
    assert median(abs(error) for error in ERRORS.values()) < 0.09


def test_no_row_is_under_estimated_by_more_than_ten_percent() -> None:
    """Equal runs of nanotron differ by up to 16%, so the higher of them is what is planned for. A bracket counts by its end."""
    assert min(one.predicted / one.row.measured - 1 for one in OUTCOMES) > -0.095


def test_allocated_memory_of_megatron_is_within_five_percent() -> None:
    """Rows of simumax, whose own planner is within 1.4%: ours has no number fitted to them."""
    own = [one.error for one in OUTCOMES if one.row.source == "simumax" and one.error is not None]
    assert len(own) == 8
    assert max(abs(error) for error in own) < 0.035


def test_rows_with_an_unrecorded_setting_lie_between_both() -> None:
    """nanotron with tensor parallelism: 191 of 248 within 10% of the range; all others are over-estimated."""
    inside = [one for one in OUTCOMES if one.inside is not None]
    outside = [one for one in inside if not one.inside]
    assert len(outside) / len(inside) < 0.24
    assert all(one.row.measured < one.predicted for one in outside)


def test_runs_that_ran_out_of_memory_are_predicted_to() -> None:
    """Both published by torchtitan; every run of its that worked is predicted to fit."""
    failed = list(published.out_of_memory_rows())
    assert len(failed) == 2 and all(needed > capacity for _, needed, capacity in failed)
    ran = [row for row in published.torchtitan_rows() if not row.excluded]
    assert all(row.predicted() < 94 * published.GIB for row in ran)


@pytest.mark.slow
def test_the_fragmentation_of_nanotron_is_the_fitted_one() -> None:
    """Found again from the calibration half alone."""
    rows = [row for row in published.all_memory_rows() if row.source == "nanotron" and row.layout.axes.tp <= 2]
    fragmentation, margin = published.fitted_fragmentation(rows, published.NANOTRON)
    # tolerance: published to two digits
    assert fragmentation == pytest.approx(published.NANOTRON.fragmentation, abs=0.01)
    assert margin == pytest.approx(0.075)

"""A refactor leaves the losses of three tiny runs as they are, to the bit on a known machine. Covers no known fault."""

from __future__ import annotations

import pytest
from tests.golden.machine import machine
from tests.golden.runs import UPDATES, found_losses, kept

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
Found = dict[str, tuple[list[float], float]]


@pytest.fixture(scope="module")
def found() -> Found:
    return found_losses()


def assert_within(found: list[float], right: list[float], rounding: float, sensitivity: list[float], name: str) -> None:
    """Each loss to the rounding of one update, and to what the optimizer has made of the rounding of those before."""
    assert len(found) == len(right) == UPDATES
    for update, (ours, theirs, moved) in enumerate(zip(found, right, sensitivity)):
        bound = rounding * (1 + moved)
        assert abs(ours / theirs - 1) <= bound, f"{name}, update {update}: {ours} for {theirs}, {bound} is allowed"


def test_losses_in_float64_hold_anywhere(found: Found) -> None:
    """On any machine, torch version and number of threads."""
    golden = kept()
    assert {name for name in found if "fp64" in name} == golden["fp64"].keys()
    for name, right in golden["fp64"].items():
        assert right[-1] < right[0]
        losses, rounding = found[name]
        assert_within(losses, right, rounding, golden["sensitivity"][name.split(",")[0]], name)


def test_losses_in_fp32_are_those_of_float64_rounded(found: Found) -> None:
    """On any machine: within the bound of float32, of the run that starts from the same weights."""
    golden = kept()
    for name, (losses, rounding) in found.items():
        if "fp32" in name:
            right = golden["fp64"][name.replace("fp32", "fp64")]
            assert_within(losses, right, rounding, golden["sensitivity"][name.split(",")[0]], name)


def test_losses_are_bit_identical(found: Found) -> None:
    """On a machine of the file; after a change of numerics: `make golden`, and say why."""
    here = machine()
    known = [one["losses"] for one in kept()["machines"] if one["machine"] == here]
    if not known:
        pytest.skip(f"losses.json holds no bits of this machine (make golden adds them): {here}")
    assert {name: losses for name, (losses, _) in found.items() if "fp32" in name} == known[0]

"""The budget of host waits: how often the host may wait for the device in one update, for each configuration."""

from __future__ import annotations

import pytest
from tests.pretend_cuda.running import needs_pretend_cuda
from tests.pretend_cuda.waits import BUDGETS, Found, found_waits, stacks, waits
from tests.started import PATIENCE

pytestmark = [needs_pretend_cuda, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(120 * PATIENCE)]


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    return found_waits()


@pytest.mark.parametrize("name", BUDGETS)
def test_the_host_waits_no_more_than_its_budget(name: str, found: dict[str, Found]) -> None:
    assert waits(found[name]) <= BUDGETS[name].waits, f"\n{stacks(found[name])}"


def test_all_collectives_are_waited_for(found: dict[str, Found]) -> None:
    """Nothing else tells a rank that its collective has failed."""
    left = {(what, stack) for notes in found.values() for kind, what, stack, _ in notes if kind == "never waited"}
    assert not left

"""Faults that gloo may not show are found on late collectives and ordered streams."""

from __future__ import annotations

import pytest
from tests.pretend_cuda.plants import HANGS_SECONDS, PLANTS, verdicts
from tests.pretend_cuda.running import needs_pretend_cuda

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(3 * len(PLANTS) * HANGS_SECONDS)]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return verdicts("cuda", [*PLANTS])


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str, found: dict[str, str]) -> None:
    assert found[plant] != "equal"

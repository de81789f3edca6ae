"""Faults that gloo may not show are found on late collectives and ordered streams."""

from __future__ import annotations

import pytest
from tests.pretend_cuda.plants import PLANTS, plant_verdict
from tests.pretend_cuda.running import needs_pretend_cuda
from tests.started import PATIENCE

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(300 * PATIENCE)]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    assert plant_verdict(plant, "cuda", timeout=120 * PATIENCE) not in ("equal", "")

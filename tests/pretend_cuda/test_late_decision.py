"""On a GPU an update is decided on the device, and its result is read late (what the host waits for: `test_training.py`)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.pretend_cuda.decisions import BAD, OPTIMIZERS, UPDATES
from tests.pretend_cuda.running import needs_pretend_cuda, pretend_ranks

pytestmark = [needs_pretend_cuda, pytest.mark.gloo, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ran = pretend_ranks("tests.pretend_cuda.decisions")
    assert ran.code == 0 and not ran.violations, ran.output
    return json.loads(ran.output.partition("DECISIONS ")[2].splitlines()[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_device_decides_as_the_host_does(name: str, found: dict[str, Any]) -> None:
    """Weights, moments and step counters are equal bit for bit after each update, the skipped one among them."""
    case = found[name]
    assert case["known"] == [True] + [False] * (UPDATES - 1), "the first update makes the optimizer's state"
    assert case["skipped"] == [update == BAD for update in range(UPDATES)]
    assert case["stop"] == [int(update == 2) for update in range(UPDATES)]
    assert case["results"] and case["states"] == [True] * UPDATES
    assert case["unchanged"] and case["goes on"]


def test_nothing_changes_after_an_update_that_is_not_finite(found: dict[str, Any]) -> None:
    """The error comes late. No update since the bad one has changed weights or moments; after the error, updates do again."""
    assert found["stop"]["message"].startswith(f"Update {BAD}: the loss of rank 1 is not finite")
    assert found["stop"]["unchanged"] == [True] * (UPDATES - BAD)
    assert found["stop"]["again"]


@pytest.mark.parametrize("name", ("plain", "evaluated", "saved"))
def test_entries_are_those_of_their_own_update(name: str, found: dict[str, Any]) -> None:
    """metrics.jsonl is the same, whether `train` reads results at once or one update late."""
    assert found[name]["equal"] and found[name]["entries"] >= 3
    assert all(math.isfinite(loss) for loss in found[name]["losses"] if loss is not None)

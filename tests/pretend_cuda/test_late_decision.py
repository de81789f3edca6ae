"""On a GPU an update is decided on the device, and its result is read after the next update was launched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.places import EXAMPLES
from tests.pretend_cuda.decisions import BAD, OPTIMIZERS, UPDATES
from tests.pretend_cuda.running import needs_pretend_cuda, pretend, pretend_ranks

pytestmark = [needs_pretend_cuda, pytest.mark.gloo, pytest.mark.slow]

LAYOUTS = {
    "zero3": ["--parallelism.data_parallel", "zero3", "--memory.activation_checkpointing", "full"],
    "tp2, bucketed, loss in chunks": [
        *("--parallelism.tp_size", "2", "--data.batching", "bucket", "--memory.loss_chunk_tokens", "32"),
    ],
    "pp2": ["--parallelism.pp_size", "2", "--parallelism.data_parallel", "ddp"],
    "cp2, packed": ["--parallelism.cp_size", "2", "--data.batching", "pack", "--parallelism.data_parallel", "ddp"],
}


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_waits_for_no_update(name: str, tmp_path: Path) -> None:
    """From the second update on the host never waits until the device has nothing to do; in the first, once."""
    ran = pretend(
        *("train", str(EXAMPLES / "tiny.yaml"), "--hardware.device", "cuda", "--nproc-per-node", "2"),
        *("--training.max_steps", "5", "--checkpoint.output_dir", str(tmp_path), *LAYOUTS[name]),
    )
    assert ran.code == 0 and not ran.violations, ran.output
    assert ran.waits(0) == 1, ran.stacks(0)
    for update in (1, 2, 3):
        assert ran.waits(update) == 0, ran.stacks(update)

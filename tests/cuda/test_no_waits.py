"""On one GPU: an update in which torch forbids the host to wait. Skipped, with the reason, where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.places import ROOT

PRETEND = not torch.backends.cuda.is_built()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
    pytest.mark.skipif(
        PRETEND, reason="this torch has no CUDA, whose waits it could forbid (tests/pretend_cuda counts them)"
    ),
]


@pytest.mark.timeout(400)
def test_no_operator_of_an_update_waits_for_the_gpu() -> None:
    """Each kind of update runs under torch's sync debug mode, and has the losses of updates that the host decides."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*start, "-m", "tests.cuda.without_waits"], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == 5

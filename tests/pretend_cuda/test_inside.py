"""The rules of the pretend device, in a process that has pretend GPUs."""

from __future__ import annotations

import pytest
from tests.pretend_cuda.running import needs_pretend_cuda, run_on_pretend_gpus
from tests.started import PATIENCE

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(600 * PATIENCE)]


def run_inside(*arguments: str, devices: int = 2) -> str:
    """What pytest says of these files in a process with pretend GPUs; nothing may fail or be skipped."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments]
    ran = run_on_pretend_gpus(command, devices, None, 500 * PATIENCE, None)
    assert ran.code == 0, ran.output[-6000:]
    assert " skipped" not in ran.output, ran.output[-2000:]
    assert not ran.violations, "\n".join(ran.violations[:5])
    return ran.output


def test_the_device_keeps_the_rules_of_cuda() -> None:
    run_inside("tests/pretend_cuda/inside/rules.py")

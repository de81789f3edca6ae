"""Faults that gloo may not show are found on late collectives and ordered streams; and the model of streams itself."""

from __future__ import annotations

import pytest
from tests.pretend_cuda.plants import PLANTS, plant_verdict
from tests.pretend_cuda.running import needs_pretend_cuda, run_on_pretend_gpus
from tests.started import PATIENCE

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(300 * PATIENCE)]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    assert plant_verdict(plant, "cuda", timeout=120 * PATIENCE) not in ("equal", "")


START = """
import torch
from tests.pretend_cuda.installed import breaches
x = torch.ones(8, device="cuda")
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
"""
PROGRAMS = {
    "a stream reads before it waits": ("with torch.cuda.stream(side): y = x + 1", "reads what"),
    "a stream that waits": ("side.wait_stream(main)\nwith torch.cuda.stream(side): y = x + 1", ""),
    "an event is recorded too early": (
        "event = main.record_event()\nx.add_(1)\nside.wait_event(event)\nwith torch.cuda.stream(side): y = x + 1",
        "reads what",
    ),
    "memory is written while another stream reads": (
        "side.wait_stream(main)\nwith torch.cuda.stream(side): y = x + 1\nx.zero_()",
        "writes over what",
    ),
    "memory is freed while another stream reads": (
        "side.wait_stream(main)\nwith torch.cuda.stream(side): y = x + 1\ndel x\nz = torch.ones(8, device='cuda')",
        "writes over what",
    ),
    "memory is freed after record_stream": (
        "side.wait_stream(main)\nx.record_stream(side)\nwith torch.cuda.stream(side): y = x + 1\ndel x\n"
        "z = torch.ones(8, device='cuda')",
        "",
    ),
    "the host reads a copy before it waits": (
        "h = torch.zeros(8).pin_memory()\nh.copy_(x, non_blocking=True)\nassert h.isnan().all()\ntorch.cuda.synchronize()\n"
        "assert (h == 1).all()",
        "",
    ),
    "pinned memory is changed while it travels": (
        "h = torch.zeros(8).pin_memory()\nx.copy_(h, non_blocking=True)\nh.add_(1)\ntorch.cuda.synchronize()",
        "pinned memory was changed",
    ),
    "operators refuse two devices": (
        "try:\n    x + torch.ones(8)\n    raise SystemExit(1)\nexcept RuntimeError as e:\n    assert 'device' in str(e)",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_streams_are_ordered_by_events_alone(program: str) -> None:
    text, breach = PROGRAMS[program]
    ran = run_on_pretend_gpus(["-c", f"{START}{text}\nprint(breaches)"], 1, None, 100 * PATIENCE, None)
    assert ran.code == 0, ran.output
    assert [breach in text for text in ran.violations] == [True] if breach else not ran.violations, ran.violations

"""Peak memory of this process, on the accelerator and on the host."""

from __future__ import annotations

import resource
import sys

import torch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_host_bytes() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def peak_device_bytes(device: torch.device) -> tuple[int, int] | None:
    """(allocated, reserved) peaks of torch's allocator on an accelerator; None on the CPU, where torch keeps none."""
    if device.type == "cpu":
        return None
    stats = torch.accelerator.memory_stats(device)
    return int(stats["allocated_bytes.all.peak"]), int(stats["reserved_bytes.all.peak"])

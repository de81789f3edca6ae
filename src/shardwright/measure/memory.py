"""Memory of this process, on the accelerator and on the host: its peaks, and what is allocated now."""

from __future__ import annotations

import ctypes
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


class _MallocFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that the allocator has given out and not got back: torch's on an accelerator, the C library's on the CPU.

    The C library's hold what Python and libraries have allocated too. None where it does not tell (it is glibc's mallinfo2).
    """
    if device.type != "cpu":
        return int(torch.accelerator.memory_stats(device)["allocated_bytes.all.current"])
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    ask.restype = _MallocFigures
    figures = ask()
    return int(figures.uordblks + figures.hblkhd)

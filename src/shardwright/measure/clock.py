"""The only home of time: a monotonic clock for durations, and the date for records."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime

now = time.perf_counter
"""Seconds on a monotonic clock; only differences mean something."""

sleep = time.sleep
_BACKWARD_THREADS = "pt_autograd_"
"""How torch names the threads in which backward runs on a GPU; on a CPU backward runs in the thread that calls it."""
_seen: dict[str, int | None] = {}
"""Number of a thread of this process -> its open file of times, or None for a thread in which no backward runs."""
_looked = [0]
"""How many threads there were when `_seen` was completed."""
_of_thread = threading.local()


def busy() -> float:
    """Seconds that the calling thread, and torch's threads of backward, have run or were ready to run.

    Time in which they waited for other ranks does not count. The number grows faster on a rank that computes slowly or shares
    its core, and stands still in a collective. NaN without Linux's schedstat.
    """
    with suppress(OSError, ValueError):
        if not hasattr(_of_thread, "figures"):
            _of_thread.figures = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # kept open: halves the cost
        return _seconds(_of_thread.figures) + _backward_seconds()
    return float("nan")


def _backward_seconds() -> float:
    """Of the threads in which torch runs backward; they last as long as the process."""
    if (threads := os.stat("/proc/self/task").st_nlink) != _looked[0]:
        _looked[0] = threads
        for thread in os.listdir("/proc/self/task"):
            if thread not in _seen:
                with suppress(OSError):  # a thread that has just ended
                    _seen[thread] = _open_figures(f"/proc/self/task/{thread}")
    total = 0.0
    for thread, figures in _seen.items():
        if figures is not None:
            try:
                total += _seconds(figures)
            except ProcessLookupError:
                _seen[thread] = None
    return total


def _open_figures(thread: str) -> int | None:
    with open(f"{thread}/comm", encoding="utf-8", errors="replace") as name:
        is_backward = name.read().startswith(_BACKWARD_THREADS)
    return os.open(f"{thread}/schedstat", os.O_RDONLY) if is_backward else None


def _seconds(figures: int) -> float:
    running, ready, _ = os.pread(figures, 100, 0).split()
    return (int(running) + int(ready)) * 1e-9


def date() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

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
_of_thread = threading.local()


def busy() -> float:
    """Seconds that the calling thread has run or was ready to run: what it did itself, without waiting for others.

    A rank that computes slowly, or whose core is taken by something else, has more of them; one that waits in a
    collective has not. NaN where the kernel does not tell (it is Linux's schedstat).
    """
    with suppress(OSError, ValueError):
        if not hasattr(_of_thread, "figures"):
            _of_thread.figures = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # stays open: half the time
        running, ready, _ = os.pread(_of_thread.figures, 100, 0).split()
        return (int(running) + int(ready)) * 1e-9
    return float("nan")


def date() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

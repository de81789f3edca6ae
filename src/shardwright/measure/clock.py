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
    """Seconds that the calling thread has run or was ready to run; time in which it waited for other ranks does not count.

    The number grows faster on a rank that computes slowly or shares its core, and stands still in a collective. NaN without
    Linux's schedstat.
    """
    with suppress(OSError, ValueError):
        if not hasattr(_of_thread, "figures"):
            _of_thread.figures = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # kept open: halves the cost
        running, ready, _ = os.pread(_of_thread.figures, 100, 0).split()
        return (int(running) + int(ready)) * 1e-9
    return float("nan")


def date() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

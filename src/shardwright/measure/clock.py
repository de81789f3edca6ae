"""The only home of time: a monotonic clock for durations, and the date for records."""

from __future__ import annotations

import time
from datetime import UTC, datetime

now = time.perf_counter
"""Seconds on a monotonic clock; only differences mean something."""

sleep = time.sleep


def date() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

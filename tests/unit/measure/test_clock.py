"""Times that leave waiting out."""

from __future__ import annotations

import math
import time

import pytest

from shardwright.measure import clock


def test_busy_leaves_waiting_out() -> None:
    before = clock.busy()
    if math.isnan(before):
        pytest.skip("this kernel has no schedstat")
    time.sleep(1.0)
    slept = clock.busy() - before
    total = 0
    start = time.thread_time()
    while time.thread_time() - start < 0.3:
        total += 1
    assert slept < 0.5 and clock.busy() - before - slept > 0.2

"""Times that leave waiting out."""

from __future__ import annotations

import ctypes
import math
import threading
import time

import pytest

from shardwright.measure import clock

PR_SET_NAME = 15


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


def test_busy_counts_the_threads_of_backward() -> None:
    """On a GPU backward runs in torch's own thread, while the thread that calls it sleeps; other threads do not count."""
    counted = []
    for name in ("pt_autograd_0", "loader"):
        before = clock.busy()
        if math.isnan(before):
            pytest.skip("this kernel has no schedstat")
        begun, done = threading.Event(), threading.Event()

        def work(name: str = name, begun: threading.Event = begun, done: threading.Event = done) -> None:
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
            begun.set()
            start = time.thread_time()
            while time.thread_time() - start < 0.3:
                pass
            done.wait()  # torch's threads do not end

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        begun.wait()
        time.sleep(1.0)
        counted.append(clock.busy() - before)
        done.set()
        thread.join()
    assert counted[0] > 0.2 > 0.15 > counted[1]

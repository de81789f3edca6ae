"""Percentiles of the newest updates, and how a slow rank is found among many."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles

from shardwright.measure import clock
from shardwright.train.anomaly import slow_rank
from shardwright.train.metrics import RECENT_UPDATES, Recent


def test_percentiles_are_of_the_newest_updates() -> None:
    recent, seconds = Recent(), []
    assert recent.percentiles() == (None, None, None)
    draw = random.Random(0)
    for number in range(2 * RECENT_UPDATES + 7):
        seconds.append(round(draw.random(), 2))  # many are equal
        recent.add(seconds[-1])
        if number % 500 == 3 or number > 2 * RECENT_UPDATES:
            newest = seconds[-RECENT_UPDATES:]
            assert recent.percentiles() == (median(newest), quantiles(newest, n=20)[18], max(newest))


def test_the_slowest_of_many_ranks() -> None:
    """Against each rank compared with the median of its others, one by one; a million are no matter of minutes."""
    draw = random.Random(1)
    for _ in range(50):
        count = draw.randint(1, 9)
        seconds = [draw.choice([1.0, 1.1, 1.5, draw.random()]) for _ in range(count)]
        stages = [draw.randint(0, 2) for _ in range(count)]
        factors = {
            rank: own / median(others)
            for rank, own in enumerate(seconds)
            if (others := [s for r, s in enumerate(seconds) if stages[r] == stages[rank] and r != rank])
        }
        rank, factor = slow_rank(seconds, stages)
        assert factor == max([1.0, *factors.values()]) and (factor == 1 or factors[rank] == factor)
    assert slow_rank([1.0] * 999_999 + [2.0], [0] * 1_000_000) == (999_999, 2.0)  # one by one: an hour


def test_own_time_is_the_threads() -> None:
    """It goes on while a thread computes, and another thread has its own."""
    before, start = clock.busy(), time.thread_time()
    while time.thread_time() - start < 0.05:
        pass
    grown = clock.busy() - before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(clock.busy).result() < clock.busy()
    assert grown > 0.02

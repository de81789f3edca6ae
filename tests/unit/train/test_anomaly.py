"""Spikes and slow ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from shardwright.errors import SpikeError
from shardwright.train.anomaly import LEAST, SLOW_ENTRIES, SlowRanks, Spikes, slow_rank


@dataclass
class Result:
    update: int
    loss: float
    grad_norm: float = 1.0
    skipped: bool = False


def noisy(updates: int) -> list[Result]:
    """Losses that fall from 5 with alternating noise of 0.05."""
    return [Result(u, 5 - 0.01 * u + 0.05 * (-1) ** u) for u in range(updates)]


def test_a_spike_is_seen_and_noise_is_not() -> None:
    """The median of the first 20 is 4.9 (between 4.86 and 4.94), so 10% above it, 5.39, is the limit here."""
    for policy in ("continue", "warn", "stop"):
        spikes = Spikes(policy)
        assert [text for result in noisy(20) if (text := spikes.look(result))] == []
    assert Spikes("warn").look(Result(0, 1e9)) == ""  # nothing to compare with
    warn = Spikes("warn")
    for result in noisy(20):
        warn.look(result)
    assert warn.look(Result(20, 5.3)) == ""
    assert "Update 21: the loss 9.0000 is a spike" in warn.look(Result(21, 9.0))
    assert "gradient norm 50 is 50 times" in warn.look(Result(22, 4.8, grad_norm=50.0))
    assert warn.look(Result(23, math.nan, skipped=True)) == ""
    quiet, stop = Spikes("continue"), Spikes("stop")
    for result in noisy(LEAST):
        quiet.look(result)
        stop.look(result)
    assert quiet.look(Result(LEAST, 9.0)) == ""
    with pytest.raises(SpikeError, match=f"Update {LEAST}: the loss 9"):
        stop.look(Result(LEAST, 9.0))


def test_a_slow_rank_is_named_within_its_stage() -> None:
    assert slow_rank([1.0, 1.1, 1.5, 0.9], [0, 0, 0, 0]) == (2, 1.5)  # the median of the others is 1.0
    assert slow_rank([1.0, 2.0], [0, 1]) == (0, 1.0)  # stages of a pipeline do different work
    assert slow_rank([1.0, math.nan], [0, 0]) == (0, 1.0)
    assert slow_rank([1.0], [0]) == (0, 1.0)
    watch = SlowRanks()
    said = [watch.look(1, 1.5) for _ in range(SLOW_ENTRIES + 3)]
    assert [bool(text) for text in said] == [n == SLOW_ENTRIES - 1 for n in range(SLOW_ENTRIES + 3)]
    assert said[SLOW_ENTRIES - 1].startswith("Rank 1 is slow: its own work of an update takes 1.50 times")
    assert not any(SlowRanks().look(rank % 2, 1.5) for rank in range(20))

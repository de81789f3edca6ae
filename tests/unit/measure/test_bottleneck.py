"""What limits a run: one found from figures that are made up so that the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.measure.bottleneck import UpdateTimes, find_bottleneck

CALM = UpdateTimes(1.0, 0.01, 0.02, {"dp_shard": 0.03}, host_seconds=0.05, compute_seconds=0.9, products_seconds=0.7)


def test_compute_when_nothing_stands_out() -> None:
    found = find_bottleneck(CALM)
    assert found.limit == "compute" and found.share == pytest.approx(0.9)
    assert "most: the host, 5%" in found.evidence


@pytest.mark.parametrize(
    ("change", "limit", "share"),
    [
        ({"wait_seconds": 0.4}, "waiting for data", 0.4),
        ({"padding_fraction": 0.5}, "padding", 0.45),
        ({"exposed_seconds": {"tp": 0.3, "dp_shard": 0.2}}, "communication of tp", 0.3),
        ({"exposed_seconds": {"pp": 0.3}}, "pipeline idle", 0.3),
        ({"host_seconds": 0.6}, "the host", 0.6),
        ({"products_seconds": 0.2}, "memory-bound operators", 0.7),
        ({"slowest_rank": 3, "slowest_factor": 1.25}, "rank 3, slower than its peers", 0.2),
    ],
)
def test_each_limit(change: dict[str, object], limit: str, share: float) -> None:
    found = find_bottleneck(replace(CALM, **change))  # type: ignore[arg-type]
    assert found.limit == limit
    assert found.share == pytest.approx(share)
    assert str(found).startswith(f"What limits this run: {limit}, ")


def test_peers_wait_for_a_straggler_inside_of_their_collectives() -> None:
    waiting = replace(CALM, exposed_seconds={"dp_replicate": 0.3}, slowest_rank=1, slowest_factor=1.3)
    assert find_bottleneck(waiting).limit.startswith("rank 1")
    assert find_bottleneck(replace(waiting, slowest_factor=1.12)).limit == "communication of dp_replicate"


def test_what_would_not_help() -> None:
    """Another sharding does nothing for a run that starves or pads."""
    assert "another layout" in find_bottleneck(replace(CALM, wait_seconds=0.5)).helps_not
    assert "another layout" in find_bottleneck(replace(CALM, padding_fraction=0.6)).helps_not

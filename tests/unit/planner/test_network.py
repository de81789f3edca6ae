"""Collectives against hand arithmetic of rings and trees. No known-fault rows."""

from __future__ import annotations

import pytest

from shardwright.planner.hardware import find_device
from shardwright.planner.network import (
    RankGroup,
    all_reduce_seconds,
    gather_seconds,
    group_of,
    ring_bandwidth,
    send_seconds,
)

H100 = find_device("h100-sxm-80gb")


@pytest.mark.parametrize(
    ("size", "stride", "local"),
    [(8, 1, 8), (16, 1, 8), (4, 8, 1), (4, 2, 4), (8, 2, 4), (64, 8, 1), (2, 16, 1), (1, 1, 1)],
)
def test_ranks_of_a_group_in_one_node(size: int, stride: int, local: int) -> None:
    assert group_of(size, stride, 8) == RankGroup(size, local)


def test_gather_sends_n_minus_1_of_n_in_n_minus_1_steps() -> None:
    e, node = H100.efficiency, H100.node
    inside = gather_seconds(H100, RankGroup(8, 8), 8e9)
    assert inside == pytest.approx(7 * node.link_latency + 7e9 / (450e9 * e.link))
    across = gather_seconds(H100, RankGroup(4, 1), 4e9)
    assert across == pytest.approx(3 * node.network_latency + 3e9 / (50e9 * e.network))


def test_a_ring_over_nodes_uses_all_network_cards_but_never_more_than_the_links() -> None:
    e = H100.efficiency
    assert ring_bandwidth(H100, RankGroup(16, 2)) == pytest.approx(2 * 50e9 * e.network)
    assert ring_bandwidth(H100, RankGroup(16, 8)) == pytest.approx(min(8 * 50e9 * e.network, 450e9 * e.link))


def test_all_reduce_takes_the_faster_of_ring_and_tree() -> None:
    large, small = RankGroup(64, 8), RankGroup(512, 8)
    assert all_reduce_seconds(H100, large, 1e10) == pytest.approx(2 * gather_seconds(H100, large, 1e10))
    # 512 ranks and 1 MB: 2 x 511 steps would take 88 ms; a tree has 3 + 6 levels up and down.
    tree = 2 * (3 * H100.node.link_latency + 6 * H100.node.network_latency) + 2e6 / (ring_bandwidth(H100, small) / 2)
    assert all_reduce_seconds(H100, small, 1e6) == pytest.approx(tree)


def test_one_rank_sends_nothing() -> None:
    assert gather_seconds(H100, RankGroup(1, 1), 1e9) == all_reduce_seconds(H100, RankGroup(1, 1), 1e9) == 0.0


def test_notes_two_gigabytes_at_100_gb_per_second_take_20_ms() -> None:
    """The note's payload over bandwidth, without latency and at full efficiency."""
    assert pytest.approx(0.020) == 2e9 / 100e9
    assert send_seconds(H100, False, 450e9 * H100.efficiency.link) == pytest.approx(1.0 + H100.node.link_latency)

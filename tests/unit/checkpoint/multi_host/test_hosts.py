"""Hosts by what ranks see, and who keeps whose copies."""

from __future__ import annotations

import pytest

from shardwright.checkpoint.multi_host import hosts as hosts_module
from shardwright.checkpoint.multi_host.hosts import Hosts
from shardwright.checkpoint.multi_host.transfer import add_hosts


@pytest.mark.parametrize(
    ("firsts", "nodes", "of_rank", "names"),
    [
        ([0, 0, 2, 2], "aabb", (0, 0, 1, 1), ("a", "b")),
        ([0, 1, 0, 1], "abab", (0, 1, 0, 1), ("a", "b")),  # ranks take turns over hosts
        ([0, 1, 2], "aab", (0, 1, 2), ("a (host 0)", "a (host 1)", "b")),
    ],
)
def test_hosts_are_numbered_by_their_first_ranks(
    firsts: list[int], nodes: str, of_rank: tuple[int, ...], names: tuple[str, ...]
) -> None:
    assert hosts_module._grouped(firsts, list(nodes)) == (of_rank, names)


def test_copies_go_to_the_next_hosts() -> None:
    """Three hosts of 3, 2 and 1 ranks: each file on as many other hosts as asked for, at most all of them."""
    found = Hosts((0, 0, 0, 1, 1, 2), ("a", "b", "c"))
    assert [found.replica_ranks(rank, 1) for rank in range(6)] == [[3], [4], [3], [5], [5], [0]]
    assert found.replica_ranks(1, 2) == found.replica_ranks(1, 9) == [4, 5] and found.replica_ranks(1, 0) == []
    records = add_hosts(found, 1, [{"file": str(rank)} if rank != 2 else None for rank in range(6)])
    assert [record["hosts"] for record in records] == [[0, 1], [0, 1], [1, 2], [1, 2], [2, 0]]


def test_one_host_has_no_copies() -> None:
    found = Hosts((0, 0), ("a",))
    assert found.replica_ranks(1, 1) == [] and add_hosts(found, 1, [{"file": "x"}, None]) == [{"file": "x"}]

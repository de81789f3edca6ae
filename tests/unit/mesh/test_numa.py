"""The NUMA node of a GPU, read from a system's files, and the cores that a rank is bound to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.mesh import numa

ADDRESS = "0000:17:00.0"


def system(path: Path, node: str, cores: str) -> Path:
    device, home = path / "bus/pci/devices" / ADDRESS, path / "devices/system/node/node1"
    device.mkdir(parents=True)
    home.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (home / "cpulist").write_text(f"{cores}\n")
    return path


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert numa.cores_of_list(text) == cores


def test_a_rank_runs_on_the_cores_of_its_node_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    line = numa.bind_to(ADDRESS.upper(), system(tmp_path, "1", "0-3"))
    assert bound == [{2, 3}] and "node 1, 2 cores" in line


@pytest.mark.parametrize(
    ("node", "cores", "reason"), [("-1", "0-3", "does not say"), ("1", "8-9", "none of the cores")]
)
def test_a_rank_that_is_not_bound_says_why(
    node: str, cores: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    assert reason in numa.bind_to(ADDRESS, system(tmp_path, node, cores))
    assert "does not say" in numa.bind_to("0000:99:00.0", tmp_path)

"""Placement, threads and device from a launcher's variables. Covers A41, A135 and A137."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.layout.placement import (
    STARTED_HERE,
    Placement,
    available_cores,
    read_placement,
    share_of_cores,
    started_by,
    threads_per_rank,
)
from shardwright.parallel.process_group import choose_device

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29511",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[003-005,9]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_torchrun() -> None:
    assert read_placement(TORCHRUN) == Placement(5, 1, 8, 4, 2, "torchrun", "node7", 29511)
    ours = read_placement(TORCHRUN | {STARTED_HERE: "/logs/0/rank_5"})
    assert ours == Placement(5, 1, 8, 4, 2, "shardwright", "node7", 29511)


def test_slurm() -> None:
    place = read_placement(SLURM)
    assert place == Placement(5, 1, 7, 2, 4, "slurm", "gpu003", 15000 + (31 * 1234567 + 3) % 17000)
    assert 15000 <= place.master_port < 32000
    assert read_placement(SLURM | {"SLURM_NODEID": "3"}).local_world_size == 1
    assert read_placement(SLURM | {"MASTER_PORT": "4711", "MASTER_ADDR": "here"}).master_port == 4711


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1,a2", "a1"),
        ("a[1-2]", "a1"),
        ("a[08,11]-ib,b1", "a08-ib"),
        ("node-7", "node-7"),
        ("x[1-2,5],y", "x1"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert read_placement(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_older_slurm_variables() -> None:
    old = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    assert read_placement(old) == Placement(1, 1, 2, 2, 1, "slurm", "127.0.0.1", 15000)
    two = old | {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
    assert read_placement(two).master_addr == "10.0.0.1"


def test_what_is_not_a_rank() -> None:
    assert read_placement({}) == Placement(0, 0, 1, 1, 1, "single")
    pod = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }  # a machine, set by an operator
    assert started_by(pod) == "single"
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert started_by(batch_script) == "single"
    assert started_by(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) == "single"


def test_incomplete_or_wrong_variables() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK is set but WORLD_SIZE, MASTER_PORT is not"):
        read_placement({k: v for k, v in TORCHRUN.items() if k not in ("WORLD_SIZE", "MASTER_PORT")})
    with pytest.raises(ConfigError, match="RANK = `five`"):
        read_placement(TORCHRUN | {"RANK": "five"})


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A135: the share of the cores unless the user set a number. A137: torchrun's own 1 is no wish."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    assert available_cores() == 10
    assert [share_of_cores(n) for n in (1, 3, 4, 10, 16)] == [10, 3, 2, 1, 1]
    by = {
        who: Placement(0, 0, 4, 4, 1, who)
        for who in ("shardwright", "torchrun", "slurm")  # type: ignore[arg-type]
    }
    for place in by.values():
        assert threads_per_rank(None, place, {}) == 2
        assert threads_per_rank(5, place, {"OMP_NUM_THREADS": "3"}) == 5
        assert threads_per_rank(None, place, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(None, by["torchrun"], {"OMP_NUM_THREADS": "1"}) == 2
    assert threads_per_rank(None, by["shardwright"], {"OMP_NUM_THREADS": "1"}) == 1
    assert threads_per_rank(None, by["slurm"], {"SLURM_CPUS_PER_TASK": "8"}) == 8


def _machine(kind: str | None, count: int) -> Any:
    return SimpleNamespace(
        is_available=lambda: kind is not None,
        current_accelerator=lambda: torch.device(kind) if kind else None,
        device_count=lambda: count,
    )


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A41: CPU means CPU on a machine with GPUs; auto needs a device for each local rank, and says when it falls back."""
    monkeypatch.setattr(torch, "accelerator", _machine("cuda", 2))
    assert choose_device("cpu", 2) == ("cpu", "")
    assert choose_device("auto", 2) == ("cuda", "")
    assert choose_device("cuda", 1) == ("cuda", "")
    assert choose_device("auto", 3) == ("cpu", "Running on the CPU: 2 cuda device(s) for 3 local rank(s).")
    with pytest.raises(ConfigError, match=r"cuda with 3 local rank\(s\), but 2 cuda"):
        choose_device("cuda", 3)
    monkeypatch.setattr(torch, "accelerator", _machine(None, 0))
    assert choose_device("auto", 2) == ("cpu", "")
    with pytest.raises(ConfigError, match="no accelerator"):
        choose_device("cuda", 1)

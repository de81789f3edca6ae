"""Rank, threads and device from a launcher's variables. Covers A41, A135 and A137."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.mesh.cluster_environment import (
    STARTED_HERE,
    RankInfo,
    read_rank_info,
    started_by,
)
from shardwright.mesh.host_resources import (
    HostResources,
    _quotas,
    assign_devices,
    local_resources,
    share_of_cores,
    shown_device,
    threads_per_rank,
)
from shardwright.mesh.process_group import _visible_devices, choose_device

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
    assert read_rank_info(TORCHRUN) == RankInfo(5, 1, 8, 4, 2, "torchrun", "node7", 29511)
    ours = read_rank_info(TORCHRUN | {STARTED_HERE: "/logs/0/rank_5"})
    assert ours == RankInfo(5, 1, 8, 4, 2, "shardwright", "node7", 29511)


def test_slurm() -> None:
    place = read_rank_info(SLURM)
    assert place == RankInfo(5, 1, 7, 2, 4, "slurm", "gpu003", 15000 + (31 * 1234567 + 3) % 17000)
    assert 15000 <= place.master_port < 32000
    assert read_rank_info(SLURM | {"SLURM_NODEID": "3"}).local_world_size == 1
    assert read_rank_info(SLURM | {"MASTER_PORT": "4711", "MASTER_ADDR": "here"}).master_port == 4711


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
    assert read_rank_info(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_older_slurm_variables() -> None:
    old = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    assert read_rank_info(old) == RankInfo(1, 1, 2, 2, 1, "slurm", "127.0.0.1", 15000)
    two = old | {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
    assert read_rank_info(two).master_addr == "10.0.0.1"


def test_what_is_not_a_rank() -> None:
    assert read_rank_info({}) == RankInfo(0, 0, 1, 1, 1, "single")
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
        read_rank_info({k: v for k, v in TORCHRUN.items() if k not in ("WORLD_SIZE", "MASTER_PORT")})
    with pytest.raises(ConfigError, match="RANK = `five`"):
        read_rank_info(TORCHRUN | {"RANK": "five"})


def resources(cores: range, devices: tuple[str, ...] = (), **options: Any) -> HostResources:
    return HostResources("host", tuple(cores), devices=devices, **options)


def shares(*all_resources: HostResources) -> list[int]:
    return [share_of_cores(one, all_resources) for one in all_resources]


def test_cores_are_divided_by_the_ranks_that_share_them() -> None:
    """A135: 10 cores. Ranks that are bound to cores of their own keep them, and those of another machine take none."""
    assert [shares(*[resources(range(10))] * n)[0] for n in (1, 3, 4, 10, 16)] == [10, 3, 2, 1, 1]
    assert shares(resources(range(4)), resources(range(4, 10))) == [4, 6]
    assert shares(resources(range(8)), resources(range(8)), resources(range(8, 10))) == [4, 4, 2]
    assert shares(resources(range(10)), HostResources("other", tuple(range(10)))) == [10, 10]
    # cores 0 to 3 are shared by two, 4 to 7 by one each: 4/2 + 4 and 4/2
    assert shares(resources(range(8)), resources(range(4))) == [6, 2]


def test_limits_of_a_control_group_and_a_slurm_task() -> None:
    """A container with 3.5 cores' time on a machine of 32; four ranks in one task of 8 cores; a task of 8 on 4 cores."""
    assert shares(resources(range(32), group="a", quota=3.5)) == [3]
    assert shares(*[resources(range(32), group="a", quota=8.0)] * 2, resources(range(32), group="b", quota=8.0)) == [
        4,
        4,
        8,
    ]
    assert shares(*[resources(range(32), task="1.0.0", task_cores=8)] * 4) == [2] * 4
    bound = [resources(range(8 * n, 8 * n + 8), task=f"1.0.{n}", task_cores=8) for n in range(4)]
    assert shares(*bound) == [8] * 4
    assert shares(resources(range(4), task="1.0.0", task_cores=8)) == [4]


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({"pod/run/cpu.max": "max 100000", "pod/cpu.max": "250000 100000"}, [2.5]),
        ({"pod/run/cpu.max": "100000 50000", "cpu.max": "800000 100000"}, [2.0, 8.0]),
        ({"pod/run/cpu.cfs_quota_us": "-1", "pod/run/cpu.cfs_period_us": "100000"}, []),
        ({"pod/run/cpu.cfs_quota_us": "150000", "pod/run/cpu.cfs_period_us": "100000"}, [1.5]),
        ({}, []),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, files: dict[str, str], quotas: list[float]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(_quotas("/pod/run", tmp_path)) == quotas


def test_local_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a task of srun is limited by SLURM_CPUS_PER_TASK: a batch script has the cores of all its tasks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3}, raising=False)
    assert local_resources({}).cores == (3, 5) and local_resources({}).task_cores is None
    assert local_resources(SLURM | {"SLURM_CPUS_PER_TASK": "6"}).task_cores == 6
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "6"}
    assert local_resources(batch).task_cores is None
    assert local_resources({}, ("a",)) == HostResources.read(
        json.loads(json.dumps(asdict(local_resources({}, ("a",)))))
    )


def test_threads() -> None:
    """A135: the share of the cores unless the user set a number. A137: torchrun's own 1 is no wish."""
    by = {
        who: RankInfo(0, 0, 4, 4, 1, who)
        for who in ("shardwright", "torchrun", "slurm")  # type: ignore[arg-type]
    }
    mine, all_resources = resources(range(10)), [resources(range(10))] * 4
    for place in by.values():
        assert threads_per_rank(None, place, {}, mine, all_resources) == 2
        assert threads_per_rank(5, place, {"OMP_NUM_THREADS": "3"}, mine, all_resources) == 5
        assert threads_per_rank(None, place, {"OMP_NUM_THREADS": "3"}, mine, all_resources) == 3
    assert threads_per_rank(None, by["torchrun"], {"OMP_NUM_THREADS": "1"}, mine, all_resources) == 2
    assert threads_per_rank(None, by["shardwright"], {"OMP_NUM_THREADS": "1"}, mine, all_resources) == 1


def test_devices_are_given_once() -> None:
    """One device for each task, of which every rank's is number 0; all devices for all; some of them for some."""
    one_each = [resources(range(8), (f"GPU-{n}",)) for n in range(4)]
    assert assign_devices(one_each) == [0, 0, 0, 0]
    all_see = [resources(range(8), ("a", "b", "c"))] * 4
    assert assign_devices(all_see) == [0, 1, 2, None]
    assert assign_devices([resources(range(8), ("a", "b")), resources(range(8), ("a",))]) == [1, 0]
    assert assign_devices([HostResources("x", (0,), devices=("0",)), HostResources("y", (0,), devices=("0",))]) == [
        0,
        0,
    ]
    assert assign_devices([resources(range(8), ("a",))] * 2) == [0, None]


def test_device() -> None:
    """A41: CPU means CPU on a machine with GPUs; auto needs a device for each local rank, and says when it falls back."""
    two = resources(range(8), ("a", "b"))
    assert choose_device("cpu", [two] * 2) == ("cpu", "")
    assert choose_device("auto", [two] * 2) == ("cuda", "")
    assert choose_device("cuda", [two]) == ("cuda", "")
    assert choose_device("auto", [two] * 3) == (
        "cpu",
        "Running on the CPU: 2 cuda device(s) for 3 local rank(s).",
    )
    with pytest.raises(ConfigError, match=r"cuda with 3 local rank\(s\), but 2 cuda"):
        choose_device("cuda", [two] * 3)
    one = resources(range(8), ("a",))
    assert choose_device("cuda", [one, resources(range(8), ("b",))]) == ("cuda", "")
    with pytest.raises(ConfigError, match=r"4 local rank\(s\), but 1 cuda.*each see a device of its own"):
        choose_device("cuda", [one] * 4)
    none = resources(range(8))
    assert choose_device("auto", [none] * 2) == ("cpu", "")
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda", [none])


@pytest.mark.parametrize(
    ("shown", "index", "name"),
    [
        ({}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 1, "6"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, "0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f,MIG-1/2/0"}, 1, "MIG-1/2/0"),
        ({"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "2"}, 0, "5"),
        ({"ROCR_VISIBLE_DEVICES": "6,7"}, 1, "7"),
        ({"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}, 0, "7"),
        ({"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}, 0, "3"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b", "HIP_VISIBLE_DEVICES": "1,0"}, 0, "GPU-b"),
    ],
)
def test_what_the_batch_system_shows(shown: dict[str, str], index: int, name: str) -> None:
    assert shown_device(shown, index) == name


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task sees one device as number 0: the device's own name tells, else what the batch system has shown."""
    cuda = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 1
    )
    monkeypatch.setattr(torch, "accelerator", cuda)
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    properties = SimpleNamespace(uuid="GPU-8f")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert _visible_devices("auto", identify=True) == ("GPU-8f",)
    assert _visible_devices("auto", identify=False) == ("0",)
    assert _visible_devices("cpu", identify=True) == ()
    del properties.uuid
    assert _visible_devices("cuda", identify=True) == ("3",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1/2/0")
    assert _visible_devices("cuda", identify=True) == ("MIG-1/2/0",)
    cuda.current_accelerator = lambda: torch.device("xpu")
    assert _visible_devices("auto", identify=True) == ()

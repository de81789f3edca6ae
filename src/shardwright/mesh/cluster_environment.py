"""What the environment says of a rank: its number among all ranks and on its host, and where ranks meet.

The environment is an argument. A rank is started by `shardwright` itself, by torchrun, by Slurm's srun, or is the only process;
no later code may depend on the launcher.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.errors import ConfigError

StartedBy = Literal["shardwright", "torchrun", "slurm", "single"]

STARTED_HERE = "SHARDWRIGHT_RANK_DIR"
"""Set by the launcher in its ranks: the directory of the rank's logs."""
STORE_FD = "SHARDWRIGHT_STORE_FD"
"""Set by the launcher in rank 0: a listening socket for the store, opened by the parent so that no port can collide."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun and by our launcher: how often this job's ranks were started anew."""
JOB = "SHARDWRIGHT_JOB"
"""Set by the launcher in its ranks: the name of the job, the same at each start of them."""

_SRUN_MARKS = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop and save. A terminal that is closed sends SIGHUP, unless nohup ignores that signal."""
    always = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


@dataclass(frozen=True)
class RankInfo:
    """A rank among all ranks (`rank` of `world_size`) and on its host (`local_rank` of `local_world_size`)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    started_by: StartedBy
    master_addr: str = ""
    master_port: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Job:
    """The job of a process. name: empty where no launcher names the job. again: a scheduler or launcher restarted the job."""

    name: str = ""
    again: bool = False


def job_of(environment: Mapping[str, str]) -> Job:
    """The job of a process, named by our launcher, else by Slurm, else by torchrun."""
    again = any(environment.get(count, "0") not in ("", "0") for count in (RESTARTS, "SLURM_RESTART_COUNT"))
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    names = (
        environment.get(JOB, ""),
        f"slurm {environment['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environment else "",
        f"torchrun {run}" if run != "none" else "",
        f"torchrun {environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        if "LOCAL_RANK" in environment
        else "",
    )
    return Job(next(filter(None, names), ""), again)


def started_by(environment: Mapping[str, str]) -> StartedBy:
    """The launcher that started this process as a rank; `single` without a launcher.

    `LOCAL_RANK` is the sign of torchrun: cluster operators set `RANK` and `WORLD_SIZE` for whole machines too. A batch
    script has Slurm's task variables without being a task, so a mark of srun is asked for; one task is no launcher.
    """
    if STARTED_HERE in environment:
        return "shardwright"
    if "LOCAL_RANK" in environment:
        return "torchrun"
    return "slurm" if in_slurm_task(environment) and _slurm_tasks(environment) > 1 else "single"


def in_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process or one above it; a batch script is no task."""
    return "SLURM_PROCID" in environment and any(mark in environment for mark in _SRUN_MARKS)


def slurm_task_cores(environment: Mapping[str, str]) -> int | None:
    """The cores that were asked for a Slurm task; None where none were."""
    return _integer(environment, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in environment else None


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """What torchrun's variables say of this rank, else Slurm's, else a single process.

    Raises `ConfigError` when variables are missing or are no numbers.
    """
    by = started_by(environment)
    if by == "single":
        return RankInfo(0, 0, 1, 1, 1, by)
    if by == "slurm":
        return _slurm_rank_info(environment)
    missing = [name for name in _TORCHRUN if name not in environment]
    if missing:
        raise ConfigError(
            f"LOCAL_RANK is set but {', '.join(missing)} is not.",
            "A rank needs all of torchrun's variables.",
            "Start with torchrun or `shardwright ... --nproc-per-node N`, or unset LOCAL_RANK.",
        )
    world_size, local_world_size = (_integer(environment, "WORLD_SIZE"), _integer(environment, "LOCAL_WORLD_SIZE"))
    nodes = -(-world_size // local_world_size)
    return RankInfo(
        rank=_integer(environment, "RANK"),
        local_rank=_integer(environment, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=_integer(environment, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environment else nodes,
        started_by=by,
        master_addr=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT"),
        restarts=_integer(environment, RESTARTS) if RESTARTS in environment else 0,
    )


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} = `{environment[name]}` is not a whole number.") from None


def _first_set(environment: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if name in environment), None)


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    name = _first_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return _integer(environment, name) if name else 1


def _slurm_rank_info(environment: Mapping[str, str]) -> RankInfo:
    tasks = _slurm_tasks(environment)
    name = _first_set(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodes = _integer(environment, name) if name else 1
    # A fixed rule from the job's and the step's number: all ranks find the same port without talking. Below the
    # range that Linux hands out by itself.
    job = _integer(environment, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environment else 0
    step = _integer(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    port = 15000 + (31 * job + step) % 17000
    return RankInfo(
        rank=_integer(environment, "SLURM_PROCID"),
        local_rank=_integer(environment, "SLURM_LOCALID"),
        world_size=tasks,
        local_world_size=_slurm_local_tasks(environment, tasks, nodes),
        nodes=nodes,
        started_by="slurm",
        master_addr=environment.get("MASTER_ADDR") or _slurm_first_host(environment, nodes),
        master_port=_integer(environment, "MASTER_PORT") if "MASTER_PORT" in environment else port,
    )


def _slurm_local_tasks(environment: Mapping[str, str], tasks: int, nodes: int) -> int:
    """Tasks on this node: `SLURM_STEP_TASKS_PER_NODE` is `2(x3),1` for three nodes with two tasks and one with one."""
    name = _first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name and "SLURM_NODEID" in environment:
        counts: list[int] = []
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment[name]):
            counts += [int(count)] * int(repeat or 1)
        return counts[_integer(environment, "SLURM_NODEID")]
    if "SLURM_NTASKS_PER_NODE" in environment:
        return _integer(environment, "SLURM_NTASKS_PER_NODE")
    return -(-tasks // nodes)


def _slurm_first_host(environment: Mapping[str, str], nodes: int) -> str:
    """The machine of rank 0: `gpu[003-006,9],x1` is gpu003. srun itself may run on a login node, so it comes last."""
    if nodes == 1:
        return "127.0.0.1"
    name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", environment[name]) if name else None
    if match:
        return "".join(part or "" for part in match.groups())
    if "SLURM_LAUNCH_NODE_IPADDR" in environment:
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    raise ConfigError(
        f"Slurm started {nodes} nodes but names none of them.",
        "The ranks must meet on the machine of rank 0.",
        "Set MASTER_ADDR, or start with srun.",
    )

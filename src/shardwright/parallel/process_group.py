"""Where this rank stands and the group it joins: the home of rank variables and of `torch.distributed` set-up.

A rank is started by `shardwright` itself, by torchrun, by Slurm's srun, or is the only process. All four end in the
same `Connection`, so that nothing later depends on how a run was started.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from shardwright.errors import ConfigError, ShardwrightError

StartedBy = Literal["shardwright", "torchrun", "slurm", "single"]

STARTED_HERE = "SHARDWRIGHT_RANK_DIR"
"""Set by launch.py in its ranks: the directory of the rank's logs."""
STORE_FD = "SHARDWRIGHT_STORE_FD"
"""Set by launch.py in rank 0: a listening socket for the store, opened by the parent so that no port can collide."""
MALLOC_MMAP = "MALLOC_MMAP_THRESHOLD_"
MALLOC_TRIM = "MALLOC_TRIM_THRESHOLD_"

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SECONDS_FOR_THE_LAST = 5
"""How long rank 0, which holds the store, waits at the end for ranks that are still leaving."""

_SRUN_MARKS = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_HOST",
)
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Placement:
    """A rank among all ranks (`rank` of `world_size`) and on its machine (`local_rank` of `local_world_size`)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    started_by: StartedBy
    master_addr: str = ""
    master_port: int = 0


def started_by(environment: Mapping[str, str] | None = None) -> StartedBy:
    """Who started this process as a rank; `single` when nobody did.

    `LOCAL_RANK` is the sign of torchrun: cluster operators set `RANK` and `WORLD_SIZE` for whole machines too. A batch
    script has Slurm's task variables without being a task, so a mark of srun is asked for; one task is no launcher.
    """
    environment = os.environ if environment is None else environment
    if STARTED_HERE in environment:
        return "shardwright"
    if "LOCAL_RANK" in environment:
        return "torchrun"
    if "SLURM_PROCID" in environment and any(mark in environment for mark in _SRUN_MARKS):
        return "slurm" if _slurm_tasks(environment) > 1 else "single"
    return "single"


def read_placement(environment: Mapping[str, str] | None = None) -> Placement:
    """The placement that torchrun's variables name, else Slurm's, else of a single process.

    Raises `ConfigError` when variables are missing or are no numbers.
    """
    environment = os.environ if environment is None else environment
    by = started_by(environment)
    if by == "single":
        return Placement(0, 0, 1, 1, 1, by)
    if by == "slurm":
        return _slurm_placement(environment)
    missing = [name for name in _TORCHRUN if name not in environment]
    if missing:
        raise ConfigError(
            f"LOCAL_RANK is set but {', '.join(missing)} is not.",
            "A rank needs all of torchrun's variables.",
            "Start with torchrun or `shardwright ... --nproc-per-node N`, or unset LOCAL_RANK.",
        )
    world_size, local_world_size = (
        _integer(environment, "WORLD_SIZE"),
        _integer(environment, "LOCAL_WORLD_SIZE"),
    )
    nodes = -(-world_size // local_world_size)
    return Placement(
        rank=_integer(environment, "RANK"),
        local_rank=_integer(environment, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=_integer(environment, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environment else nodes,
        started_by=by,
        master_addr=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT"),
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


def _slurm_placement(environment: Mapping[str, str]) -> Placement:
    tasks = _slurm_tasks(environment)
    name = _first_set(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodes = _integer(environment, name) if name else 1
    # A fixed rule from the job's and the step's number: all ranks find the same port without talking. Below the
    # range that Linux hands out by itself.
    job = _integer(environment, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environment else 0
    step = _integer(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    port = 15000 + (31 * job + step) % 17000
    return Placement(
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


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(local_ranks: int) -> int:
    """CPU threads of one of `local_ranks` ranks: its share of the cores, at least 1."""
    return max(1, available_cores() // local_ranks)


def threads_per_rank(
    requested: int | None, placement: Placement, environment: Mapping[str, str] | None = None
) -> int:
    """CPU threads of a rank: as requested, else the user's `OMP_NUM_THREADS`, else its share of the cores.

    torchrun sets `OMP_NUM_THREADS=1` where the user set nothing. That is not a wish, and would make the number of
    threads depend on how the run was started, so under torchrun a 1 is ignored: request 1 to have it.
    """
    environment = os.environ if environment is None else environment
    if requested is not None:
        return requested
    wish = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and int(wish) > 0 and not (placement.started_by == "torchrun" and wish == "1"):
        return int(wish)
    if placement.started_by == "slurm" and "SLURM_CPUS_PER_TASK" in environment:
        return _integer(environment, "SLURM_CPUS_PER_TASK")
    return share_of_cores(placement.local_world_size)


def device_kind(requested: str, local_ranks: int) -> str:
    """`cpu` or `cuda` for `local_ranks` ranks on this machine; see `choose_device`."""
    return choose_device(requested, local_ranks)[0]


def choose_device(requested: str, local_ranks: int) -> tuple[str, str]:
    """(`cpu` or `cuda`, notice): as requested; `auto` is CUDA when there is a device for each local rank.

    The notice is empty unless `auto` leaves a device unused. Raises `ConfigError` when CUDA is requested and is not
    there. A visible device never changes what `cpu` means.
    """
    if requested == "cpu":
        return "cpu", ""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else "none"
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if kind == "cuda" and count >= local_ranks:
        return "cuda", ""
    if requested == "auto":
        if kind == "none":
            return "cpu", ""
        return "cpu", f"Running on the CPU: {count} {kind} device(s) for {local_ranks} local rank(s)."
    found = f"{count} {kind} device(s) found" if kind != "none" else "torch finds no accelerator"
    raise ConfigError(
        f"hardware.device = {requested} with {local_ranks} local rank(s), but {found}.",
        "Each rank needs a CUDA device of its own.",
        "Start fewer ranks, or set hardware.device to cpu or auto.",
    )


@dataclass(frozen=True)
class Connection:
    """A rank that has joined the default process group.

    `keeps_freed_blocks`: glibc keeps large freed blocks instead of returning them to the kernel. `notices`: lines that
    a person should see.
    """

    placement: Placement
    device: torch.device
    backend: str
    threads: int
    cores: int
    timeout_seconds: float
    keeps_freed_blocks: bool
    notices: tuple[str, ...] = ()

    def configuration(self) -> dict[str, Any]:
        """What a run record holds of this: the same on every rank and however the run was started."""
        place = asdict(self.placement)
        kept = {name: place[name] for name in ("world_size", "local_world_size", "nodes")}
        return kept | {
            "device": self.device.type,
            "backend": self.backend,
            "threads": self.threads,
            "cores": self.cores,
            "timeout_seconds": self.timeout_seconds,
            "keeps_freed_blocks": self.keeps_freed_blocks,
        }


@contextmanager
def connect(
    device: str = "auto", timeout_seconds: float = 600, threads: int | None = None
) -> Iterator[Connection]:
    """Joins the default process group, of one rank too, and leaves it at the end. Collective.

    device: `auto`, `cpu` or `cuda`. timeout_seconds: a collective that takes longer fails. threads: CPU threads of this
    rank; see `threads_per_rank`. Raises `ConfigError` for a device that is not there and `ShardwrightError` when a SUM
    over ranks is wrong.
    """
    placement = read_placement()
    kind, notice = choose_device(device, placement.local_world_size)
    torch.set_num_threads(threads_per_rank(threads, placement))
    kept = kind == "cpu" and _keep_freed_blocks()
    place = torch.device(kind, placement.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.accelerator.set_device_index(placement.local_rank)
    store = _join(placement, place, timedelta(seconds=timeout_seconds))
    connection = Connection(
        placement=placement,
        device=place,
        backend=BACKENDS[kind],
        threads=torch.get_num_threads(),
        cores=available_cores(),
        timeout_seconds=timeout_seconds,
        keeps_freed_blocks=kept,
        notices=(notice,) if notice else (),
    )
    try:
        self_test(place)
        yield connection
    except BaseException:
        # Destroying a group waits for its queued work, which cannot end when a peer is gone. The process is about to
        # end, and its sockets with it, which is what the peers notice.
        if placement.world_size == 1:
            dist.destroy_process_group()
        raise
    _leave(placement, store)


def _join(placement: Placement, device: torch.device, timeout: timedelta) -> Store | None:
    """Makes the default group; returns the store when this job holds it."""
    options: dict[str, Any] = {"backend": BACKENDS[device.type], "timeout": timeout}
    if device.type == "cuda":
        options["device_id"] = device
    if placement.started_by == "torchrun":
        dist.init_process_group(**options)
        return None
    store: Store
    if placement.world_size == 1:
        store = HashStore()
    else:
        held = os.environ.get(STORE_FD) if placement.started_by == "shardwright" else None
        store = TCPStore(
            placement.master_addr,
            placement.master_port,
            placement.world_size,
            is_master=placement.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(held) if held else None,
        )
    dist.init_process_group(store=store, rank=placement.rank, world_size=placement.world_size, **options)
    return store


def _leave(placement: Placement, store: Store | None) -> None:
    """Destroys the group; the rank that holds the store goes last, as far as the others are still there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if store is None or placement.world_size == 1:
        return
    with suppress(dist.DistError):  # a peer, or rank 0 with the store, is already gone
        store.set(f"left/{placement.rank}", "1")
        if placement.rank == 0:
            others = [f"left/{rank}" for rank in range(1, placement.world_size)]
            store.wait(others, timedelta(seconds=SECONDS_FOR_THE_LAST))


def self_test(device: torch.device) -> None:
    """Raises `ShardwrightError` unless SUM sums, for all-reduce and reduce-scatter, on this group. Collective.

    Every gradient rests on it, and torch once had a gloo reduction that did not do what its name says
    (pytorch/pytorch#162338).
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    of_ranks = size * (size + 1) // 2
    reduced = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    pieces = torch.arange(1.0, size + 1, device=device) * (rank + 1)
    scattered = torch.empty(1, device=device)
    reduce_scatter = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )  # renamed in 2.13
    reduce_scatter(scattered, pieces, op=dist.ReduceOp.SUM)
    for name, found, right in (
        ("all_reduce", reduced.item(), of_ranks),
        ("reduce_scatter", scattered.item(), of_ranks * (rank + 1)),
    ):
        if found != right:
            average = found == right / size
            raise ShardwrightError(
                f"{name} with SUM over {size} ranks gives {found:g} where {right} is right"
                + (" (it averages)." if average else "."),
                f"Gradients would be wrong without a word (torch {torch.__version__}, {dist.get_backend()}).",
                "Use another torch version or backend.",
            )


def _keep_freed_blocks() -> bool:
    """Tells glibc to keep large freed blocks, unless the environment has set its thresholds; returns whether it does.

    Blocks over 32 MB are otherwise mapped, and their pages fault, at every allocation: 4 to 5% of a training step.
    The launcher sets the variables; this is for the other ways to start.
    """
    if MALLOC_MMAP in os.environ:
        value = os.environ[MALLOC_MMAP]
        return value.isdecimal() and int(value) >= 2**31 - 1
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    return bool(libc.mallopt(m_mmap_threshold, 2**31 - 1) and libc.mallopt(m_trim_threshold, -1))

"""The process group that a rank joins, its device and its threads: the only home of `torch.distributed` set-up.

However a rank was started (see `layout/placement.py`), it ends in the same `Connection`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.layout.placement import (
    MALLOC_MMAP,
    STORE_FD,
    Placement,
    available_cores,
    read_placement,
    threads_per_rank,
)

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
JOIN_SECONDS = 300
"""How long ranks, which load at different speeds, wait for each other at least, however short a collective may be."""
SECONDS_FOR_THE_LAST = 5
"""How long rank 0, which holds the store, waits at the end for ranks that are still leaving."""


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
    placement = read_placement(os.environ)
    kind, notice = choose_device(device, placement.local_world_size)
    torch.set_num_threads(threads_per_rank(threads, placement, os.environ))
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
            timeout=max(timeout, timedelta(seconds=JOIN_SECONDS)),
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


def transfer_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A gloo group of all ranks beside the default one, for bytes that travel while training does. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


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

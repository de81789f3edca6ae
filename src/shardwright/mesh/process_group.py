"""Joins a rank to the default process group, and chooses its device and threads: the only place of `torch.distributed` set-up.

Every launcher (see `mesh/cluster_environment.py`) leads to the same `Connection`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.facts import ALLOCATOR, backend_facts
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.mesh.cluster_environment import RankInfo, read_rank_info
from shardwright.mesh.host_resources import (
    HostResources,
    assign_devices,
    local_resources,
    share_of_cores,
    shown_device,
    threads_per_rank,
)
from shardwright.mesh.numa import bind_to
from shardwright.mesh.rendezvous import Rendezvous, announce_exit

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SECONDS_FOR_THE_LAST = 5
"""How long rank 0, which holds the store, waits at the end for ranks that are still leaving."""


def cores_here() -> int:
    """CPU cores that this process may use alone."""
    resources = local_resources(os.environ)
    return share_of_cores(resources, [resources])


def device_kind(requested: str, local_ranks: int) -> str:
    """`cpu` or `cuda` for `local_ranks` ranks that this process starts; see `choose_device`."""
    resources = local_resources(os.environ, _visible_devices(requested, identify=False))
    return choose_device(requested, [resources] * local_ranks)[0]


def choose_device(requested: str, all_resources: Sequence[HostResources]) -> tuple[str, str]:
    """(`cpu` or `cuda`, notice) for ranks on `all_resources`: as requested; `auto` is CUDA when there is a device for each.

    The notice is empty unless `auto` leaves a device unused. Raises `ConfigError` when CUDA is requested and not
    available. A visible device never changes what `cpu` means.
    """
    if requested == "cpu":
        return "cpu", ""
    given = assign_devices(all_resources)
    if None not in given:
        return "cuda", ""
    without = all_resources[given.index(None)]
    local = [resources for resources in all_resources if resources.host == without.host]
    found = len({device for resources in local for device in resources.devices})
    if requested == "auto":
        if not any(resources.devices for resources in all_resources):
            return "cpu", ""
        return "cpu", f"Running on the CPU: {found} cuda device(s) for {len(local)} local rank(s)."
    text = f"{found} cuda device(s) found" if found else "torch finds no CUDA device"
    raise ConfigError(
        f"hardware.device = {requested} with {len(local)} local rank(s), but {text}.",
        "Each rank needs a CUDA device of its own.",
        "Start fewer ranks, let each see a device of its own, or set hardware.device to cpu or auto.",
    )


def _visible_devices(requested: str, identify: bool) -> tuple[str, ...]:
    """Names of the CUDA devices that this process sees, by index.

    identify: names that are the same in every process. A batch system may show each rank another device as number 0. It makes
    torch load CUDA, which a process that forks must not.
    """
    if requested == "cpu" or not torch.accelerator.is_available():
        return ()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        return ()
    indices = range(torch.accelerator.device_count())
    if not identify:
        return tuple(map(str, indices))
    names = []
    for index in indices:
        name = shown_device(os.environ, index)
        if not name.startswith("MIG"):  # a part of one device
            name = str(getattr(torch.cuda.get_device_properties(index), "uuid", name))
        names.append(name)
    return tuple(names)


@dataclass(frozen=True)
class Connection:
    """A rank that has joined the default process group.

    `allocator`: how the environment sets torch's allocator of GPU memory. `keeps_freed_blocks`: glibc keeps large freed blocks
    instead of returning them to the kernel. `notices`: lines that a person should see.
    """

    rank_info: RankInfo
    device: torch.device
    backend: str
    threads: int
    cores: int
    timeout_seconds: float
    keeps_freed_blocks: bool
    notices: tuple[str, ...] = ()
    allocator: str = ""

    def configuration(self) -> dict[str, Any]:
        """The fields that a run record holds: the same on every rank and under every launcher."""
        place = asdict(self.rank_info)
        kept = {name: place[name] for name in ("world_size", "local_world_size", "nodes")}
        return kept | {
            "device": self.device.type,
            "backend": self.backend,
            "threads": self.threads,
            "cores": self.cores,
            "timeout_seconds": self.timeout_seconds,
            "keeps_freed_blocks": self.keeps_freed_blocks,
            "allocator": self.allocator,
            "float32_products": torch.get_float32_matmul_precision(),
        }


@contextmanager
def connect(
    device: str = "auto",
    timeout_seconds: float = 600,
    threads: int | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    numa_binding: bool = True,
) -> Iterator[Connection]:
    """Joins the default process group, of one rank too, and leaves it at the end. Collective.

    device: `auto`, `cpu` or `cuda`. timeout_seconds: a collective that takes longer fails. threads: CPU threads of this
    rank; see `threads_per_rank`. numa_binding: see `mesh/numa.py`. asked_to_stop: whether this process was told to stop, asked
    while it waits for other ranks.
    Raises `ConfigError` for a missing device and for an address where ranks cannot meet, `StoppedEarly` when asked to
    stop, and `ShardwrightError` when ranks are missing or a SUM over ranks is wrong.
    """
    rank_info = read_rank_info(os.environ)
    identify = rank_info.world_size > 1
    mine = local_resources(os.environ, _visible_devices(device, identify))
    rendezvous = Rendezvous(rank_info, os.environ, timeout_seconds, asked_to_stop)
    all_resources = rendezvous.exchange(mine)
    kind, notice = choose_device(device, all_resources)
    torch.set_num_threads(threads_per_rank(threads, rank_info, os.environ, mine, all_resources))
    cores = cores_here()  # before a rank is bound to a NUMA node: the same on all ranks of a host
    kept = backend_facts(kind).keep_freed_blocks(os.environ)
    notices = [notice] if notice else []
    allocator = next((os.environ[name] for name in ALLOCATOR if name in os.environ), "") if kind == "cuda" else ""
    place = torch.device(kind)
    options: dict[str, Any] = {"backend": BACKENDS[kind], "timeout": timedelta(seconds=timeout_seconds)}
    if kind == "cuda":
        place = torch.device(kind, assign_devices(all_resources)[rank_info.rank] or 0)
        torch.accelerator.set_device_index(place.index)
        options["device_id"] = place
        if numa_binding:
            notices.append(bind_to(pci_address(place)))
        if not allocator and rank_info.started_by != "shardwright":
            notices.append(
                f"{ALLOCATOR[0]} is not set: expandable_segments:True would keep GPU memory from fragmenting."
            )
    dist.init_process_group(store=rendezvous.store, rank=rank_info.rank, world_size=rank_info.world_size, **options)
    connection = Connection(
        rank_info=rank_info,
        device=place,
        backend=BACKENDS[kind],
        threads=torch.get_num_threads(),
        cores=cores,
        timeout_seconds=timeout_seconds,
        keeps_freed_blocks=kept,
        notices=tuple(notices),
        allocator=allocator,
    )
    try:
        self_test(place)
        yield connection
    except BaseException:
        # Destroying a group waits for its queued work, which cannot end when a peer is gone. The process is about to
        # end, and its sockets with it, which is what the peers notice.
        if rank_info.world_size == 1:
            dist.destroy_process_group()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    if rendezvous.holds_store and rank_info.world_size > 1:
        announce_exit(rendezvous.store, rank_info.rank, rank_info.world_size, SECONDS_FOR_THE_LAST)


def pci_address(device: torch.device) -> str:
    """The address of a GPU on the PCI bus, as Linux writes it: `0000:17:00.0`."""
    properties = torch.cuda.get_device_properties(device)
    bus, number = (int(getattr(properties, name, 0)) for name in ("pci_bus_id", "pci_device_id"))
    return f"{int(getattr(properties, 'pci_domain_id', 0)):04x}:{bus:02x}:{number:02x}.0"


def set_float32_products(exact: bool) -> None:
    """Whether float32 products on a GPU are exact, or in TF32. torch's own default for convolutions is TF32."""
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact


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
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
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
                f"Gradients would be silently wrong (torch {torch.__version__}, {dist.get_backend()}).",
                "Use another torch version or backend.",
            )

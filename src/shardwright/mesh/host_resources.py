"""CPU cores and devices that a rank may use on its host, and its share where several ranks may use the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardwright.mesh.cluster_environment import RankInfo, in_slurm_task, slurm_task_cores


@dataclass(frozen=True)
class HostResources:
    """What one process may use of its host.

    host: the same for all processes that share a kernel.
    cores: numbers of the cores that the scheduler lets the process run on.
    group, quota: its control group, and how many cores' time the group may use; None without a limit.
    task, task_cores: its Slurm task, and the cores asked for the task.
    devices: names of the devices that the process sees, by index.
    """

    host: str
    cores: tuple[int, ...]
    group: str = ""
    quota: float | None = None
    task: str = ""
    task_cores: int | None = None
    devices: tuple[str, ...] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> HostResources:
        """The inverse of `dataclasses.asdict` and JSON."""
        return cls(**{**values, "cores": tuple(values["cores"]), "devices": tuple(values["devices"])})


def local_resources(environment: Mapping[str, str], devices: Sequence[str] = ()) -> HostResources:
    """What this process may use."""
    path = _control_group()
    task = ""
    if in_slurm_task(environment):
        task = ".".join(environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "PROCID"))
    return HostResources(
        host=_host(),
        cores=tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1)),
        group=path,
        quota=min(_quotas(path), default=None),
        task=task,
        task_cores=slurm_task_cores(environment) if task else None,
        devices=tuple(devices),
    )


def _host() -> str:
    """Containers on one machine share its cores and have different host names."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def _control_group() -> str:
    """The control group that limits this process's CPU time, below the mount: of version 2, or of version 1's `cpu`."""
    found = ""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                return f"cpu{path}"
            found = path if not controllers else found
    return found


def _quotas(path: str, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[float]:
    """The cores' time that the control group and those above it may use, as far as each has a limit."""
    place = mount / path.lstrip("/")
    for directory in (place, *place.parents):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (directory / "cpu.max").exists():
                quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = (
                    (directory / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
                )
            if float(quota) > 0:  # `max`, or -1 in version 1, is no limit
                yield float(quota) / float(period)
        if directory == mount:
            return


def share_of_cores(resources: HostResources, all_resources: Sequence[HostResources]) -> int:
    """CPU threads of the rank with `resources`, out of `all_resources`, those of every rank: at least 1.

    A core that several ranks may run on is divided among them, and so are the limits of a control group or a Slurm task. Ranks
    that are bound to cores of their own have them whole.
    """
    here = [other for other in all_resources if other.host == resources.host]
    masks = [frozenset(other.cores) for other in here]
    of_cores = sum(Fraction(1, sum(core in mask for mask in masks)) for core in resources.cores)
    limits = [of_cores]
    if resources.quota is not None:
        limits.append(Fraction(resources.quota) / sum(other.group == resources.group for other in here))
    if resources.task_cores is not None:
        limits.append(Fraction(resources.task_cores, sum(other.task == resources.task for other in here)))
    return max(1, int(min(limits)))


def threads_per_rank(
    requested: int | None,
    rank_info: RankInfo,
    environment: Mapping[str, str],
    resources: HostResources,
    all_resources: Sequence[HostResources],
) -> int:
    """CPU threads of a rank: as requested, else the user's `OMP_NUM_THREADS`, else its share of the cores.

    torchrun sets `OMP_NUM_THREADS=1` where the user set nothing. That is not a wish, and would make the number of
    threads depend on how the run was started, so under torchrun a 1 is ignored: request 1 to have it.
    """
    if requested is not None:
        return requested
    wish = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and int(wish) > 0 and not (rank_info.started_by == "torchrun" and wish == "1"):
        return int(wish)
    return share_of_cores(resources, all_resources)


def shown_device(environment: Mapping[str, str], index: int) -> str:
    """What the batch system calls the device that a process sees as number `index`: a number, or a device's own name.

    On ROCm the first list shows devices of the second, which the driver reads.
    """
    name = str(index)
    first = "HIP_VISIBLE_DEVICES" if environment.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    for variable in (first, "ROCR_VISIBLE_DEVICES"):
        shown = [entry.strip() for entry in environment.get(variable, "").split(",")]
        if name.isdecimal() and int(name) < len(shown) and shown[int(name)]:
            name = shown[int(name)]
    return name


def assign_devices(all_resources: Sequence[HostResources]) -> list[int | None]:
    """For each rank the index, among the devices it sees, of one that no other rank on its machine is given; else None.

    Ranks that see the fewest choose first. Where all see the same, each gets the one of its number on the machine.
    """
    given: list[int | None] = [None] * len(all_resources)
    taken: set[tuple[str, str]] = set()
    for rank in sorted(range(len(all_resources)), key=lambda rank: len(all_resources[rank].devices)):
        resources = all_resources[rank]
        free = [i for i, device in enumerate(resources.devices) if (resources.host, device) not in taken]
        if free:
            given[rank] = free[0]
            taken.add((resources.host, resources.devices[free[0]]))
    return given

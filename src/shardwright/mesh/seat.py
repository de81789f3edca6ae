"""What a rank may use of its machine, and its share of it where ranks use the same: CPU cores, and a device of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardwright.mesh.placement import Placement, in_slurm_task, slurm_task_cores


@dataclass(frozen=True)
class Seat:
    """One process on its machine.

    host: the same for all that share a kernel. cores: those that the scheduler lets it run on. group and quota: its
    control group and how many cores' time that may use, None without a limit. task and task_cores: its Slurm task and the
    cores asked for it. devices: names of those it sees, in the order of their index.
    """

    host: str
    cores: tuple[int, ...]
    group: str = ""
    quota: float | None = None
    task: str = ""
    task_cores: int | None = None
    devices: tuple[str, ...] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Seat:
        """The seat of which `dataclasses.asdict` went through JSON."""
        return cls(**{**values, "cores": tuple(values["cores"]), "devices": tuple(values["devices"])})


def seat_here(environment: Mapping[str, str], devices: Sequence[str] = ()) -> Seat:
    """The seat of this process."""
    path = _control_group()
    task = ""
    if in_slurm_task(environment):
        task = ".".join(environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "PROCID"))
    return Seat(
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


def share_of_cores(seat: Seat, seats: Sequence[Seat]) -> int:
    """CPU threads of the rank on `seat`, one of the `seats` of all ranks: at least 1.

    A core that several ranks may run on is divided among them, and so are the limits of a control group or a Slurm task. Ranks
    that are bound to cores of their own have them whole.
    """
    here = [other for other in seats if other.host == seat.host]
    masks = [frozenset(other.cores) for other in here]
    of_cores = sum(Fraction(1, sum(core in mask for mask in masks)) for core in seat.cores)
    limits = [of_cores]
    if seat.quota is not None:
        limits.append(Fraction(seat.quota) / sum(other.group == seat.group for other in here))
    if seat.task_cores is not None:
        limits.append(Fraction(seat.task_cores, sum(other.task == seat.task for other in here)))
    return max(1, int(min(limits)))


def threads_per_rank(
    requested: int | None,
    placement: Placement,
    environment: Mapping[str, str],
    seat: Seat,
    seats: Sequence[Seat],
) -> int:
    """CPU threads of a rank: as requested, else the user's `OMP_NUM_THREADS`, else its share of the cores.

    torchrun sets `OMP_NUM_THREADS=1` where the user set nothing. That is not a wish, and would make the number of
    threads depend on how the run was started, so under torchrun a 1 is ignored: request 1 to have it.
    """
    if requested is not None:
        return requested
    wish = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and int(wish) > 0 and not (placement.started_by == "torchrun" and wish == "1"):
        return int(wish)
    return share_of_cores(seat, seats)


def assign_devices(seats: Sequence[Seat]) -> list[int | None]:
    """For each rank the index, among the devices it sees, of one that no other rank on its machine is given; else None.

    Ranks that see the fewest choose first. Where all see the same, each gets the one of its number on the machine.
    """
    given: list[int | None] = [None] * len(seats)
    taken: set[tuple[str, str]] = set()
    for rank in sorted(range(len(seats)), key=lambda rank: len(seats[rank].devices)):
        seat = seats[rank]
        free = [i for i, device in enumerate(seat.devices) if (seat.host, device) not in taken]
        if free:
            given[rank] = free[0]
            taken.add((seat.host, seat.devices[free[0]]))
    return given

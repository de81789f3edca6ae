"""Findings about a machine that need no ranks: versions, cores and NUMA nodes, shared memory, the file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from shardwright.measure import clock
from shardwright.measure.environment import versions
from shardwright.mesh.process_group import cores_here
from shardwright.units import MB, format_bytes, format_seconds

Grade = Literal["ok", "warn", "FAIL"]
SYNC_BYTES = 16 * 2**20
LITTLE_SHARED = 64 * MB
SLOW_SYNC_SECONDS = 0.1
SLOW_WRITE = 20 * MB


@dataclass(frozen=True)
class Finding:
    """One line: the item, its grade, and the figures."""

    item: str
    grade: Grade
    text: str

    def __str__(self) -> str:
        return f"{self.grade:<4}  {self.item}: {self.text}"


def machine_findings(ranks: int, directory: Path) -> Iterator[Finding]:
    """All findings. directory: a directory of the file system that is timed."""
    found = versions()
    names = ", ".join(f"{name} {version}" for name, version in found.items() if name != "machine")
    yield Finding("versions", "ok", f"{names} on {found['machine']}")
    yield cores_finding(ranks, cores_here(), numa_nodes())
    yield shared_memory_finding(_free_shared())
    yield sync_finding(directory)


def numa_nodes() -> int:
    """NUMA nodes that the kernel shows; 1 where the kernel shows none."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def cores_finding(ranks: int, cores: int, nodes: int) -> Finding:
    """Ranks without a core of their own wait for each other."""
    text = f"{cores} cores in {nodes} NUMA node{'s' if nodes > 1 else ''} for {ranks} rank{'s' if ranks > 1 else ''}"
    if cores < ranks:
        return Finding("cores", "warn", f"{text}: fewer than ranks, which will take turns")
    if nodes > 1 and ranks < nodes:
        return Finding("cores", "warn", f"{text}: a rank's threads will span nodes; start a rank for each node")
    return Finding("cores", "ok", f"{text}, {max(1, cores // ranks)} threads a rank")


def _free_shared() -> int | None:
    path = Path("/dev/shm")
    return shutil.disk_usage(path).free if path.is_dir() else None


def shared_memory_finding(free: int | None) -> Finding:
    """Containers often have 64 MB, which loaders and NCCL run out of."""
    if free is None:
        return Finding("shared memory", "warn", "/dev/shm is not there")
    grade: Grade = "warn" if free <= LITTLE_SHARED else "ok"
    advice = ": little; start the container with more (--shm-size)" if grade == "warn" else ""
    return Finding("shared memory", grade, f"{format_bytes(free)} free{advice}")


def sync_finding(directory: Path) -> Finding:
    """Seconds of an fsync of a small file, and bytes/s of a large one written and synced."""
    path = directory / ".shardwright-doctor"
    try:
        small = median(_write(path, 4096) for _ in range(5))
        large = SYNC_BYTES / _write(path, SYNC_BYTES)
    except OSError as error:
        return Finding("file system", "FAIL", f"{directory} cannot be written: {error}")
    finally:
        path.unlink(missing_ok=True)
    slow = small > SLOW_SYNC_SECONDS or large < SLOW_WRITE
    text = f"{directory} syncs a small file in {format_seconds(small)} and writes {format_bytes(large)}/s"
    hint = ": slow; checkpoint.async_save saves in the background" if slow else ""
    return Finding("file system", "warn" if slow else "ok", text + hint)


def _write(path: Path, size: int) -> float:
    content = os.urandom(size)
    start = clock.now()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return clock.now() - start

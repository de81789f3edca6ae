"""The hosts of a run: ranks that see the same directory are on one host, whatever machines are called.

A host has no identity beyond that. What a disk holds is looked up when a run resumes. So hosts may come back, be replaced or be
fewer, and ranks may move between them.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwright.errors import CheckpointError
from shardwright.mesh.object_collectives import broadcast_object, gather_objects


@dataclass(frozen=True)
class Hosts:
    of_rank: tuple[int, ...]
    """The host of each rank; hosts are numbered by their first ranks."""
    names: tuple[str, ...]
    group: dist.ProcessGroup | None = None
    """For transfers between hosts."""

    @classmethod
    def one(cls) -> Hosts:
        """All ranks on one host: they share a directory."""
        return cls((0,) * dist.get_world_size(), ("",))

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def own(self) -> int:
        """The host of this rank."""
        return self.of_rank[dist.get_rank()]

    @property
    def leads(self) -> bool:
        """Whether this rank does the work that one rank of each host does."""
        return self.ranks(self.own)[0] == dist.get_rank()

    def ranks(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, of in enumerate(self.of_rank) if of == host]

    def replica_ranks(self, rank: int, copies: int) -> list[int]:
        """The ranks that keep a copy of what `rank` writes: one on each of the next `copies` hosts, as far as there are."""
        host = self.of_rank[rank]
        local_rank = self.ranks(host).index(rank)
        found = []
        for step in range(1, min(copies, self.count - 1) + 1):
            there = self.ranks((host + step) % self.count)
            found.append(there[local_rank % len(there)])
        return found


def find_hosts(output_dir: Path, group: dist.ProcessGroup) -> Hosts:
    """Which ranks see the same `output_dir`, found with a file of each rank; collective.

    Raises `CheckpointError` on all ranks where one cannot write there.
    """
    rank, token = dist.get_rank(), broadcast_object(secrets.token_hex(8))
    names = [f".host-{token}-{other}" for other in range(dist.get_world_size())]
    problem = ""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / names[rank]).touch()
    except OSError as error:
        problem = str(error)
    problems = gather_objects(problem)
    if not any(problems):
        found = gather_objects(([(output_dir / name).exists() for name in names], platform.node()))
    (output_dir / names[rank]).unlink(missing_ok=True)
    if any(problems):
        failed = "; ".join(f"rank {number}: {text}" for number, text in enumerate(problems) if text)
        raise CheckpointError(
            f"checkpoint.output_dir {output_dir} cannot be written: {failed}.",
            "",
            "Repair the disk, or set another checkpoint.output_dir.",
        )
    return Hosts(*_grouped([seen.index(True) for seen, _ in found], [node for _, node in found]), group)


def _grouped(firsts: Sequence[int], nodes: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(host of each rank, names of hosts) from the first rank that each sees. Hosts of one name are numbered."""
    leaders = sorted(set(firsts))
    names = [nodes[leader] for leader in leaders]
    shown = [name if names.count(name) == 1 else f"{name} (host {number})" for number, name in enumerate(names)]
    return tuple(leaders.index(first) for first in firsts), tuple(shown)

"""Host memory that one device's rank needs: offloaded states in pinned memory, and the copy that a save makes.

torch's pinned allocator rounds every block up to a power of two, so many tensors of odd sizes can take up to twice their
bytes (pytorch/pytorch#95823).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.planner.program import SHARDWRIGHT, Program
from shardwright.planner.rank_bytes import holds, moments_of, rules
from shardwright.planner.states import local_size

if TYPE_CHECKING:
    from shardwright.planner.job import Job, Layout


@dataclass(frozen=True)
class HostBytes:
    """Host bytes of one rank. pinned: parameters and gradients under offload. pageable: optimizer states under offload.
    save: parameters and optimizer states once more, while a checkpoint is written."""

    pinned: int
    pageable: int
    save: int

    @property
    def peak(self) -> int:
        return self.pinned + self.pageable + self.save


def pinned_bytes(size_bytes: int) -> int:
    """What a pinned block of so many bytes takes: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes(job: Job, layout: Layout, rank: int = 0, program: Program = SHARDWRIGHT) -> HostBytes:
    """Host memory of a device of pipeline rank `rank`."""
    rule = rules(job, layout, program, layout.microbatches(job))
    blocks, first, last = holds(job, layout, rank)
    family = family_of(job.shape.family)
    pinned = elements = 0
    for group in parameters(job.shape):
        if group.name.startswith(family.block + "."):
            count = sum(blocks)
        else:
            here = first >= 0 if group.part in ("embedding", "positions") else last >= 0
            count = int(here or (group.part == "embedding" and job.shape.tied and last >= 0))
        size = local_size(group, layout.axes.tp, family.transposed_weights)
        shard = -(-size[0] // rule.degree) * prod(size[1:])
        pinned += count * 2 * pinned_bytes(shard * rule.master)
        elements += count * shard
    moments = moments_of(job.optimizer) * rule.master
    save = elements * (rule.master + moments)
    if layout.offload == "none":
        return HostBytes(0, 0, save)
    return HostBytes(pinned, elements * moments, save)

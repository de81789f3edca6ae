"""Host memory that the rank of one device needs: offloaded states, and the copy that a save makes.

torch's allocator of pinned memory rounds every block up to a power of two, so many tensors of odd sizes can take up to twice
their bytes (pytorch/pytorch#95823).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.planner.optimizer import optimizer_of
from shardwright.planner.rank_bytes import holding, local_size, rules

if TYPE_CHECKING:
    from shardwright.planner.problem import Layout, Problem


@dataclass(frozen=True)
class HostBytes:
    """Host bytes of one rank."""

    pinned: int  # parameters, gradients, and their sum over microbatches, under offload
    pageable: int  # optimizer states, under offload
    save: int  # parameters and optimizer states once more, while a checkpoint is written

    @property
    def peak(self) -> int:
        return self.pinned + self.pageable + self.save


def pinned_bytes(size_bytes: int) -> int:
    """Bytes of the block that pinned memory of this size takes: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes(problem: Problem, layout: Layout, rank: int = 0) -> HostBytes:
    """Host memory of a device on pipeline rank `rank`."""
    microbatches = layout.microbatches(problem)
    rule = rules(problem, layout, microbatches)
    # zero2 and zero3 add the gradients of each microbatch to a sum on the host; replicas are summed before, on the device
    summed = microbatches > 1 and not rule.late and layout.axes.dp_replicate == 1
    copies = 3 if summed else 2
    _, blocks, first, last = holding(problem, layout, rank)
    family, optimizer = family_of(problem.shape.family), optimizer_of(problem.optimizer)
    pinned = elements = states = 0
    for group in parameters(problem.shape):
        if group.name.startswith(family.block + "."):
            count = sum(blocks)
        else:
            here = first >= 0 if group.part in ("embedding", "positions") else last >= 0
            count = int(here or (group.part == "embedding" and problem.shape.tied and last >= 0))
        size = local_size(group, layout.axes.tp, family.transposed_weights)
        shard = -(-size[0] // rule.degree) * prod(size[1:])
        pinned += count * copies * pinned_bytes(shard * rule.master)
        elements += count * shard
        states += count * shard * optimizer.states_of(group)
    save = (elements + states) * rule.master
    if layout.offload == "none":
        return HostBytes(0, 0, save)
    return HostBytes(pinned, states * rule.master, save)

"""Which part of each tensor a rank holds, who writes it, and how parts are cut into pieces.

A part is a box of the unsplit tensor. Ranks that hold the same box are replicas: one of them writes it. A piece is a run
of rows (dim 0) of a part: the unit that is read and has a checksum of its own, so that another layout reads what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.mesh.shard_geometry import Box, box_of, local_tensor
from shardwright.models.torch_dtypes import SAFETENSORS_CODES

PIECE_BYTES = 4 * 2**20
Value = Tensor | int | float
"""A value of a state: a tensor, or a number that an optimizer keeps."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of the tensor `key`, with the dtype and shape of the unsplit tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def part_bytes(self) -> int:
        return self.box.elements * self.dtype.itemsize


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part as a plain tensor without a graph."""
    return local_tensor(tensor).detach()


def rank_parts(state: Mapping[str, Value]) -> list[RankPart]:
    """What this rank holds of every tensor of `state`; empty parts are left out, except of empty tensors."""
    found = []
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.dtype not in SAFETENSORS_CODES:
            raise CheckpointError(f"{key} is {tensor.dtype}, which safetensors cannot hold.")
        box = box_of(tensor, key)
        if box.elements or not tensor.numel():
            found.append(RankPart(key, tensor.dtype, tuple(tensor.shape), box))
    return found


def writers(everyone: Sequence[Sequence[RankPart]]) -> list[list[RankPart]]:
    """For each rank the parts that it writes: each part once, and of the ranks that hold it by the one with least to write.

    Equal on all ranks. Raises `CheckpointError` where ranks disagree on a tensor, or where its parts are not all of it.
    """
    holders: dict[RankPart, list[int]] = {}
    for rank, parts in enumerate(everyone):
        for held in parts:
            holders.setdefault(held, []).append(rank)
    known: dict[str, RankPart] = {}
    counts: dict[str, int] = {}
    for held in holders:
        first = known.setdefault(held.key, held)
        if (first.dtype, first.shape) != (held.dtype, held.shape):
            raise CheckpointError(
                f"{held.key} is {held.dtype} {held.shape} on one rank and {first.dtype} {first.shape} on another."
            )
        counts[held.key] = counts.get(held.key, 0) + held.box.elements
    for key, held in known.items():
        if counts[key] != prod(held.shape):
            raise CheckpointError(
                f"The ranks hold {counts[key]:,} elements of {key} {held.shape}; it has {prod(held.shape):,}.",
                "A part of the tensor would be lost, or stored twice.",
            )
    chosen: list[list[RankPart]] = [[] for _ in everyone]
    load = [0] * len(everyone)
    for held, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=lambda r: load[r])
        chosen[rank].append(held)
        load[rank] += held.part_bytes
    return chosen


def rows_of(box: Box, itemsize: int) -> int:
    """Rows of dim 0 in a piece of `box`: as many as PIECE_BYTES hold, at least one."""
    if not box.shape:
        return 1
    return max(1, PIECE_BYTES // max(1, itemsize * prod(box.shape[1:])))


def pieces(box: Box, rows: int) -> Iterator[Box]:
    """`box` cut into runs of `rows` rows; the whole of it when it has no dim."""
    if not box.shape or not box.elements:
        yield from [box] if box.elements else []
        return
    for first in range(0, box.shape[0], rows):
        length = min(rows, box.shape[0] - first)
        yield Box((box.start[0] + first, *box.start[1:]), (length, *box.shape[1:]))

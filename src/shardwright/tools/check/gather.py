"""Whole tensors on rank 0, in one message of each rank: a check writes so many tensors that their latencies would add up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.parts import RankPart, local_part, rank_parts
from shardwright.mesh.object_collectives import gather_objects
from shardwright.mesh.shard_geometry import Box


def whole_on_first_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The unsplit tensors that any rank has in `tensors`, on the CPU of rank 0; nothing on others. Collective.

    Of equal parts the lowest rank's counts. Ranks may hold other tensors (pipeline stages) and other parts of one.
    """
    everyone: list[list[RankPart]] = gather_objects(rank_parts(tensors))
    sent: list[list[RankPart]] = [[] for _ in everyone]
    seen: set[RankPart] = set()
    for rank, parts in enumerate(everyone):
        sent[rank] = [held for held in parts if held not in seen]
        seen.update(parts)
    rank = dist.get_rank()
    own = _message(tensors, sent[rank])
    if rank:
        if own.numel():
            dist.send(own, 0)
        return {}
    whole: dict[str, Tensor] = {}
    for source, parts in enumerate(sent):
        message = own
        if source:
            message = torch.empty(sum(held.part_bytes for held in parts), dtype=torch.uint8)
        if source and parts:
            dist.recv(message, source)
        _put(whole, parts, message)
    return whole


def _message(tensors: Mapping[str, Tensor], parts: list[RankPart]) -> Tensor:
    """The bytes of this rank's `parts`, one after another."""
    pieces = [local_part(tensors[held.key]).cpu().contiguous().flatten().view(torch.uint8) for held in parts]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _put(whole: dict[str, Tensor], parts: list[RankPart], message: Tensor) -> None:
    """Writes the `parts` of one rank's `message` to where they belong in `whole`."""
    for held, piece in zip(parts, message.split([held.part_bytes for held in parts])):
        if held.key not in whole:
            whole[held.key] = torch.empty(held.shape, dtype=held.dtype)
        place = held.box.within(Box((0,) * len(held.shape), held.shape))
        whole[held.key][place] = piece.clone().view(held.dtype).view(held.box.shape)

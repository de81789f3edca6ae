"""Whole tensors of a model that no rank holds whole: one at a time, on rank 0.

Ranks may hold different tensors (pipeline stages) and different parts of one (shards).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.mesh.shard_geometry import full_tensor


def described(named: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """For every tensor that any rank has in `named`: the lowest such rank, and its unsplit shape and dtype (on meta).

    Equal on all ranks, in the order of the ranks. Collective.
    """
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    found: dict[str, tuple[int, Tensor]] = {}
    for rank, entries in enumerate(everyone):
        for name, (shape, dtype) in entries.items():
            if name not in found:
                found[name] = (rank, torch.empty(shape, dtype=dtype, device="meta"))
    return found


def whole_tensors(
    named: Mapping[str, Tensor], order: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """(name, unsplit tensor) of every tensor that any rank has in `named`: the tensor on rank 0, None on the others.

    Collective: every rank runs it to its end. Ranks that have a name hold all its shards between them. order: only these,
    in this order. The tensor of rank 0 may be the one in `named` itself.
    """
    rank, known = dist.get_rank() if dist.is_initialized() else 0, described(named)
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    for name in known if order is None else order:
        owner, like = known[name]
        whole = full_tensor(named[name]) if name in named else None
        if owner and rank == owner and whole is not None:
            dist.send(whole.contiguous(), 0)
        elif owner and rank == 0:
            whole = torch.empty_like(like, device=device)
            dist.recv(whole, owner)
        yield name, whole if rank == 0 else None

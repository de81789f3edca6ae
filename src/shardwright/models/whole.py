"""Whole tensors of a model that no rank holds whole: one at a time, on rank 0.

Ranks may hold different tensors (pipeline stages) and different parts of one (shards).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """(name, unsplit tensor) of every tensor that any rank has in `named`: the tensor on rank 0, None on the others.

    Collective: every rank runs it to its end. Ranks that have a name hold all its shards between them. Order: that of the
    lowest rank that has the name. The tensor of rank 0 may be the one in `named` itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield from ((name, _full(tensor)) for name, tensor in named.items())
        return
    rank = dist.get_rank()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: (tuple(t.shape), t.dtype) for name, t in named.items()})
    owners: dict[str, int] = {}
    for holder, names in enumerate(everyone):
        for name in names:
            owners.setdefault(name, holder)
    device = next((t.device for t in named.values()), torch.device("cpu"))
    for name, owner in owners.items():
        whole = _full(named[name]) if name in named else None
        if owner and rank == owner and whole is not None:
            dist.send(whole.contiguous(), 0)
        elif owner and rank == 0:
            shape, dtype = everyone[owner][name]
            whole = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(whole, owner)
        yield name, whole if rank == 0 else None


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""Exchanges between tensor-parallel ranks that know their own gradients.

Names follow Megatron-LM (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2). A tensor is `whole`
(equal on all ranks), `partial` (the ranks' tensors add up to it) or cut along a dim. Its gradient is partial where ranks
use a whole tensor for different work, and whole where they do the same.

| function | forward | backward |
|---|---|---|
| copy_in | as it is | sum |
| gather_in | gather | sum and cut |
| sum_out | sum | as it is |
| sum_and_cut_out | sum and cut | gather |
| cut | cut | gather |
| gather_same | gather | cut |
| take_piece | cut | zeros around |
| fill_in | zeros around | cut |

The last two send nothing: they are for a whole tensor of which nobody reads more than this rank's piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.backends.backend import Backend, choose_backend
from shardwright.torch_private import collectives, unsafe_view


@dataclass(frozen=True)
class Peers:
    """The ranks of one tensor-parallel group: how many, which one this is, and the group."""

    size: int
    rank: int
    group: dist.ProcessGroup

    @property
    def name(self) -> str:
        return self.group.group_name


def all_sum(x: Tensor, name: str, operation: str = "sum") -> Tensor:
    """`x` reduced over the group called `name`."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), operation, name))


def _gather(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    pieces = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), size, name))
    joined = pieces.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
    return unsafe_view(joined, joined.shape)  # no view of `pieces`: fully_shard warns of views


def _cut(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    length = x.size(dim) // size
    return x.narrow(dim, rank * length, length).contiguous()


def _sum(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    return all_sum(x, name)


def _sum_and_cut(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    pieces = x.unflatten(dim, (size, x.size(dim) // size)).movedim(dim, 0)
    flat = pieces.flatten(0, 1).contiguous()
    backend = Backend() if torch.compiler.is_compiling() else choose_backend(x.device.type)
    return backend.reduce_scatter(flat, size, name)


def _keep(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    return x.view_as(x)


_MOVES = {"keep": _keep, "sum": _sum, "gather": _gather, "cut": _cut, "sum_and_cut": _sum_and_cut}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, dim: int, size: int, rank: int, name: str) -> Tensor:
        ctx.back, ctx.place = back, (dim, size, rank, name)
        return _MOVES[there](x, dim, size, rank, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _MOVES[ctx.back](gradients[0], *ctx.place), None, None, None, None, None, None


def _exchange(x: Tensor, there: str, back: str, dim: int, peers: Peers) -> Tensor:
    dim = dim % x.dim()
    return _Exchange.apply(x, there, back, dim, peers.size, peers.rank, peers.name)


def copy_in(x: Tensor, peers: Peers) -> Tensor:
    """A whole `x` into work that is divided: its gradient is the sum of the ranks'."""
    return _exchange(x, "keep", "sum", 0, peers)


def gather_in(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """A cut `x` made whole for work that is divided: its gradient is summed and cut."""
    return _exchange(x, "gather", "sum_and_cut", dim, peers)


def sum_out(x: Tensor, peers: Peers) -> Tensor:
    """A partial `x` made whole for the same work on every rank."""
    return _exchange(x, "sum", "keep", 0, peers)


def sum_and_cut_out(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """A partial `x` summed, of which each rank keeps its piece along `dim`."""
    return _exchange(x, "sum_and_cut", "gather", dim, peers)


def cut(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's piece along `dim` of a whole `x`; the gradient is whole again."""
    return _exchange(x, "cut", "gather", dim, peers)


def gather_same(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """A cut `x` made whole for the same work on every rank: of the equal gradients each takes its piece."""
    return _exchange(x, "gather", "cut", dim, peers)


def take_piece(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's piece along `dim` of a tensor that `fill_in` made."""
    return _cut(x, dim % x.dim(), peers.size, peers.rank, peers.name)


def fill_in(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """A tensor of the whole size along `dim` that has the piece `x` in its place and zeros elsewhere."""
    length, behind = x.size(dim), x.dim() - 1 - dim % x.dim()
    before, after = peers.rank * length, (peers.size - 1 - peers.rank) * length
    return F.pad(x, (0, 0) * behind + (before, after))

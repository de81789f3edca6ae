"""Collectives of a tensor-parallel group that know their own gradients, named as in Megatron-LM.

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.) A tensor is whole (equal on all ranks), partial (its
sum over the ranks is what is meant), or split along a dim. The gradient of a whole tensor is partial where ranks use the
tensor for different work, and whole where they do the same work.

| function | forward | backward |
|---|---|---|
| copy_to_tp | identity | all_reduce |
| gather_from_sequence_parallel | all_gather | reduce_scatter |
| reduce_from_tp | all_reduce | identity |
| reduce_scatter_to_sequence_parallel | reduce_scatter | all_gather |
| scatter_to_tp | split | all_gather |
| gather_from_tp | all_gather | split |
| slice_of_rank | split | zeros around |
| zero_pad_slice | zeros around | split |

The last two send nothing: they are for a whole tensor of which no rank reads more than its own slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.backends.backend import choose_backend
from shardwright.torch_private import collectives, unsafe_view


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks of one tensor-parallel group: how many, which one this is, and the group."""

    size: int
    rank: int
    group: dist.ProcessGroup

    @property
    def name(self) -> str:
        return self.group.group_name


def all_reduce(x: Tensor, name: str, operation: str = "sum") -> Tensor:
    """`x` reduced over the group called `name`."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), operation, name))


def _all_gather(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    pieces = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), size, name))
    joined = pieces.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
    return unsafe_view(joined, joined.shape)  # no view of `pieces`: fully_shard warns of views


def _split(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    length = x.size(dim) // size
    piece = x.narrow(dim, rank * length, length).contiguous()
    return piece.flatten().view(piece.shape)  # strides as of a new tensor where a dim of size 1 kept those of `x`


def _reduce_scatter(x: Tensor, dim: int, size: int, rank: int, name: str) -> Tensor:
    pieces = x.unflatten(dim, (size, x.size(dim) // size)).movedim(dim, 0).flatten(0, 1).contiguous()
    return choose_backend(x.device.type).reduce_scatter(pieces, size, name)


_MOVES = {
    "identity": lambda x, dim, size, rank, name: x.view_as(x),
    "all_reduce": lambda x, dim, size, rank, name: all_reduce(x, name),
    "all_gather": _all_gather,
    "split": _split,
    "reduce_scatter": _reduce_scatter,
}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, dim: int, size: int, rank: int, name: str) -> Tensor:
        ctx.backward_move, ctx.arguments = backward, (dim, size, rank, name)
        return _MOVES[forward](x, dim, size, rank, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _MOVES[ctx.backward_move](gradients[0], *ctx.arguments), None, None, None, None, None, None


def _run(x: Tensor, forward: str, backward: str, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    return _Collective.apply(x, forward, backward, dim % x.dim(), tp_group.size, tp_group.rank, tp_group.name)


def copy_to_tp(x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """A whole `x` into divided work: its gradient is the sum of the ranks' gradients."""
    return _run(x, "identity", "all_reduce", 0, tp_group)


def gather_from_sequence_parallel(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """A split `x` made whole for divided work: its gradient is summed and split."""
    return _run(x, "all_gather", "reduce_scatter", dim, tp_group)


def reduce_from_tp(x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """A partial `x` made whole for the same work on every rank."""
    return _run(x, "all_reduce", "identity", 0, tp_group)


def reduce_scatter_to_sequence_parallel(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """The sum of a partial `x`, of which each rank keeps its slice along `dim`."""
    return _run(x, "reduce_scatter", "all_gather", dim, tp_group)


def scatter_to_tp(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """This rank's slice along `dim` of a whole `x`; the gradient is whole again."""
    return _run(x, "split", "all_gather", dim, tp_group)


def gather_from_tp(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """A split `x` made whole for the same work on every rank: each takes its slice of the equal gradients."""
    return _run(x, "all_gather", "split", dim, tp_group)


def slice_of_rank(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """This rank's slice along `dim` of a tensor that `zero_pad_slice` made."""
    return _split(x, dim % x.dim(), tp_group.size, tp_group.rank, tp_group.name)


def zero_pad_slice(x: Tensor, dim: int, tp_group: TensorParallelGroup) -> Tensor:
    """A tensor of the whole size along `dim` that holds the slice `x` at its position, and zeros elsewhere."""
    length, later = x.size(dim), x.dim() - 1 - dim % x.dim()
    before, after = tp_group.rank * length, (tp_group.size - 1 - tp_group.rank) * length
    return F.pad(x, (0, 0) * later + (before, after))

"""Cross entropy over logits whose vocabulary is divided between tensor-parallel ranks; no rank ever holds whole logits.

N positions, V vocabulary, W rows of it on this rank (uneven: pieces as `torch.chunk` makes them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwright.backends.tp_collectives import all_reduce
from shardwright.mesh.shard_geometry import chunk
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import assert_async


def widened(logits: Tensor) -> Tensor:
    """`logits` in float32 at least."""
    return logits.to(accumulation_dtype(logits.dtype))


def check_ids(ids: Tensor, vocabulary: int, ignore: int | None = None) -> None:
    """Raises where an id is in no rank's part (on a GPU, on the device): such a target would silently count nothing."""
    known = (ids >= 0) & (ids < vocabulary)
    if ignore is not None:
        known |= ids == ignore
    assert_async(known.all(), f"an id is not in the vocabulary of {vocabulary}")


class _CrossEntropySum(torch.autograd.Function):
    """Exact for any logits: the largest is subtracted before exp. Backward computes softmax again from the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, first: int, ignore: int, name: str
    ) -> Tensor:
        wide = widened(logits)
        largest = all_reduce(wide.amax(dim=-1), name, "max")
        own = (labels >= first) & (labels < first + logits.size(-1))
        place = torch.where(own, labels - first, 0)
        target = torch.where(own, wide.gather(-1, place[:, None])[:, 0] - largest, 0.0)
        total = (wide - largest[:, None]).exp_().sum(dim=-1)
        total, target = all_reduce(torch.stack([total, target]), name)
        log_total = total.log()
        counted = (labels != ignore).to(wide.dtype)
        if weights is not None:
            counted *= weights
        ctx.save_for_backward(logits, largest + log_total, place, own, counted)
        return torch.where(counted != 0, (log_total - target) * counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, log_sum, place, own, counted = ctx.saved_tensors
        gradient = (widened(logits) - log_sum[:, None]).exp_()
        gradient.scatter_add_(1, place[:, None], -own.to(gradient.dtype)[:, None])
        gradient.mul_((counted * gradients[0])[:, None])
        return gradient.to(logits.dtype), None, None, None, None, None


def vocabulary_cross_entropy_sum(logits: DTensor, labels: Tensor, ignore: int, weights: Tensor | None = None) -> Tensor:
    """Sum over targets of weight * -log softmax(logits)[label] in float32 at least, equal on all ranks.

    Shapes: logits [..., V], divided along V over a mesh of one axis; labels and weights (None: 1) [...], whole. A label of
    `ignore` counts nothing. Each position costs one maximum and two sums over the ranks. Gradients reach this rank's part of
    the logits.
    """
    placement, mesh = logits.placements[0], logits.device_mesh
    if mesh.ndim != 1 or not isinstance(placement, Shard) or placement.dim not in (-1, logits.dim() - 1):
        raise ValueError(
            f"logits are placed as {logits.placements} on a mesh of {mesh.ndim} axes, not divided by vocabulary"
        )
    first, rows = chunk(logits.size(-1), mesh.size(), mesh.get_local_rank())
    local = logits.to_local()
    if local.size(-1) != rows:
        raise ValueError(f"{local.size(-1)} columns of logits on a rank that owns {rows}")
    name = mesh.get_group().group_name
    check_ids(labels, logits.size(-1), ignore)
    flat = None if weights is None else weights.flatten()
    return _CrossEntropySum.apply(local.flatten(0, -2), labels.flatten(), flat, first, ignore, name)

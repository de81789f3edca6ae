"""Loss functions as users write them, for `training.loss`."""

from __future__ import annotations

import resource

import psutil
import torch
import torch.distributed as dist
from torch import Tensor


def smoothed(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cross entropy smoothed by 0.1, each target counted twice."""
    logs, counted = logits.log_softmax(-1), labels != -100
    each = counted.to(logs.dtype) if weights is None else counted * weights
    own = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -((0.9 * own + 0.1 * logs.mean(-1)) * each).sum(), 2 * each.sum()


def mean(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """A mean over the microbatch, as Transformers' own: refused."""
    return smoothed(logits, labels, weights)[0] / (labels != -100).sum()


def counts_nothing(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, int]:
    return logits.sum(), 0


def by_position(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, int]:
    return torch.zeros_like(labels, dtype=logits.dtype), 1


def without_graph(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, int]:
    return logits.detach().sum(), 1


_calls: list[int] = []


def exhausting(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`smoothed`, until rank 1 asks in its third call for a gigabyte of an address space that has 64 MB left."""
    _calls.append(1)
    if dist.get_rank() == 1 and len(_calls) == 3:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 64 * 2**20, -1))
        torch.empty(2**30, dtype=torch.uint8)
    return smoothed(logits, labels, weights)

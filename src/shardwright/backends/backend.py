"""The one interface to what a kind of device or its collectives need beyond torch: here as torch itself does it.

`parallel`, `loss` and `attention` ask a `Backend`; planner, layout and launcher ask its pure half, `backends/facts.py`. On
CUDA with NCCL a `Backend` is torch's own: `fully_shard` and the schedules of `torch.distributed.pipelining` as they are.
On a CPU the package `backends/gloo` overrides each method. Without that package this class serves there too: slower, with
the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwright.backends.facts import GLOO, has_own_backend
from shardwright.torch_private import collectives

PRODUCT_ELEMENTS = 2**21
"""Elements of a product in 16 bits that are made at a time, before they are added to a sum in float32."""


class Reductions:
    """The gradient reductions of one model under `fully_shard`, which reduces them itself while backward runs."""

    def __init__(self, modules: Sequence[FSDPModule], replicas: dist.ProcessGroup | None) -> None:
        """modules: every module of the model that `fully_shard` manages. replicas: the group that holds the same shards."""
        self._modules, self._replicas = modules, replicas

    def begin(self, last: bool) -> None:
        """Before each microbatch; `last`: replicas are summed after it, once for the whole update."""
        if self._replicas is not None:
            for module in self._modules:
                module.set_requires_all_reduce(last, recurse=False)

    def finish(self) -> None:
        """Completes every gradient of the update."""


class RunsStage(Protocol):
    """A stage as a pipeline runtime sees it."""

    def compute_forward(self, k: int, x: Tensor | None) -> Tensor:
        """Hidden states [B, T, D], or the loss of the last stage, from the hidden states of the stage before (or None)."""
        ...

    def compute_backward(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        """Adds gradients of `output`, given its own; `last`: the stage's last backward of this update."""
        ...


class PipelineRuntime(Protocol):
    """Runs the actions of one pipeline rank for one update."""

    def __init__(
        self,
        actions: Sequence[Any],
        stages: dict[int, RunsStage],
        count: int,
        rank_of: Callable[[int], int],
        group: dist.ProcessGroup,
        empty: Callable[[], Tensor],
    ) -> None:
        """actions: `layout.pipeline_schedules.Action`s of this rank. stages: of this rank, by index. count: of all ranks.

        rank_of: the pipeline rank of a stage, never that of its neighbour. empty: makes a tensor like what passes between
        stages, [B, T, D].
        """
        ...

    def run(self) -> None:
        """Computes every action; returns when all that was sent is received."""
        ...


class Backend:
    """torch's own implementations. A package for one kind of device overrides some of these methods."""

    sums: tuple[Any, ...] = (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default)
    """Operators that sum over a tensor-parallel group, in eager and in compiled code: selective recomputation keeps their
    results."""

    def reductions(self, modules: Sequence[FSDPModule], mesh: DeviceMesh) -> Reductions:
        """The gradient reductions of `modules`. `mesh`: shards in the last dimension, replicas in a dimension before it."""
        return Reductions(modules, mesh.get_group(0) if mesh.ndim == 2 else None)

    def reduce_scatter(self, pieces: Tensor, size: int, group: str) -> Tensor:
        """This rank's piece of the sum over the group called `group`: `pieces` [size x n, ...] -> [n, ...]."""
        return collectives.wait_tensor(collectives.reduce_scatter_tensor(pieces, "sum", size, group))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds `a` b to `total` [M, N], in place. a: [M, K], b: [K, N], in 16 bits where `total` is in float32.

        A GPU multiplies 16 bits into a float32 sum in one product. A CPU makes the product in 16 bits, PRODUCT_ELEMENTS of it
        at a time, so that little memory is needed beside the sum.
        """
        if a.dtype == total.dtype:
            total.addmm_(a, b)
        elif total.is_cuda:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            rows = max(1, PRODUCT_ELEMENTS // b.size(1))
            for part, own in zip(total.split(rows), a.split(rows)):
                part += own @ b

    def pipeline_runtime(self, schedule: str) -> type[PipelineRuntime] | None:
        """The class that runs this schedule; None: torch's own schedule runs."""
        return None

    def replace_attention(self, model: nn.Module) -> None:
        """Gives `model`, which computes in bf16 and attends to whole rows, a faster core attention where there is one."""


CHOSEN: dict[str, Backend] = {}


def choose_backend(device: str) -> Backend:
    """The backend of ranks on `cpu` or `cuda`."""
    if device not in CHOSEN:  # a dict, which torch.compile looks into; it would not trace a cache or an import
        CHOSEN[device] = import_module(f"{GLOO}.backend").BACKEND if has_own_backend(device) else Backend()
    return CHOSEN[device]

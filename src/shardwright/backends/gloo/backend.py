"""The backend of CPUs with gloo: replaces torch's own implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwright.backends.backend import Backend, PipelineRuntime, Reductions
from shardwright.backends.gloo.attention import replace_attention
from shardwright.backends.gloo.pipeline_runtime import ActionList
from shardwright.backends.gloo.reductions import ExchangedReductions
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import group_of, overload, own_operator

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
"""Pipeline schedules of whole backwards between ranks, which `ActionList` runs. Zero-bubble schedules are torch's."""


@own_operator
def reduce_scatter(pieces: Tensor, size: int, group: str) -> Tensor:
    """This rank's piece of the sum over the group called `group`: an all-to-all, summed here.

    gloo would reduce everything on all ranks, which sends twice as much. The all-to-all is no functional collective, whose
    lists of sizes gloo takes another way with: that way has broken the heap (docs/LOG.md). Both steps are one operator, so that
    selective recomputation can keep its result, and torch.compile calls it without looking inside.
    """
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group_of(group))
    return received.unflatten(0, (size, -1)).sum(0, dtype=accumulation_dtype(pieces.dtype)).to(pieces.dtype)


@reduce_scatter.register_fake
def _(pieces: Tensor, size: int, group: str) -> Tensor:
    return pieces.new_empty((pieces.shape[0] // size, *pieces.shape[1:]))


class GlooBackend(Backend):
    """Collectives that send half as much as gloo's own and do not wait, and kernels that are faster on a CPU."""

    def reductions(self, modules: Sequence[FSDPModule], mesh: DeviceMesh) -> Reductions:
        group = mesh.get_group(mesh.ndim - 1)
        if group.size() == 1 or dist.get_backend(group) != "gloo":
            return super().reductions(modules, mesh)
        return ExchangedReductions(modules, mesh.get_group(0) if mesh.ndim == 2 else None)

    sums = (*Backend.sums, overload(reduce_scatter))

    def reduce_scatter(self, pieces: Tensor, size: int, group: str) -> Tensor:
        return reduce_scatter(pieces, size, group)

    def pipeline_runtime(self, schedule: str) -> type[PipelineRuntime] | None:
        return ActionList if schedule in SCHEDULES else None

    def replace_attention(self, model: nn.Module) -> None:
        replace_attention(model)


BACKEND = GlooBackend()

"""ZeRO-1/2/3 and their hybrids as schedules of `fully_shard`.

Gradients are reduced with SUM and divided by nothing: the loss is already divided by the target tokens of the whole update.
What each kind shards, gathers and reduces stands in `layout/zero.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shardwright.backends.backend import Reductions, choose_backend
from shardwright.layout.zero import ZeroStage
from shardwright.parallel.host_gradients import HostReductions
from shardwright.parallel.strategy import DataParallel
from shardwright.torch_private import end_fully_shard


@dataclass(frozen=True)
class ShardOptions:
    """How `FSDP` gathers and reduces.

    stage: when parameters are gathered and gradients reduced.
    reshard_after_forward: whether a unit drops its gathered parameters after forward; a number: only down to shards on so
        many ranks.
    prefetch: units that are gathered ahead.
    param_dtype: of gathered parameters and compute; None: as stored.
    reduce_dtype: of gradients that are reduced; None: as stored.
    cpu_offload: shards stay on the host.
    """

    stage: ZeroStage
    reshard_after_forward: bool | int
    prefetch: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    cpu_offload: bool


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered together.

    is_last: forward ends and backward begins with this unit, which stays gathered in between.
    is_lookup: backward does not read the parameters of this unit (a plain embedding), and does not gather them.
    """

    modules: Sequence[nn.Module]
    is_last: bool = False
    is_lookup: bool = False


class FSDP(DataParallel):
    """`zero1`, `zero2`, `zero3` and their hybrids: `fully_shard` with the times of gathering and reducing of the stage."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], mesh: DeviceMesh, options: ShardOptions) -> None:
        """`units` stand in the order of forward; the rest of the model is the root unit.

        The last dimension of `mesh` is that of shards; a dimension before it is that of replicas.
        """
        self.module, self.stage, self._options = model, options.stage, options
        self._mesh = mesh
        # fully_shard refuses 0-dim parameters: they stay whole on every rank and are summed after backward.
        whole = {p for p in model.parameters() if p.dim() == 0}
        policy = MixedPrecisionPolicy(
            param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype, cast_forward_inputs=False
        )
        settings: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
            "ignored_params": whole,
        }
        for unit in units:
            modules: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
            reshards = False if unit.is_last else options.reshard_after_forward
            fully_shard(modules, reshard_after_forward=reshards, **settings)
            if unit.is_lookup and reshards is True:
                modules.set_unshard_in_backward(False)
        # The root is used first and last: if it were dropped after forward, backward would gather it again at once.
        fully_shard(model, reshard_after_forward=False, **settings)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._set_flags([unit.modules[0] for unit in units])
        if options.cpu_offload:
            replicas = mesh.get_group(0) if mesh.ndim == 2 else None
            self._reductions: Reductions = HostReductions(self._modules, replicas)
        else:
            self._reductions = choose_backend(mesh.device_type).reductions(self._modules, mesh)

    def _set_flags(self, order: Sequence[nn.Module]) -> None:
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch >= 2.13
                module.set_reduce_scatter_unused_params(True)
        depth, units = self._options.prefetch, [cast(FSDPModule, module) for module in order]
        if depth < 1:
            # an empty list would mean torch's own prefetch of one unit in backward
            for module in self._modules:
                module.set_modules_to_backward_prefetch([module])
            return
        for index, unit in enumerate(units):
            if ahead := units[index + 1 : index + 1 + depth]:
                unit.set_modules_to_forward_prefetch(ahead)
            # torch's own choice is the unit whose forward ran before. In a pipeline, another microbatch ran it.
            unit.set_modules_to_backward_prefetch(units[max(0, index - depth) : index][::-1] or [unit])
        root = cast(FSDPModule, self.module)
        root.set_modules_to_backward_prefetch(units[-depth:][::-1] or [root])

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch: the stage says whether its units gather, reduce and reshard."""
        stage = self.stage
        for module in self._modules:
            module.set_requires_gradient_sync(last or stage.reduces_each_microbatch, recurse=False)
            module.set_reshard_after_backward(last or stage.gathers_each_microbatch, recurse=False)
        self._reductions.begin(last)  # after set_requires_gradient_sync, which sets set_requires_all_reduce too
        yield

    def reduce_gradients(self) -> None:
        """Waits for reductions that are under way, and sums the gradients of 0-dim parameters in one tensor.

        The parameters are read here, in the model's order: weights are filled after sharding, which makes new parameters,
        and a set would have another order on each rank.
        """
        self._reductions.finish()
        whole = [p for p in self.module.parameters() if p.dim() == 0 and p.requires_grad]
        if not whole:
            return
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
        for dim in range(self._mesh.ndim):
            dist.all_reduce(gradients, group=self._mesh.get_group(dim))
        for p, gradient in zip(whole, gradients.unbind()):
            p.grad = gradient

    def release(self) -> None:
        """Drops gathered parameters, which forward without backward (evaluation) leaves behind: the step makes them stale."""
        for module in self._modules:
            module.reshard()

    def close(self) -> None:
        end_fully_shard(self._modules)
        super().close()

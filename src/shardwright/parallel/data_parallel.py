"""Data parallelism: DDP, and ZeRO-1/2/3 with hybrids as schedules of `fully_shard`.

Both kinds reduce gradients with SUM and divide by nothing: the loss is already divided by the target tokens of the whole
update. What each kind shards, gathers and reduces stands in `layout/zero.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from shardwright.layout.zero import STAGES, Stage

BUCKET_BYTES = 25 * 2**20

# torch 2.13 renamed the option
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


@dataclass(frozen=True)
class ShardOptions:
    """How `Sharded` gathers and reduces. Dtypes None: those of the stored parameters."""

    stage: Stage
    reshard_after_forward: bool | int
    prefetch: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    cpu_offload: bool


class Replicated:
    """`ddp`: whole parameters on every rank, gradients all-reduced in buckets while backward runs."""

    stage = STAGES["ddp"]

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        reduce_dtype: torch.dtype,
        find_unused: bool,
    ) -> None:
        """`find_unused`: parameters may go without a gradient on some ranks, which costs a walk over the graph per step."""
        self.module = model
        options: dict[str, Any] = {
            "bucket_cap_mb": bucket_bytes / 2**20,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": find_unused,
            "init_sync": False,  # every rank made the same first values
            _SYNC_BUFFERS: False,
        }
        self._ddp: nn.Module = model
        if any(p.requires_grad for p in model.parameters()):
            wrapped = DistributedDataParallel(model, process_group=group, **options)
            wrapped.register_comm_hook((group, reduce_dtype), _sum_bucket)
            self._ddp = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp(*args, **kwargs)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; gradients are reduced in the last one."""
        ddp = self._ddp
        with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and not last else nullcontext():
            yield

    def finish_gradients(self) -> None:
        """A parameter that no rank used has the gradient zero, as under `Sharded`, not none: decay and momentum go on.

        Nothing is left to wait for: DDP's backward ends with its all-reduces.
        """
        for p in self.module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)

    def release(self) -> None:
        """Nothing is gathered."""


def _sum_bucket(
    state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce SUM of one bucket in the reduce dtype. DDP's own hook would divide by the number of ranks."""
    group, dtype = state
    buffer = bucket.buffer()
    wire = buffer if buffer.dtype == dtype else buffer.to(dtype)
    work = dist.all_reduce(wire, group=group, async_op=True)

    def take(future: torch.futures.Future[Any]) -> torch.Tensor:
        value = future.value()
        reduced = value[0] if isinstance(value, list) else value
        return reduced if reduced.data_ptr() == buffer.data_ptr() else buffer.copy_(reduced)

    return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(take))


# DDP looks at the annotations themselves, which `from __future__ import annotations` turned into text.
_sum_bucket.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})


class Sharded:
    """`zero1`, `zero2`, `zero3` and their hybrids: `fully_shard` with the times of gathering and reducing of the stage."""

    def __init__(
        self, model: nn.Module, units: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, options: ShardOptions
    ) -> None:
        """`units` are groups of modules gathered together, in the order of forward; the rest of the model is the root unit.

        `mesh` has the dimension of shards, before it that of replicas where there are any.
        """
        self.module, self.stage, self._options = model, options.stage, options
        self._hybrid, self._mesh = mesh.ndim == 2, mesh
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
            modules: Any = list(unit) if len(unit) > 1 else unit[0]
            fully_shard(modules, reshard_after_forward=options.reshard_after_forward, **settings)
        # The root is used first and last: dropping it after forward would gather it again at once.
        fully_shard(model, reshard_after_forward=False, **settings)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._set_flags([unit[0] for unit in units])

    def _set_flags(self, order: Sequence[nn.Module]) -> None:
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch >= 2.13
                module.set_reduce_scatter_unused_params(True)
        depth, units = self._options.prefetch, [cast(FSDPModule, module) for module in order]
        if depth < 1:
            for (
                module
            ) in self._modules:  # an empty list would mean torch's own prefetch of one unit in backward
                module.set_modules_to_backward_prefetch([module])
            return
        for index, unit in enumerate(units):
            if ahead := units[index + 1 : index + 1 + depth]:
                unit.set_modules_to_forward_prefetch(ahead)
            if behind := units[max(0, index - depth) : index][::-1]:
                unit.set_modules_to_backward_prefetch(behind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch: the stage says whether it gathers, reduces and reshards."""
        stage = self.stage
        for module in self._modules:
            module.set_requires_gradient_sync(last or stage.reduces_each_microbatch, recurse=False)
            module.set_reshard_after_backward(last or stage.gathers_each_microbatch, recurse=False)
            if self._hybrid:
                module.set_requires_all_reduce(last, recurse=False)
        yield

    def finish_gradients(self) -> None:
        """Sums the gradients of parameters that `fully_shard` leaves whole, in one tensor.

        They are looked up here and in the model's order: weights are filled after sharding, which makes new parameters,
        and a set would have another order on each rank.
        """
        whole = [p for p in self.module.parameters() if p.dim() == 0 and p.requires_grad]
        if not whole:
            return
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
        for dim in range(self._mesh.ndim):
            dist.all_reduce(gradients, group=self._mesh.get_group(dim))
        for p, gradient in zip(whole, gradients.unbind()):
            p.grad = gradient

    def release(self) -> None:
        """Drops gathered parameters, which forward without backward (evaluation) leaves behind: they would go stale."""
        for module in self._modules:
            module.reshard()

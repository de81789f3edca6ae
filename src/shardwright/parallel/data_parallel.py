"""Data parallelism: DDP, and ZeRO-1/2/3 with hybrids as schedules of `fully_shard`.

Both kinds reduce gradients with SUM and divide by nothing: the loss is already divided by the target tokens of the whole
update. What each kind shards, gathers and reduces stands in `layout/zero.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.layout.zero import STAGES, Stage
from shardwright.parallel.leaves import give_gradient, make_leaf
from shardwright.parallel.wire import Wire, runs_on_gloo

BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 25 * 2**20}
"""Gradients of a bucket by device. The first is sent when it is full and the last is waited for: on a slow link both count."""

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


class _Leaves(nn.Module):
    """A model as DDP sees it: plain parameters only, the memory of this rank's part where they are DTensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any
        self.__dict__["model"] = model  # not a submodule: DDP must not find its DTensors
        self.leaves = nn.ParameterList(make_leaf(p) for p in model.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Replicated:
    """`ddp`: whole parameters on every rank, gradients all-reduced in buckets while backward runs.

    finishers: called in order once an update's gradients are reduced over the data ranks (sums over other axes).
    """

    stage = STAGES["ddp"]
    finishers: tuple[Callable[[], None], ...] = ()

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
            divided = any(isinstance(p, DTensor) for p in model.parameters())
            seen = _Leaves(model) if divided else model
            wrapped = DistributedDataParallel(seen, process_group=group, **options)
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
            give_gradient(p)
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        for finish in self.finishers:
            finish()

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


class Summed:
    """`ddp` inside pipeline stages: whole parameters, gradients all-reduced in buckets after the last backward.

    DDP itself ties its reduction to one forward and one backward after the other, which a pipeline schedule is not, and
    misses the weight gradients that zero-bubble schedules compute apart. Nothing overlaps with backward here.
    """

    stage = STAGES["ddp"]
    finishers: tuple[Callable[[], None], ...] = ()

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int, reduce_dtype: torch.dtype
    ) -> None:
        self.module, self._group, self._bytes, self._dtype = model, group, bucket_bytes, reduce_dtype

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Nothing is gathered or reduced while microbatches run."""
        yield

    def _buckets(self) -> Iterator[list[torch.Tensor]]:
        """Gradients in groups of at least `bucket_bytes` but the last; the same on every rank of the group."""
        bucket: list[torch.Tensor] = []
        size = 0
        for p in self.module.parameters():
            if not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            bucket.append(own)
            size += own.numel() * own.element_size()
            if size >= self._bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def finish_gradients(self) -> None:
        """Sums all gradients over the group; one that no rank has is zero. Two buckets are on their way at a time."""
        waiting: list[tuple[dist.Work | None, torch.Tensor, list[torch.Tensor]]] = []
        for bucket in self._buckets():
            if dist.get_world_size(self._group) == 1:
                continue
            flat = torch.cat([gradient.reshape(-1).to(self._dtype) for gradient in bucket])
            waiting.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, bucket))
            if len(waiting) > 1:
                self._take(*waiting.pop(0))
        for entry in waiting:
            self._take(*entry)
        for finish in self.finishers:
            finish()

    def _take(self, work: dist.Work | None, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
        if work is not None:
            work.wait()
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(part.view_as(gradient))

    def release(self) -> None:
        """Nothing is gathered."""


class Sharded:
    """`zero1`, `zero2`, `zero3` and their hybrids: `fully_shard` with the times of gathering and reducing of the stage.

    finishers: as in `Replicated`.
    """

    finishers: tuple[Callable[[], None], ...] = ()

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
        self._wire: Wire | None = None
        if runs_on_gloo(mesh):
            self._wire = Wire(mesh.get_group(0) if self._hybrid else None)
            self._wire.install(self._modules)

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
            # Never torch's own choice, the unit that ran before: in a pipeline that belongs to another microbatch.
            unit.set_modules_to_backward_prefetch(units[max(0, index - depth) : index][::-1] or [unit])
        root = cast(FSDPModule, self.module)
        root.set_modules_to_backward_prefetch(units[-depth:][::-1] or [root])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch: the stage says whether it gathers, reduces and reshards."""
        stage = self.stage
        if self._wire is not None:
            self._wire.last = last
        for module in self._modules:
            module.set_requires_gradient_sync(last or stage.reduces_each_microbatch, recurse=False)
            module.set_reshard_after_backward(last or stage.gathers_each_microbatch, recurse=False)
            if self._hybrid and self._wire is None:
                module.set_requires_all_reduce(last, recurse=False)
        yield

    def finish_gradients(self) -> None:
        """Waits for reductions that are under way; sums gradients that `fully_shard` leaves whole, in one tensor.

        Then calls `finishers`. The parameters are looked up here and in the model's order: weights are filled after
        sharding, which makes new parameters, and a set would have another order on each rank.
        """
        if self._wire is not None:
            self._wire.finish()
        whole = [p for p in self.module.parameters() if p.dim() == 0 and p.requires_grad]
        if whole:
            self._sum_whole(whole)
        for finish in self.finishers:
            finish()

    def _sum_whole(self, whole: Sequence[nn.Parameter]) -> None:
        gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
        for dim in range(self._mesh.ndim):
            dist.all_reduce(gradients, group=self._mesh.get_group(dim))
        for p, gradient in zip(whole, gradients.unbind()):
            p.grad = gradient

    def release(self) -> None:
        """Drops gathered parameters, which forward without backward (evaluation) leaves behind: they would go stale."""
        for module in self._modules:
            module.reshard()

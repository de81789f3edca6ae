"""torch alone: the loop that a careful user writes with DistributedDataParallel or `fully_shard`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.axes import Axes
from shardwright.mesh.device_mesh import make_mesh
from shardwright.models.model_parts import find_parts
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.tools.bench.peers import UpdateLoop

KINDS = ("ddp", "zero1", "zero2", "zero3")


def make(run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop:
    """torch's own `kind`: DDP, or `fully_shard` of each block with the gathering schedule of the kind."""
    compute, ranks = TORCH_DTYPES[run.precision.param_dtype], dist.get_world_size()
    runner: Any = model
    if kind == "ddp":
        runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = make_mesh(Axes(dp_shard=ranks), device)["dp_shard"]
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=TORCH_DTYPES[run.precision.reduce_dtype])
        for name in find_parts(model).blocks:
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=kind == "zero3", mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    optimizer = make_adamw(run, runner)

    def update(batch: UpdateBatch) -> float:
        total = torch.zeros((), device=device)
        for microbatch in batch.microbatches:
            last = microbatch is batch.microbatches[-1]
            if kind == "ddp":
                runner.require_backward_grad_sync = last
            else:
                runner.set_requires_gradient_sync(last or kind != "zero1")
                runner.set_reshard_after_backward(last or kind == "zero3")
            with _autocast(kind, compute, device):
                loss = loss_sum(runner, microbatch, device)
            (loss * ranks / batch.divisor).backward()  # both average over ranks
            total += loss.detach()
        if run.training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(runner.parameters(), run.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / batch.divisor

    return update


def make_adamw(run: RunFile, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as the run file describes it; matrices decay, vectors do not."""
    t = run.training
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": t.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (t.adam_beta1, t.adam_beta2)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=t.learning_rate, betas=betas, eps=t.adam_epsilon, fused=True
    )


def loss_sum(model: Any, microbatch: Microbatch, device: torch.device) -> Tensor:
    """Sum of cross entropy over the targets of a microbatch."""
    logits = model(input_ids=microbatch.input_ids.to(device), use_cache=False).logits
    labels = microbatch.labels.to(device)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def _autocast(kind: str, compute: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """For ddp in a narrow dtype; `fully_shard` has its own policy."""
    if kind == "ddp" and compute in (torch.bfloat16, torch.float16):
        return torch.autocast(device.type, compute)
    return nullcontext()

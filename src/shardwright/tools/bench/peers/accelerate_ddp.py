"""Hugging Face Accelerate: its Accelerator around a loop of the user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.loader import UpdateBatch
from shardwright.tools.bench.peers import UpdateLoop
from shardwright.tools.bench.peers.bare import loss_sum, make_adamw

KINDS = ("ddp",)
"""On a CPU Accelerate runs DDP whatever its FSDP plugin says, so DDP is timed."""


def make(run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop:
    from accelerate import Accelerator

    mixed = {"bf16": "bf16", "fp16": "fp16"}.get(run.precision.param_dtype, "no")
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed)
    runner: Any
    runner, optimizer = accelerator.prepare(model, make_adamw(run, model))
    ranks = dist.get_world_size()

    def update(batch: UpdateBatch) -> float:
        total = torch.zeros((), device=device)
        for microbatch in batch.microbatches:
            accelerator.sync_gradients = microbatch is batch.microbatches[-1]
            context = None if accelerator.sync_gradients else accelerator.no_sync(runner)
            with context or accelerator.autocast():
                loss = loss_sum(runner, microbatch, device)
                accelerator.backward(loss * ranks / batch.divisor)  # Accelerate averages over ranks
            total += loss.detach()
        if run.training.max_grad_norm is not None:
            accelerator.clip_grad_norm_(runner.parameters(), run.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(total, "sum")
        return float(total.item()) / batch.divisor

    return update

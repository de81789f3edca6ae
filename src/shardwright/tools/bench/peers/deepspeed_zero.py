"""DeepSpeed ZeRO 1, 2 and 3, on the CPU with its CPU accelerator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.loader import UpdateBatch
from shardwright.tools.bench.peers import UpdateLoop
from shardwright.tools.bench.peers.bare import loss_sum, make_adamw

KINDS = ("zero1", "zero2", "zero3")


def make(run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop:
    import deepspeed

    t, ranks = run.training, dist.get_world_size()
    steps = t.global_batch_size // (t.per_device_train_batch_size * ranks)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": t.per_device_train_batch_size,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": int(kind[-1])},
        "bf16": {"enabled": run.precision.param_dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": t.max_grad_norm or 0.0,
        "steps_per_print": 10**9,
    }
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_adamw(run, model), config=config)

    def update(batch: UpdateBatch) -> float:
        total = torch.zeros((), device=device)
        for microbatch in batch.microbatches:
            loss = loss_sum(engine, microbatch, device)
            engine.backward(loss * ranks * steps / batch.divisor)  # DeepSpeed averages over ranks and microbatches
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / batch.divisor

    return update

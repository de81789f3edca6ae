"""One update of the product, of bare torch and of compute alone, on the same Llama of about 35M parameters and the same rows.

Every loop starts from the product's first weights and does the same objective: the loss is a sum over targets, divided
once by those of the whole update. R ranks, B rows of a microbatch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

ROWS, LENGTH, VOCABULARY = 4, 256, 8192
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
}
RATE = 3e-4

Update = Callable[[int], float]
"""One update by its number; returns the loss before the step."""


@dataclass(frozen=True)
class Job:
    """What all loops do. directory: of the model's config.json. bf16: parameters are computed with and gradients
    reduced in bf16, stored in fp32. replicas: > 1 for a hybrid. settings: `key=value` of the run file, for ours alone.
    """

    directory: str
    layout: str
    microbatches: int = 1
    bf16: bool = False
    replicas: int = 1
    settings: Sequence[str] = ()


def ours(job: Job) -> tuple[Update, Any]:
    """(one update of the product, its engine)."""
    import torch
    import torch.distributed as dist

    from shardwright.config import load_run_file
    from shardwright.config.load import parse_overrides
    from shardwright.data.loader import Microbatch, UpdateBatch
    from shardwright.layout.legality import check_run
    from shardwright.train.update import UpdateEngine

    ranks = dist.get_world_size()
    values: dict[str, Any] = {
        "model.model_name_or_path": job.directory,
        "model.init": "random",
        "data.train": ["unused"],
        "data.max_length": LENGTH,
        "training.max_steps": 1000,
        "training.global_batch_size": ROWS * ranks * job.microbatches,
        "training.per_device_train_batch_size": ROWS,
        "training.learning_rate": RATE,
        "training.weight_decay": 0.0,
        "training.max_grad_norm": 1.0,
        "training.lr_scheduler_type": "constant",
        "parallelism.data_parallel": job.layout,
    }
    if job.bf16:
        values |= {f"precision.{name}_dtype": "bf16" for name in ("param", "reduce")}
    if job.replicas > 1:
        values["parallelism.dp_replicate_size"] = job.replicas
    loaded = load_run_file(None, {**values, **parse_overrides([f"--{text}" for text in job.settings])})
    engine = UpdateEngine(loaded.run, check_run(loaded, ranks), torch.device("cpu"), 1000)

    def update(number: int) -> float:
        made = []
        for k in range(job.microbatches):
            ids, labels = rows(number * job.microbatches + k)
            made.append(Microbatch(k * ranks + dist.get_rank(), ids, labels, tuple(range(ROWS))))
        targets = ranks * job.microbatches * ROWS * (LENGTH - 1)
        slots = ranks * job.microbatches * ROWS * LENGTH
        engine.forward_backward(UpdateBatch(number, tuple(made), targets, slots, slots, ()))
        return engine.step().loss

    return update, engine


def stock(job: Job) -> Update:
    """`ours` without the package `backends/gloo`: reductions of `fully_shard` itself, ddp in buckets of 25 MiB."""
    from unittest import mock

    if job.layout == "ddp":
        return ours(replace(job, settings=[f"parallelism.bucket_bytes={25 * 2**20}"]))[0]
    with mock.patch("shardwright.backends.backend.has_own_backend", lambda device: False):
        return ours(job)[0]


def bare(job: Job, kind: str, start: dict[str, Any] | None = None) -> Update:
    """The loop a careful user writes with torch alone. kind: `ddp`, or `fully_shard` at the stage of the job's layout.

    start: first weights; None for the same random ones on every rank.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, ranks, stage = _plain(job, start), dist.get_world_size(), job.layout
    runner: Any = model
    if kind == "ddp":
        runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shape = (job.replicas, ranks // job.replicas) if job.replicas > 1 else (ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        narrow = torch.bfloat16 if job.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow, cast_forward_inputs=False)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == "zero3")
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(runner.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def update(number: int) -> float:
        total = torch.zeros(())
        for k in range(job.microbatches):
            last = k == job.microbatches - 1
            if kind == "ddp":
                runner.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last or stage != "zero1")
                model.set_reshard_after_backward(last or stage == "zero3")
            total += _backward(runner, job, number, k, autocast=kind == "ddp" and job.bf16)
        norm = nn.utils.clip_grad_norm_(runner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(norm, "full_tensor"):
            norm.full_tensor()
        dist.all_reduce(total)
        return total.item() / ranks

    return update


def deepspeed_zero(job: Job, start: dict[str, Any]) -> Update:
    """DeepSpeed at the ZeRO stage of the job's layout, its defaults otherwise. With bf16 it stores bf16 and fp32 masters."""
    import deepspeed
    import torch
    import torch.distributed as dist

    model, ranks = _plain(job, start), dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": job.microbatches,
        "zero_optimization": {"stage": int(job.layout[-1])},
        "bf16": {"enabled": job.bf16},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def update(number: int) -> float:
        total = torch.zeros(())
        for k in range(job.microbatches):
            total += _backward(engine, job, number, k, backward=engine.backward)
            engine.step()
        dist.all_reduce(total)
        return total.item() / ranks

    return update


def alone(job: Job, start: dict[str, Any]) -> Update:
    """Compute of one rank without communication: its own rows, and the step over its share of the parameters."""
    import torch
    import torch.distributed as dist
    from torch import nn

    model, ranks = _plain(job, start), dist.get_world_size()
    narrow = model.to(torch.bfloat16) if job.bf16 else model
    parts = 1 if job.layout == "ddp" else ranks // job.replicas
    stored = [torch.zeros(p.numel() // parts) for p in narrow.parameters()]
    optimizer = torch.optim.AdamW(stored, lr=RATE, weight_decay=0.0, fused=True)

    def update(number: int) -> float:
        total = sum(_backward(narrow, job, number, k).item() for k in range(job.microbatches))
        for part, p in zip(stored, narrow.parameters()):
            assert p.grad is not None
            part.grad = p.grad.view(-1)[: part.numel()].float()
        nn.utils.clip_grad_norm_(stored, 1.0)
        optimizer.step()
        model.zero_grad()
        return total

    return update


def _plain(job: Job, start: dict[str, Any] | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.directory))
    if start is not None:
        model.load_state_dict(start)
    return model


def _backward(
    model: Any,
    job: Job,
    number: int,
    k: int,
    autocast: bool = False,
    backward: Callable[[Any], Any] | None = None,
) -> Any:
    """Forward and backward of a microbatch; its loss, summed over targets and divided by those of this rank's update.

    backward: of the loss times the microbatches of the update, over which it averages; None: autograd's.
    """
    import torch
    import torch.nn.functional as F

    ids, labels = rows(number * job.microbatches + k)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss / (job.microbatches * ROWS * (LENGTH - 1))
    if backward is None:
        loss.backward()
    else:
        backward(loss * job.microbatches)
    return loss.detach()


def rows(number: int) -> tuple[Any, Any]:
    """Random ids [B, T] of this rank and labels shifted to them; equal for all loops."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(number * 1009 + dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    return ids, labels

"""Plans how a model is split, and splits it. The order of the steps stands in one function, `parallelize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.attention.compiled import ATTEND_DOCUMENTS
from shardwright.attention.document_attention import isolate_documents
from shardwright.attention.rules import check_packed_model, check_padded_model
from shardwright.backends.backend import choose_backend
from shardwright.backends.facts import backend_facts
from shardwright.config.schema import RunFile
from shardwright.errors import ModelError
from shardwright.layout.loss import CROSS_ENTROPY
from shardwright.layout.pipeline_schedules import chunks_of, rank_stages, stage_rank
from shardwright.layout.size_rules import is_balanced, schedule_of, stage_count
from shardwright.layout.zero import STAGES
from shardwright.loss.chunked_loss import ChunkedHead, LossChunks, find_loss_chunks
from shardwright.mesh.device_mesh import replica_group, shard_mesh
from shardwright.models.build import check_own_attention
from shardwright.models.materialise import materialise
from shardwright.models.model_parts import Parts, find_parts, is_transformers
from shardwright.models.rotary import decide_by_document
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.activation_checkpointing import compile_block, recompute_block
from shardwright.parallel.context.attention import replace_attention
from shardwright.parallel.context.compiled import ATTEND_OVER_RANKS, replace_compiled_attention
from shardwright.parallel.context.rules import check_context_model
from shardwright.parallel.context.shard import ContextShard
from shardwright.parallel.ddp import DDP
from shardwright.parallel.fsdp import FSDP, ShardOptions, Unit
from shardwright.parallel.mixed_precision import compute_in
from shardwright.parallel.pipeline.schedule_runner import Pipeline
from shardwright.parallel.pipeline.stages import PipelineSplit, Stage, build_stages, plan_split
from shardwright.parallel.strategy import DataParallel, Ties
from shardwright.parallel.tensor.apply_plan import TensorParallel
from shardwright.parallel.tensor.styles import is_vocab_parallel
from shardwright.parallel.tensor.tp_plan import VOCABULARY, TensorPlan, attention_modules, plan_tensor


@dataclass(frozen=True)
class ModelPlan:
    """How one model is split, found on meta before anything is changed. Every step of `parallelize` reads this plan.

    parts: of the unsplit model.
    loss_chunks: how the head computes the loss where targets are announced to it (see `ChunkedHead`).
    split: modules of each pipeline stage; None without a pipeline.
    tensor: styles of layers; None without tensor parallelism.
    attention: modules that attend, where sequence parallelism cuts sequences into pieces; else none.
    """

    parts: Parts
    loss_chunks: LossChunks
    split: PipelineSplit | None
    tensor: TensorPlan | None
    attention: tuple[str, ...]


def plan_model(model: nn.Module, run: RunFile, device_type: str) -> ModelPlan:
    """The plan of `model` (from `build_model`). Raises `ModelError` or `ConfigError`, by name, for what cannot be split."""
    parts, p = find_parts(model), run.parallelism
    loss_chunks = find_loss_chunks(model, parts, run, device_type)
    split = plan_split(model, parts, run.model, stage_count(p)) if p.pp_size > 1 else None
    tensor = plan_tensor(model, parts, run) if p.tp_size > 1 else None
    in_pieces = p.tp_size > 1 and p.sequence_parallel is not False and is_transformers(model)
    return ModelPlan(parts, loss_chunks, split, tensor, attention_modules(model, parts) if in_pieces else ())


def parallelize(
    model: nn.Module, run: RunFile, mesh: DeviceMesh, device: torch.device, plan: ModelPlan | None = None
) -> DataParallel | Pipeline:
    """`model` (built on meta) split as `run` says, every parameter filled on `device`. plan: made here where None.

    Order: split into stages; layers divided over tensor-parallel ranks; attention over context-parallel ranks, or over
    documents; recompute inside, compile around it, sharding around both; then weights, so that a rank only ever fills
    its part. `ddp` watches filled parameters.
    """
    p, plan = run.parallelism, plan or plan_model(model, run, device.type)
    split, parts = plan.split, plan.parts
    stages: tuple[Stage, ...] = ()
    if split is not None:
        schedule = schedule_of(p)
        held = rank_stages(schedule, p.pp_size, chunks_of(schedule), mesh["pp"].get_local_rank())
        stages = build_stages(model, split, held)
        parts = split.parts_of(plan.parts, [stage.index for stage in stages])
    tensor = None
    if plan.tensor is not None:
        tensor = TensorParallel(model, parts, plan.tensor, mesh["tp"], run, stages, plan.attention)
    if plan.loss_chunks.tokens and parts.head is not None:
        head: Any = model.get_submodule(parts.head)
        divided = tensor.tp_group if tensor is not None and tensor.divides(parts.head) else None
        ChunkedHead(head, plan.loss_chunks, divided, recompute=p.pp_size > 1 and schedule_of(p) == "gpipe")
    _replace_attention(model, parts, run, mesh, device)
    decide_by_document(model)
    kept = (*choose_backend(device.type).sums, ATTEND_DOCUMENTS, ATTEND_OVER_RANKS)
    for name in parts.blocks:
        if run.memory.activation_checkpointing != "none":
            recompute_block(model.get_submodule(name), run.memory.activation_checkpointing, kept)
        if run.memory.compile:
            compile_block(model.get_submodule(name))
    each = [parts] if split is None else [split.parts_of(plan.parts, [stage.index]) for stage in stages]
    data_parallel = _data_parallel(model, stages, each, run, mesh, device)
    data_parallel[-1].finishers = (tensor.finish_gradients,) if tensor is not None else ()
    if split is None:
        return data_parallel[0]
    last = stage_rank(schedule_of(p), p.pp_size, len(split.blocks) - 1)
    ties = Ties.between(split.tied, mesh["pp"].get_local_rank(), 0, last)
    group, dtype = mesh["pp"].get_group(), TORCH_DTYPES[run.precision.param_dtype]
    return Pipeline(model, stages, data_parallel, group, schedule_of(p), width=split.width, dtype=dtype, ties=ties)


def _replace_attention(model: nn.Module, parts: Parts, run: RunFile, mesh: DeviceMesh, device: torch.device) -> None:
    """Gives `model` the core attention of this layout: over pieces of rows, over documents, or the model's own."""
    if (shard := context_shard(run, mesh)) is not None:
        replace = replace_compiled_attention if run.memory.compile else replace_attention
        replace(model, [model.get_submodule(name) for name in parts.blocks], shard)
    elif run.data.batching == "pack" and is_transformers(model):
        isolate_documents(model)
    else:
        check_own_attention(model, run.model)
        if run.precision.param_dtype == "bf16" and is_transformers(model):
            choose_backend(device.type).replace_attention(model)


def _data_parallel(
    model: nn.Module,
    stages: Sequence[Stage],
    parts: Sequence[Parts],
    run: RunFile,
    mesh: DeviceMesh,
    device: torch.device,
) -> list[DataParallel]:
    """Data parallelism of `model`, or of its `stages`; fills this rank's part of every parameter. parts: of each."""
    seed, dtype = run.training.seed, TORCH_DTYPES[run.precision.param_dtype]
    filled = nn.ModuleList([model, *stages]) if stages else model  # fully_shard keeps its state on the stages
    if run.parallelism.data_parallel == "ddp":
        materialise(filled, run.model, seed=seed, device=device)
        compute_in(model, dtype)
        bucket_bytes = run.parallelism.bucket_bytes or backend_facts(device.type).bucket_bytes
        reduce_dtype = TORCH_DTYPES[run.precision.reduce_dtype]
        return [DDP(model, replica_group(mesh), bucket_bytes, reduce_dtype, overlap=not stages)]
    options, shards = shard_options(run, device.type), shard_mesh(mesh)
    roots: list[tuple[nn.Module, nn.Module]] = [(stage, stage.part) for stage in stages] or [(model, model)]
    wrapped: list[DataParallel] = [
        FSDP(root, shard_units(named, own, run.parallelism.unit), shards, options)
        for (root, named), own in zip(roots, parts)
    ]
    materialise(filled, run.model, seed=seed, device=device)
    return wrapped


def check_model(model: nn.Module, run: RunFile) -> None:
    """Raises the errors that `parallelize` would raise for this model, before any process starts."""
    p, plan = run.parallelism, plan_model(model, run, "cpu")
    head = plan.parts.head or ""
    if plan.tensor is not None and run.training.loss != CROSS_ENTROPY and plan.tensor.styles.get(head) == VOCABULARY:
        raise ModelError(
            f"training.loss {run.training.loss} with parallelism.tp_size {p.tp_size}.",
            f"The loss function is called with whole logits, and {head} is divided by vocabulary.",
            f"Give a parallelism.tp_plan in which {head} is colwise_gather_output, or set tp_size to 1.",
        )
    if p.cp_size > 1:
        check_context_model(model, run)
    if run.data.batching == "pack":
        check_packed_model(model, p.cp_size, run.memory.compile)
    elif p.cp_size == 1:
        check_own_attention(model, run.model)
        check_padded_model(model)


def context_shard(run: RunFile, mesh: DeviceMesh) -> ContextShard | None:
    """Which tokens of each row this rank holds; None where it holds whole rows."""
    cp, p = mesh["cp"], run.parallelism
    if cp.size() == 1:
        return None
    kind = p.cp_attention or "all_gather"
    return ContextShard(cp.size(), cp.get_local_rank(), is_balanced(p), cp.get_group(), kind)


def shard_options(run: RunFile, device: str) -> ShardOptions:
    """How the data-parallel kind of `run` gathers and reduces on a device of this type."""
    p = run.parallelism
    stage, reshard = STAGES[p.data_parallel], p.reshard_after_forward
    return ShardOptions(
        stage=stage,
        reshard_after_forward=stage.reshard_after_forward if reshard is None else reshard,
        prefetch=backend_facts(device).prefetch if p.prefetch is None else p.prefetch,
        param_dtype=TORCH_DTYPES[run.precision.param_dtype],
        reduce_dtype=TORCH_DTYPES[run.precision.reduce_dtype],
        cpu_offload=run.memory.cpu_offload == "params",
    )


def shard_units(model: nn.Module, parts: Parts, unit: str | int) -> list[Unit]:
    """The modules that are gathered together, in the order of forward. All other modules belong to the root unit.

    An untied embedding is a unit of its own, and so are the final norm and head together: at a large vocabulary each is
    as big as several blocks. A tied embedding stays in the root, with all modules that share its weight: a shared parameter
    in two units is gathered and reduced twice (torch >= 2.13 refuses it).
    """
    if unit == "root":
        return []
    size = 1 if unit == "block" else int(unit)
    blocks = [model.get_submodule(name) for name in parts.blocks]
    shared = {id(p) for names in parts.tied for p in (model.get_parameter(name) for name in names)}

    def own(*names: str | None) -> list[list[nn.Module]]:
        found = [model.get_submodule(name) for name in names if name is not None]
        tied = any(id(p) in shared for module in found for p in module.parameters())
        return [found] if found and not tied and any(True for module in found for _ in module.parameters()) else []

    grouped = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    tied_blocks = [b for b in blocks if any(id(p) in shared for p in b.parameters())]
    if tied_blocks:
        grouped = [[b for b in group if b not in tied_blocks] for group in grouped]
    return [
        *(Unit(modules, is_lookup=_looks_up(modules)) for modules in own(parts.embedding)),
        *(Unit(group) for group in grouped if group),
        *(Unit(modules, is_last=parts.head is not None) for modules in own(parts.norm, parts.head)),
    ]


def _looks_up(modules: Sequence[nn.Module]) -> bool:
    """Whether these are plain embeddings. Another forward may compute with the weight, so that backward reads the weight."""
    return all(
        type(module).forward is nn.Embedding.forward and ("forward" not in vars(module) or is_vocab_parallel(module))
        for module in modules
    )

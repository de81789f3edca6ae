"""Puts a layout on a model. The order of application stands here, in one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.attention.document_attention import isolate_documents
from shardwright.attention.rules import check_packed_model, check_padded_model
from shardwright.backends.backend import choose_backend
from shardwright.backends.facts import backend_facts
from shardwright.config.schema import Parallelism, RunFile
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
from shardwright.parallel.context.attention import ContextPlace, split_attention
from shardwright.parallel.context.rules import check_context_model
from shardwright.parallel.ddp import Replicated
from shardwright.parallel.fsdp import Sharded, ShardOptions, Unit
from shardwright.parallel.mixed_precision import compute_in
from shardwright.parallel.pipeline.schedule_runner import Pipelined, Ties
from shardwright.parallel.pipeline.stages import (
    Cut,
    Stage,
    cut_stages,
    plan_cut,
    stage_parts,
    tied_over_stages,
)
from shardwright.parallel.tensor.apply_plan import TensorParallel
from shardwright.parallel.tensor.styles import divided
from shardwright.parallel.tensor.tp_plan import attention_modules, plan_tensor


def parallelize(
    model: nn.Module,
    run: RunFile,
    mesh: DeviceMesh,
    device: torch.device,
    chunks: LossChunks | None = None,
) -> Replicated | Sharded | Pipelined:
    """`model` (built on meta) split as `run` says, every parameter filled on `device`.

    chunks: how the head makes its loss where targets are announced to it (see `ChunkedHead`); None: it gives logits.
    Order: cut into stages; layers divided over tensor-parallel ranks; attention over context-parallel ranks, or over
    documents; recompute inside, compile around it, sharding around both; then weights, so that a rank only ever fills
    its part. `ddp` watches filled parameters.
    """
    whole, p = find_parts(model), run.parallelism
    attention = _attention_for_pieces(model, whole, run)
    cut = plan_cut(model, run.model, stage_count(p)) if p.pp_size > 1 else None
    stages = cut_stages(model, cut, _held_stages(p, mesh)) if cut else ()
    in_row = [stage_parts(whole, cut, (stage.index,)) for stage in stages] if cut else [whole]
    parts = stage_parts(whole, cut, [stage.index for stage in stages]) if cut else whole
    tensor = None
    if p.tp_size > 1:
        tensor = TensorParallel(model, parts, mesh["tp"], run, stages, attention)
    if chunks is not None and chunks.tokens and parts.head is not None:
        head: Any = model.get_submodule(parts.head)
        divided = tensor.peers if tensor is not None and tensor.divides(parts.head) else None
        ChunkedHead(head, chunks, divided, recompute=p.pp_size > 1 and schedule_of(p) == "gpipe")
    if (place := context_place(run, mesh)) is not None:
        split_attention(model, [model.get_submodule(name) for name in parts.blocks], place)
    elif run.data.batching == "pack" and is_transformers(model):
        isolate_documents(model)
    else:
        check_own_attention(model, run.model)
        if run.precision.param_dtype == "bf16" and is_transformers(model):
            choose_backend(device.type).replace_attention(model)
    decide_by_document(model)
    for name in parts.blocks:
        if run.memory.activation_checkpointing != "none":
            recompute_block(model.get_submodule(name), run.memory.activation_checkpointing)
        if run.memory.compile:
            compile_block(model.get_submodule(name))
    kinds: Sequence[Replicated | Sharded]
    if p.data_parallel == "ddp":
        kinds = [_replicated(model, stages, run, mesh, device)]
    else:
        roots = [(stage, stage.part) for stage in stages] if stages else [(model, model)]
        kinds = _sharded(model, roots, in_row, run, mesh, device)
    kinds[-1].finishers = (tensor.finish_gradients,) if tensor is not None else ()
    if cut is None:
        return kinds[0]
    return pipelined(model, stages, kinds, mesh, p, whole, cut, TORCH_DTYPES[run.precision.param_dtype])


def _held_stages(p: Parallelism, mesh: DeviceMesh) -> tuple[int, ...]:
    """The pipeline stages that this rank holds."""
    schedule = schedule_of(p)
    return rank_stages(schedule, p.pp_size, chunks_of(schedule), mesh["pp"].get_local_rank())


def _replicated(
    model: nn.Module, stages: Sequence[Stage], run: RunFile, mesh: DeviceMesh, device: torch.device
) -> Replicated:
    reduce_dtype = TORCH_DTYPES[run.precision.reduce_dtype]
    # a stage holds what fully_shard and materialise know of it
    filled = nn.ModuleList([model, *stages]) if stages else model
    materialise(filled, run.model, seed=run.training.seed, device=device)
    compute_in(model, TORCH_DTYPES[run.precision.param_dtype])
    group, bucket_bytes = replica_group(mesh), run.parallelism.bucket_bytes or backend_facts(device.type).bucket_bytes
    return Replicated(model, group, bucket_bytes, reduce_dtype, overlap=not stages)


def _sharded(
    model: nn.Module,
    roots: Sequence[tuple[nn.Module, nn.Module]],
    parts: Sequence[Parts],
    run: RunFile,
    mesh: DeviceMesh,
    device: torch.device,
) -> list[Sharded]:
    """One `Sharded` for each of `roots`: (module that is called, model whose names `parts` are)."""
    options, dp = shard_options(run, device.type), shard_mesh(mesh)
    kinds = [
        Sharded(root, shard_units(named, own, run.parallelism.unit), dp, options)
        for (root, named), own in zip(roots, parts)
    ]
    filled = model if roots[0][0] is model else nn.ModuleList([model, *(root for root, _ in roots)])
    offloaded = torch.device("cpu") if options.cpu_offload else device
    materialise(filled, run.model, seed=run.training.seed, device=offloaded)
    return kinds


def check_model(model: nn.Module, run: RunFile) -> None:
    """Raises what `parallelize` would for this model, before any process starts."""
    p = run.parallelism
    find_loss_chunks(model, run, "cpu")
    if p.pp_size > 1:
        plan_cut(model, run.model, stage_count(p))
    if p.tp_size > 1:
        parts = find_parts(model)
        styles = plan_tensor(model, parts, run).styles
        _attention_for_pieces(model, parts, run)
        if run.training.loss != CROSS_ENTROPY and styles.get(parts.head or "") == "vocabulary":
            raise ModelError(
                f"training.loss {run.training.loss} with parallelism.tp_size {p.tp_size}.",
                f"It is given whole logits, and {parts.head} is divided by vocabulary.",
                f"Give a parallelism.tp_plan in which {parts.head} is colwise_gather_output, or set tp_size to 1.",
            )
    if p.cp_size > 1:
        check_context_model(model, run)
    if run.data.batching == "pack":
        check_packed_model(model, p.cp_size)
    elif p.cp_size == 1:
        check_own_attention(model, run.model)
        check_padded_model(model)


def _attention_for_pieces(model: nn.Module, parts: Parts, run: RunFile) -> tuple[str, ...]:
    """The modules that attend, where sequence parallelism cuts sequences into pieces; see `attention_modules`."""
    p = run.parallelism
    divided = p.tp_size > 1 and p.sequence_parallel is not False
    return attention_modules(model, parts) if divided and is_transformers(model) else ()


def context_place(run: RunFile, mesh: DeviceMesh) -> ContextPlace | None:
    """Which tokens of each row this rank holds; None where it holds them all."""
    cp, p = mesh["cp"], run.parallelism
    if cp.size() == 1:
        return None
    kind = p.cp_attention or "all_gather"
    return ContextPlace(cp.size(), cp.get_local_rank(), is_balanced(p), cp.get_group(), kind)


def pipelined(
    model: nn.Module,
    stages: Sequence[Stage],
    kinds: Sequence[Replicated | Sharded],
    mesh: DeviceMesh,
    p: Parallelism,
    whole: Parts,
    cut: Cut,
    dtype: torch.dtype,
) -> Pipelined:
    """The stages under their schedule, and what they share with the stages of other ranks."""
    group, schedule = mesh["pp"].get_group(), schedule_of(p)
    last = stage_rank(schedule, p.pp_size, stages[0].count - 1)
    ties = Ties.between(tied_over_stages(whole, cut), mesh["pp"].get_local_rank(), 0, last)
    return Pipelined(model, stages, kinds, group, schedule, width=cut.width, dtype=dtype, ties=ties)


def shard_options(run: RunFile, device: str) -> ShardOptions:
    """How the data-parallel kind of `run` gathers and reduces on a device of this type."""
    p = run.parallelism
    stage = STAGES[p.data_parallel]
    return ShardOptions(
        stage=stage,
        reshard_after_forward=stage.reshard_after_forward
        if p.reshard_after_forward is None
        else p.reshard_after_forward,
        prefetch=backend_facts(device).prefetch if p.prefetch is None else p.prefetch,
        param_dtype=TORCH_DTYPES[run.precision.param_dtype],
        reduce_dtype=TORCH_DTYPES[run.precision.reduce_dtype],
        cpu_offload=run.memory.cpu_offload == "params",
    )


def shard_units(model: nn.Module, parts: Parts, unit: str | int) -> list[Unit]:
    """What is gathered together, in the order of forward; what is in no unit belongs to the root.

    An untied embedding is a unit of its own, and so are the final norm and head together: at a large vocabulary each is
    as big as several blocks. A tied one stays in the root, with all that share it: a shared parameter in two units is
    gathered and reduced twice (and refused by torch >= 2.13).
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
        *(Unit(modules, looked_up=_looks_up(modules)) for modules in own(parts.embedding)),
        *(Unit(group) for group in grouped if group),
        *(Unit(modules, ends=parts.head is not None) for modules in own(parts.norm, parts.head)),
    ]


def _looks_up(modules: Sequence[nn.Module]) -> bool:
    """Whether these are plain embeddings. Any other may compute with its weight, and its backward reads it then."""
    return all(
        type(module).forward is nn.Embedding.forward and ("forward" not in vars(module) or divided(module))
        for module in modules
    )

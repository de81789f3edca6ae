"""Puts a layout on a model. The order of application stands here, in one function."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.config.schema import RunFile
from shardwright.layout.rules_context import is_balanced
from shardwright.layout.zero import STAGES
from shardwright.models.adapters import Parts, find_parts
from shardwright.models.materialise import materialise
from shardwright.parallel.casting import compute_in
from shardwright.parallel.context import ContextPlace, split_attention
from shardwright.parallel.context_rules import check_context_model
from shardwright.parallel.data_parallel import BUCKET_BYTES, Replicated, Sharded, ShardOptions
from shardwright.parallel.mesh import replica_group, shard_mesh
from shardwright.parallel.recompute import compile_block, recompute_block

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def parallelize(
    model: nn.Module, run: RunFile, mesh: DeviceMesh, device: torch.device
) -> Replicated | Sharded:
    """`model` (built on meta) split as `run` says, every parameter filled on `device`.

    Order: context-parallel attention, recompute around it, compile around both, sharding around all; then weights, so
    that a rank only ever fills its part. `ddp` needs whole parameters before it can wrap them.
    """
    parts, p = find_parts(model), run.parallelism
    param_dtype, reduce_dtype = DTYPES[run.precision.param_dtype], DTYPES[run.precision.reduce_dtype]
    if (place := context_place(run, mesh)) is not None:
        check_context_model(model, run)
        split_attention(model, [model.get_submodule(name) for name in parts.blocks], place)
    for name in parts.blocks:
        if run.memory.activation_checkpointing != "none":
            recompute_block(model.get_submodule(name), run.memory.activation_checkpointing)
        if run.memory.compile:
            compile_block(model.get_submodule(name))
    if p.data_parallel == "ddp":
        materialise(model, run.model, seed=run.training.seed, device=device)
        compute_in(model, param_dtype)
        group, bucket_bytes = replica_group(mesh), p.bucket_bytes or BUCKET_BYTES
        return Replicated(
            model, group, bucket_bytes, reduce_dtype, find_unused=not uses_every_parameter(model)
        )
    stage = STAGES[p.data_parallel]
    options = ShardOptions(
        stage=stage,
        reshard_after_forward=stage.reshard_after_forward
        if p.reshard_after_forward is None
        else p.reshard_after_forward,
        prefetch=1 if p.prefetch is None else p.prefetch,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=run.memory.cpu_offload == "params",
    )
    sharded = Sharded(model, shard_units(model, parts, p.unit), shard_mesh(mesh), options)
    materialise(
        model,
        run.model,
        seed=run.training.seed,
        device=torch.device("cpu") if options.cpu_offload else device,
    )
    return sharded


def context_place(run: RunFile, mesh: DeviceMesh) -> ContextPlace | None:
    """Which tokens of each row this rank holds; None where it holds them all."""
    cp, p = mesh["cp"], run.parallelism
    if cp.size() == 1:
        return None
    kind = p.cp_attention or "all_gather"
    return ContextPlace(cp.size(), cp.get_local_rank(), is_balanced(run), cp.get_group(), kind)


def uses_every_parameter(model: nn.Module) -> bool:
    """Whether each forward is known to use all parameters: dense Transformers models; not experts, nor a user's module."""
    config = getattr(model, "config", None)
    return config is not None and not any("expert" in key for key in config.to_dict())


def shard_units(model: nn.Module, parts: Parts, unit: str | int) -> list[list[nn.Module]]:
    """Groups of modules that are gathered together, in the order of forward; what is in none belongs to the root.

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
        return (
            [found]
            if found and not tied and any(True for module in found for _ in module.parameters())
            else []
        )

    grouped = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    tied_blocks = [b for b in blocks if any(id(p) in shared for p in b.parameters())]
    if tied_blocks:
        grouped = [[b for b in group if b not in tied_blocks] for group in grouped]
    return own(parts.embedding) + [group for group in grouped if group] + own(parts.norm, parts.head)

"""What one pipeline rank holds, as bytes per block, per microbatch and per part: the constants of timeline and closed form.

m bytes of the stored (master) dtype, c of the compute dtype, r of the reduction dtype. N is the sharding degree: dp_shard x
cp, since context-parallel peers hold the same parameters and shard them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwright.arch.inventory import Shape
from shardwright.layout.schedule import rank_stages, split_blocks
from shardwright.layout.zero import STAGES
from shardwright.plan.activations import (
    block_kept,
    kept_tensors,
    loss_copies,
    total_per_token,
    workspace_per_token,
)
from shardwright.plan.job import DTYPE_BYTES, Job, Layout
from shardwright.plan.program import Program
from shardwright.plan.states import ADAM_MOMENTS, Elements, local_elements

MOMENT_BYTES = {"adamw": 2, "muon": 1, "sgd": 1}


class BlockBytes(NamedTuple):
    """Bytes of activations on one rank: per block and microbatch, or per microbatch.

    saved: kept by a block. work: what its backward makes besides (recomputation, gradients of activations). forward:
    what its forward makes besides. deferred: kept by a block between backward for inputs and for weights. boundary: kept
    per stage under a pipeline. head: kept by final norm and head. logits: bytes per byte-per-logit (local logits).
    """

    saved: float
    work: float
    forward: float
    deferred: float
    boundary: float
    head: float
    logits: float


@lru_cache(maxsize=65536)
def block_bytes(job: Job, program: Program, layout_key: tuple[int, int, int, bool, str, bool]) -> BlockBytes:
    """Activation bytes for (tp, cp, microbatch rows, sequence parallel, recompute, pipelined)."""
    tp, cp, rows, sequence_parallel, recompute, pipelined = layout_key
    s, width = job.shape, DTYPE_BYTES[job.param_dtype]
    sequence_parallel = sequence_parallel and tp > 1
    tokens = rows * (-(-job.max_length // cp))
    keys = job.max_length

    def total(kept: tuple[object, ...]) -> float:
        return tokens * total_per_token(kept, tp, sequence_parallel, program.keeps_gathered)  # type: ignore[arg-type]

    whole = total(block_kept(s, program, width, job.attention, keys, cp))
    saved = total(kept_tensors(s, program, width, job.attention, keys, recompute, cp))  # type: ignore[arg-type]
    workspace = tokens * workspace_per_token(s, width, tp, sequence_parallel)
    divided = tp if sequence_parallel else 1
    stream = width * s.hidden * tokens / divided
    norm = float(width) if s.norm_bias else program.rms_norm_bytes * width / 2
    head = tokens * s.hidden * (norm / divided + width / (1 if program.keeps_gathered else divided))
    products = width * (2 * s.hidden + s.query_width + s.ffn)
    outputs = width * (s.query_width + 2 * s.kv_width + 2 * s.hidden + (2 if s.gated else 1) * s.ffn)
    return BlockBytes(
        saved=saved,
        work=max(whole - saved, 0.0) + workspace,
        forward=workspace,
        deferred=tokens * (products + outputs) / tp,
        boundary=stream if pipelined and program.engine == "torch" else 0.0,
        head=head,
        logits=tokens * (-(-s.vocab // tp)),
    )


@dataclass(frozen=True)
class RankBytes:
    """Everything the memory of one pipeline rank is made of, in bytes.

    blocks: blocks of each of its stages. first, last: which of its stages (by local number) holds the embedding, the
    head; -1 for none. resting: of one block, the embedding and the head, gradients once reduced. accumulated: the same
    before reduction, when it is put off. transient: gradient and reduction input of one unit in backward. gathered: of one
    unit. resident: gathered parameters stay for the whole update. loss: all copies in the backward of the loss;
    loss_kept: those kept from forward to backward; loss_after: those alive in the head's backward.
    """

    blocks: tuple[int, ...]
    first: int
    last: int
    parameters: float
    optimizer: float
    buffers: float
    always: float
    resting: tuple[float, float, float]
    accumulated: tuple[float, float, float]
    transient: tuple[float, float, float]
    gathered: tuple[float, float, float]
    gathered_all: float
    resident: bool
    ahead: int
    step: float
    activations: BlockBytes
    cast: tuple[float, float]
    loss: float
    loss_kept: float
    loss_after: float


def stages_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """Blocks of every pipeline stage: the one split that planner and runtime use."""
    return split_blocks(job.shape.layers, layout.axes.pp * layout.chunks)


def accumulates(layout: Layout, program: Program, microbatches: int) -> bool:
    """Whether gradients stay whole until the last microbatch (A112)."""
    if program.engine == "flat" or layout.data_parallel == "ddp" or microbatches == 1:
        return False
    pipelined = layout.axes.pp > 1 and program.pipeline_keeps_gathered
    return pipelined or not STAGES[layout.data_parallel].reduces_each_microbatch


def _three(per_element: float, elements: tuple[float, float, float]) -> tuple[float, float, float]:
    return (per_element * elements[0], per_element * elements[1], per_element * elements[2])


def _unit_blocks(layout: Layout, layers: int) -> int:
    if layout.unit == "block":
        return 1
    return layers if layout.unit == "root" else min(int(layout.unit), layers)


@lru_cache(maxsize=65536)
def rank_bytes(job: Job, layout: Layout, program: Program, rank: int) -> RankBytes:
    """The bytes of pipeline rank `rank`; of its peers on the other axes, the one with the fullest shards."""
    axes, s = layout.axes, job.shape
    stages = stages_of(job, layout)
    own = (0,) if axes.pp == 1 else rank_stages(layout.schedule or "1f1b", axes.pp, layout.chunks, rank)
    blocks = tuple(stages[stage] for stage in own)
    first = own.index(0) if 0 in own else -1
    last = own.index(len(stages) - 1) if len(stages) - 1 in own else -1
    microbatches = layout.microbatches(job)
    stage = STAGES[layout.data_parallel]
    degree = axes.dp_shard * axes.cp if stage.shards_optimizer else 1
    e = local_elements(s, axes.tp, degree)
    head = e.head
    if s.tied and axes.pp > 1:
        # The last stage holds its own copy of a tied embedding.
        head = Elements(head.whole + e.embedding.whole, head.shard + e.embedding.shard)
    parts = (e.block, e.embedding if first >= 0 else Elements(0, 0), head if last >= 0 else Elements(0, 0))
    whole = (float(parts[0].whole), float(parts[1].whole), float(parts[2].whole))
    shard = (float(parts[0].shard), float(parts[1].shard), float(parts[2].shard))
    count = sum(blocks)
    total, total_shard = count * whole[0] + whole[1] + whole[2], count * shard[0] + shard[1] + shard[2]
    a = block_bytes(
        job,
        program,
        (axes.tp, axes.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute, axes.pp > 1),
    )
    state = _states(job, layout, program, total, total_shard, degree)
    c, m, r = (DTYPE_BYTES[dtype] for dtype in (job.param_dtype, job.master_dtype, job.reduce_dtype))
    sharded = program.engine == "torch" and stage.shards_optimizer
    late = accumulates(layout, program, microbatches)
    unit = _unit_blocks(layout, count)
    group = (unit * whole[0], whole[1], whole[2]) if layout.unit != "root" else (total, total, total)
    resident = sharded and (
        not stage.gathers_each_microbatch
        or layout.reshard_after_forward is False
        or (axes.pp > 1 and program.pipeline_keeps_gathered)
        or layout.unit == "root"
    )
    kept_part = 0.0
    if sharded and not resident and layout.reshard_after_forward is not True:
        kept_part = c * total / int(layout.reshard_after_forward)
    hybrid = sharded and axes.dp_replicate > 1 and microbatches > 1 and not late
    resting = m * 1.0 + (r if hybrid else 0.0)
    casts = program.engine == "torch" and layout.data_parallel == "ddp" and c < m
    cast = (c * whole[0], c * whole[2]) if casts else (0.0, 0.0)
    copies = [size for _, size in loss_copies(program, c)]
    pieces = 16 if job.loss == "chunked" else 1
    return RankBytes(
        blocks=blocks,
        first=first,
        last=last,
        parameters=state[0],
        optimizer=state[1],
        buffers=state[3] + kept_part,
        always=state[2],
        resting=_three(resting, shard) if sharded and layout.offload == "none" else (0.0, 0.0, 0.0),
        accumulated=_three(r, whole) if late else (0.0, 0.0, 0.0),
        transient=_three(c + r, group) if sharded else (0.0, 0.0, 0.0),
        gathered=_three(c, group) if sharded else (0.0, 0.0, 0.0),
        gathered_all=c * total if sharded else 0.0,
        resident=resident,
        ahead=1 + layout.prefetch,
        step=program.optimizer_temporary_bytes * (0.0 if layout.offload != "none" else total_shard),
        activations=a,
        cast=cast,
        loss=a.logits * sum(copies) / pieces,
        loss_kept=0.0 if pieces > 1 else a.logits * sum(copies[:2]),
        loss_after=a.logits * 2 * c / pieces,
    )


def _states(
    job: Job, layout: Layout, program: Program, total: float, total_shard: float, degree: int
) -> tuple[float, float, float, float]:
    """(parameters, optimizer states with any master copy, gradients that are always there, buffers) of one rank."""
    c, m = DTYPE_BYTES[job.param_dtype], DTYPE_BYTES[job.master_dtype]
    moments = MOMENT_BYTES.get(job.optimizer, ADAM_MOMENTS) * m
    if program.engine == "flat":
        shard = total / degree
        master = m if c < m else 0
        gradients = (m + program.flat_gradient_copies) * total
        return c * total, (moments + master) * shard, gradients, program.buffer_bytes
    if layout.data_parallel == "ddp":
        return m * total, moments * total, m * total, program.buffer_bytes
    if layout.offload != "none":
        return 0.0, 0.0, 0.0, program.buffer_bytes
    return m * total_shard, moments * total_shard, 0.0, program.buffer_bytes



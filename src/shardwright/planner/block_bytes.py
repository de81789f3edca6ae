"""Activation bytes of one block, the head and the loss on one rank, for a whole microbatch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.attention import backward_is_wide
from shardwright.layout.combinations import SPLIT_BACKWARD
from shardwright.layout.loss import loss_chunk_tokens, worthwhile
from shardwright.planner.activations import (
    Kept,
    block_kept,
    holds_logits,
    kept_tensors,
    loss_copies,
    norm_bytes,
    total_per_token,
    workspace_per_token,
)
from shardwright.planner.job import Job, Layout, Recompute
from shardwright.planner.program import Program

LOSS_CHUNKS = 16

ActivationKey = tuple[int, int, int, bool, Recompute, bool]
"""tp, cp, microbatch rows, sequence parallel, recompute, pipelined."""


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
def block_bytes(job: Job, program: Program, layout_key: ActivationKey) -> BlockBytes:
    """Activation bytes for (tp, cp, microbatch rows, sequence parallel, recompute, pipelined)."""
    tp, cp, rows, sequence_parallel, recompute, pipelined = layout_key
    s, width = job.shape, DTYPE_BYTES[job.param_dtype]
    sequence_parallel = sequence_parallel and tp > 1
    tokens = rows * (-(-job.max_length // cp))
    keys = job.max_length

    def total(kept: tuple[Kept, ...]) -> float:
        return tokens * total_per_token(kept, tp, sequence_parallel, program.keeps_gathered)

    whole = total(block_kept(s, program, width, job.attention, keys, cp))
    saved = total(kept_tensors(s, program, width, job.attention, keys, recompute, cp))
    workspace = tokens * workspace_per_token(s, width, tp, sequence_parallel)
    divided = tp if sequence_parallel else 1
    stream = width * s.hidden * tokens / divided
    backward = workspace
    queries = min(tokens // rows, int(job.attended))
    if program.own and backward_is_wide(job.device_kind, job.param_dtype, queries, s.head_dim):
        # Beside two gradients of the stream: grad, out and query, key and value, and the gradients of these three.
        elements = 4 * s.query_width + 4 * s.kv_width
        backward = max(backward, 4 * elements * tokens / tp + 2 * stream)
    norm = norm_bytes(s, program, width)
    head = tokens * s.hidden * (norm / divided + width / (1 if program.keeps_gathered else divided))
    products = width * (2 * s.hidden + s.query_width + s.ffn)
    outputs = width * (s.query_width + 2 * s.kv_width + 2 * s.hidden + (2 if s.gated else 1) * s.ffn)
    return BlockBytes(
        saved=saved,
        work=max(whole - saved, 0.0) + backward,
        forward=workspace,
        deferred=tokens * (products + outputs) / tp,
        boundary=stream if pipelined and program.engine == "torch" else 0.0,
        head=head,
        logits=tokens * (-(-s.vocab // tp)),
    )


def activation_key(layout: Layout) -> ActivationKey:
    """What of a layout decides the activations of one block."""
    axes = layout.axes
    return (axes.tp, axes.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute, axes.pp > 1)


def with_casts(a: BlockBytes, recompute: Recompute, block_bytes: float, head_bytes: float) -> BlockBytes:
    """`a` with the casts of a block's and the head's weights that ddp makes in forward and autograd keeps.

    With recomputation a block's casts are made again in its backward.
    """
    if recompute == "none":
        return a._replace(saved=a.saved + block_bytes, head=a.head + head_bytes)
    return a._replace(work=a.work + block_bytes, head=a.head + head_bytes)


def loss_bytes(job: Job, program: Program, logits: float, layout: Layout) -> tuple[float, float, float]:
    """Bytes of the logits' copies: in the loss's backward, kept from forward to backward, and in the head's backward.

    A chunked loss of our own keeps no logits: the gradients of hidden states and, in fp32, of the head are there from
    forward on, with the logits, their wide copy and their gradient of one chunk. That of other programs has the logits and
    their gradient whole in the compute dtype, and its fp32 copies of one chunk only.
    """
    width, pipelined = DTYPE_BYTES[job.param_dtype], layout.axes.pp > 1
    chunked = in_chunks(job, program, logits, layout)
    if chunked and program.own:
        return _own_chunks(job, logits, layout)
    copies = [size for _, size in loss_copies(program, width, layout.axes.tp > 1, pipelined)]
    if chunked:
        return logits * (2 * width + sum(copies) / LOSS_CHUNKS), logits * width, logits * 2 * width
    held = width if holds_logits(program, pipelined) else 0
    return logits * sum(copies), logits * sum(copies[: 2 if held else 1]), logits * (width + held)


def in_chunks(job: Job, program: Program, logits: float, layout: Layout) -> bool:
    """Whether the loss over so many logits of a microbatch is made in chunks."""
    if job.loss != "auto":
        return job.loss == "chunked"
    large = worthwhile(logits, job.packed, job.device_kind, job.param_dtype)
    return program.own and large and layout.schedule not in SPLIT_BACKWARD


def _own_chunks(job: Job, logits: float, layout: Layout) -> tuple[float, float, float]:
    width, vocabulary = DTYPE_BYTES[job.param_dtype], -(-job.shape.vocab // layout.axes.tp)
    tokens, hidden = logits / vocabulary, job.shape.hidden
    made = tokens * hidden * width + vocabulary * hidden * max(width, 4)
    chunk = (
        min(tokens, loss_chunk_tokens(vocabulary, job.device_kind, job.param_dtype))
        * vocabulary
        * (2 * width + max(width, 4))
    )
    narrow = vocabulary * hidden * width if width < 4 else 0
    return made + chunk, made, made + narrow

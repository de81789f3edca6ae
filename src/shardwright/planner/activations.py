"""Bytes that blocks, head and loss keep for the backward pass, and make in it, on one rank.

Widths: h hidden, q heads x head_dim, k kv_heads x head_dim, f inner width of the MLP, V vocabulary. With fused norms and a
plain MLP a block keeps what Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, say: 34 s b h + 5 a s^2 b bytes.

Tensor parallelism divides what lies between a column and a row product by tp. The rest (norms, inputs, dropout masks) is
whole on every tensor-parallel rank, and divided too with sequence parallel.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import block_products
from shardwright.arch.shape import Shape
from shardwright.backends.facts import backend_facts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.combinations import SPLIT_BACKWARD
from shardwright.layout.loss import loss_chunk_tokens, worthwhile
from shardwright.planner.problem import Layout, Problem, Recompute
from shardwright.planner.program import Program

LOSS_CHUNKS = 16
"""Chunks of the loss in programs that are not ours."""


class Kept(NamedTuple):
    """One kept tensor of a block: its bytes per token, and what tensor parallelism does to it.

    whole: divided by tp with sequence parallel only. gathered: the input of a column product, see `Program.keeps_gathered`.
    split: divided by tp. sum: as whole, and there only where there is more than one tensor-parallel rank.
    """

    name: str
    bytes_per_token: float
    divided: Literal["whole", "gathered", "split", "sum"]


def norm_bytes(s: Shape, p: Program, width: int) -> float:
    """Bytes that a norm keeps per element of its input. LayerNorm is one kernel everywhere.

    Gemma multiplies by its weight in fp32, so the normalised product is fp32 too.
    """
    if s.norm_bias or p.rms_norm == "fused":
        return width
    return 8 if p.rms_norm == "composite" or s.family.startswith("gemma") else 4 + width


def _attention(problem: Problem, cp: int) -> list[Kept]:
    s, p, width = problem.shape, problem.program, DTYPE_BYTES[problem.param_dtype]
    # Written out, attention's products need K and V for every query head.
    kv = s.query_width if p.repeats_kv or problem.attention == "eager" else s.kv_width
    kept = [
        Kept("queries", width * s.query_width, "split"),
        Kept("keys and values", 2 * width * kv * (cp if p.gathers_kv else 1), "split"),
        Kept("attention output", width * s.query_width, "split"),
    ]
    family = family_of(s.family)
    if family.copies_attention:
        kept.append(Kept("copied attention output", width * s.query_width, "split"))
    if family.keeps_fused_qkv:
        kept.append(Kept("fused queries and keys", width * (s.query_width + s.kv_width), "split"))
    if s.qk_norm:
        kept.append(Kept("norms of queries and keys", norm_bytes(s, p, width) * (s.query_width + s.kv_width), "split"))
    if problem.attention == "flash":
        kept.append(Kept("log-sum-exp of attention", 4 * s.heads, "split"))
    else:
        scores = p.attention_matrix_bytes * s.heads * problem.max_length
        kept.append(Kept("attention matrices", scores, "split"))
    return kept


@lru_cache(maxsize=1024)
def _whole_block(problem: Problem, cp: int) -> tuple[Kept, ...]:
    """What one block keeps without recomputation."""
    s, p, width = problem.shape, problem.program, DTYPE_BYTES[problem.param_dtype]
    kept = [Kept("norm inputs", s.norms_per_block * norm_bytes(s, p, width) * s.hidden, "whole")]
    kept.append(Kept("input of q, k, v", width * s.hidden, "gathered"))
    kept += _attention(problem, cp)
    if not s.parallel_block:
        kept.append(Kept("input of the MLP", width * s.hidden, "gathered"))
    inner = width * (p.gated_tensors if s.gated else family_of(s.family).mlp_tensors)
    kept.append(Kept("MLP inner", inner * s.ffn, "split"))
    if p.dropout:
        kept.append(Kept("dropout masks", 2 * s.hidden, "whole"))
    return tuple(kept)


def _selective(problem: Problem, recompute: Recompute, cp: int) -> tuple[Kept, ...]:
    """What selective recomputation keeps of a block."""
    s, p, width = problem.shape, problem.program, DTYPE_BYTES[problem.param_dtype]
    if p.own:
        return _own_selective(problem, recompute)
    if p.selective == "attention":
        return tuple(one for one in _whole_block(problem, cp) if one.name != "attention matrices")
    core = [Kept("attention output", width * s.query_width + 4 * s.heads, "split")]
    if p.selective == "alternate":
        products = [
            Kept("queries and values", width * (s.query_width + s.kv_width), "split"),
            Kept("gate", width * s.ffn, "split"),
            Kept("MLP output", width * s.hidden, "whole"),
        ]
    else:
        products = [
            Kept("queries, keys and values", width * (s.query_width + 2 * s.kv_width), "split"),
            Kept("attention projection", width * s.hidden, "gathered"),
            Kept("gate and up", width * (2 if s.gated else 1) * s.ffn, "split"),
            Kept("MLP output", width * s.hidden, "gathered"),
        ]
    return (Kept("block input", width * s.hidden, "whole"), *core, *products)


def _own_selective(problem: Problem, recompute: Recompute) -> tuple[Kept, ...]:
    """What ours keeps: attention, the results of products, and their sums over tensor-parallel ranks."""
    s, width = problem.shape, DTYPE_BYTES[problem.param_dtype]
    products, row = block_products(s), []
    for index, (_, out, split) in enumerate(products):
        if recompute == "selective" or index % 2 == 0:
            row.append(Kept(f"product {index + 1}", width * out, "gathered" if split == "row" else "split"))
    sums = width * sum(out for _, out, split in products if split == "row")
    return (
        Kept("block input", width * s.hidden, "whole"),
        Kept("attention output", width * s.query_width + 4 * s.heads, "split"),
        *row,
        Kept("sums over tensor-parallel ranks", sums, "sum"),
    )


def kept_tensors(problem: Problem, recompute: Recompute = "none", cp: int = 1) -> tuple[Kept, ...]:
    """What one block keeps from forward to backward under a recomputation mode."""
    if recompute == "full":
        return (Kept("block input", DTYPE_BYTES[problem.param_dtype] * problem.shape.hidden, "whole"),)
    return _whole_block(problem, cp) if recompute == "none" else _selective(problem, recompute, cp)


def total_per_token(kept: tuple[Kept, ...], tp: int, sequence_parallel: bool, keeps_gathered: bool) -> float:
    """Bytes per token on one tensor-parallel rank."""
    divided = tp if sequence_parallel else 1
    by = {
        "split": tp,
        "whole": divided,
        "gathered": 1 if keeps_gathered else divided,
        "sum": divided if tp > 1 else math.inf,
    }
    return sum(one.bytes_per_token / by[one.divided] for one in kept)


ActivationKey = tuple[int, int, int, bool, Recompute, bool]
"""What of a layout decides the activations of a block: tp, cp, microbatch rows, sequence parallel, recompute, pipelined."""


def activation_key(layout: Layout) -> ActivationKey:
    """The key of a layout."""
    axes = layout.axes
    return (axes.tp, axes.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute, axes.pp > 1)


class BlockBytes(NamedTuple):
    """Bytes of activations on one rank: per block and microbatch, or per microbatch."""

    saved: float  # kept by a block from forward to backward
    boundary: float  # kept per stage under a pipeline
    head: float  # kept by final norm and head
    deferred: float  # kept by a block between its backward for inputs and that for weights
    work: float  # what a block's backward makes besides: recomputed, and gradients of activations
    forward: float  # what its forward makes besides


@lru_cache(maxsize=65536)
def block_bytes(problem: Problem, key: ActivationKey) -> BlockBytes:
    """Activation bytes of a block, and of the head, for a whole microbatch."""
    tp, cp, rows, sequence_parallel, recompute, pipelined = key
    s, program, width = problem.shape, problem.program, DTYPE_BYTES[problem.param_dtype]
    sequence_parallel = sequence_parallel and tp > 1
    tokens = rows * (-(-problem.max_length // cp))

    def total(recompute: Recompute) -> float:
        kept = kept_tensors(problem, recompute, cp)
        return tokens * total_per_token(kept, tp, sequence_parallel, program.keeps_gathered)

    whole, saved = total("none"), total(recompute)
    divided = tp if sequence_parallel else 1
    stream = width * s.hidden * tokens / divided
    # Gradients of activations at their most: the MLP's inner ones and two of the stream. With sequence parallel the gathered
    # input of the product is there too while its weight gradient is computed.
    workspace = tokens * (3 if s.gated else 2) * width * s.ffn / tp + 2 * stream
    workspace += tokens * 2 * width * s.hidden if sequence_parallel else 0
    backward, queries = workspace, min(tokens // rows, int(problem.attended))
    facts = backend_facts(problem.device_kind)
    if program.own and facts.backward_in_float32(problem.param_dtype, queries, s.head_dim):
        # Beside two gradients of the stream: grad, out and query, key and value, and the gradients of these three.
        elements = 4 * s.query_width + 4 * s.kv_width
        backward = max(backward, 4 * elements * tokens / tp + 2 * stream)
    norm = norm_bytes(s, program, width)
    products = width * (2 * s.hidden + s.query_width + s.ffn)
    outputs = width * (s.query_width + 2 * s.kv_width + 2 * s.hidden + (2 if s.gated else 1) * s.ffn)
    return BlockBytes(
        saved=saved,
        boundary=stream if pipelined and program.engine == "torch" else 0.0,
        head=tokens * s.hidden * (norm / divided + width / (1 if program.keeps_gathered else divided)),
        deferred=tokens * (products + outputs) / tp,
        work=max(whole - saved, 0.0) + backward,
        forward=workspace,
    )


class Activations(NamedTuple):
    """Bytes of what `memory_timeline.Alive` counts first, in its order."""

    saved: float
    boundary: float
    head: float
    loss_kept: float
    deferred: float
    work: float
    forward: float
    loss: float
    loss_after: float


def activation_bytes(problem: Problem, layout: Layout, casts: tuple[float, float]) -> Activations:
    """Bytes of all activations of a layout.

    casts: of a block's and the head's weights, made by ddp in forward and kept by autograd; with recomputation a block's casts
    are made again in its backward.
    """
    a = block_bytes(problem, activation_key(layout))
    loss, kept, after = loss_bytes(problem, layout)
    saved, work = (casts[0], 0.0) if layout.recompute == "none" else (0.0, casts[0])
    return Activations(
        a.saved + saved, a.boundary, a.head + casts[1], kept, a.deferred, a.work + work, a.forward, loss, after
    )


def local_logits(problem: Problem, layout: Layout) -> int:
    """Logits of a microbatch on one rank."""
    tokens = layout.microbatch_rows * -(-problem.max_length // layout.axes.cp)
    return tokens * -(-problem.shape.vocab // layout.axes.tp)


def _holds_logits(problem: Problem, layout: Layout) -> bool:
    """Whether the logits in the compute dtype are alive until the loss's backward is done."""
    return problem.program.holds_logits or (layout.axes.pp > 1 and problem.program.engine == "torch")


def loss_copies(problem: Problem, layout: Layout) -> tuple[tuple[str, float], ...]:
    """(name, bytes per local logit) alive together in the backward of the loss."""
    p = problem.program
    copies = p.split_loss_copies if layout.axes.tp > 1 else p.loss_copies
    return (("logits", float(DTYPE_BYTES[problem.param_dtype])), *copies) if _holds_logits(problem, layout) else copies


def loss_bytes(problem: Problem, layout: Layout) -> tuple[float, float, float]:
    """Bytes of the logits' copies: in the loss's backward, kept from forward to backward, and in the head's backward.

    A chunked loss of our own keeps no logits: the gradients of hidden states and, in fp32, of the head are there from
    forward on, with the logits, their fp32 copy and their gradient of one chunk. That of other programs has the logits and
    their gradient whole in the compute dtype, and its fp32 copies of one chunk only.
    """
    width, logits = DTYPE_BYTES[problem.param_dtype], local_logits(problem, layout)
    chunked = in_chunks(problem, layout)
    if chunked and problem.program.own:
        return _own_chunks(problem, layout)
    copies = [size for _, size in loss_copies(problem, layout)]
    if chunked:
        return logits * (2 * width + sum(copies) / LOSS_CHUNKS), logits * width, logits * 2 * width
    held = width if _holds_logits(problem, layout) else 0
    return logits * sum(copies), logits * sum(copies[: 2 if held else 1]), logits * (width + held)


def in_chunks(problem: Problem, layout: Layout) -> bool:
    """Whether the loss over a microbatch's logits is made in chunks."""
    if problem.loss != "auto":
        return problem.loss == "chunked"
    logits = local_logits(problem, layout)
    large = worthwhile(logits, problem.packed, problem.device_kind, problem.param_dtype)
    return problem.program.own and large and layout.schedule not in SPLIT_BACKWARD


def _own_chunks(problem: Problem, layout: Layout) -> tuple[float, float, float]:
    width, vocabulary = DTYPE_BYTES[problem.param_dtype], -(-problem.shape.vocab // layout.axes.tp)
    tokens, hidden = local_logits(problem, layout) / vocabulary, problem.shape.hidden
    made = tokens * hidden * width + vocabulary * hidden * max(width, 4)
    chunk = min(tokens, loss_chunk_tokens(vocabulary, problem.device_kind, problem.param_dtype))
    cast = vocabulary * hidden * width if width < 4 else 0
    return made + chunk * vocabulary * (2 * width + max(width, 4)), made, made + cast

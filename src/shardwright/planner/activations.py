"""Bytes that one block, the head and the loss keep for the backward pass, per token of a microbatch.

Widths: h hidden, q heads x head_dim, k kv_heads x head_dim, f inner width of the MLP, V vocabulary. With fused norms and a
plain MLP this is Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4: 34 s b h + 5 a s^2 b bytes per block.

Tensor parallelism divides what lies between a column and a row product by tp. The rest (norms, inputs, dropout masks) is
whole on every tensor-parallel rank, and divided too with sequence parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwright.arch.families import family_of
from shardwright.arch.shape import Shape
from shardwright.planner.job import Attention, Recompute
from shardwright.planner.program import Program

Where = Literal["whole", "gathered", "split"]


@dataclass(frozen=True)
class Kept:
    """One kept tensor of a block: its bytes per token, and what tensor parallelism does to it.

    whole: divided by tp with sequence parallel only. gathered: the input of a column product, see
    `Program.keeps_gathered`. split: divided by tp.
    """

    name: str
    bytes_per_token: float
    where: Where


def norm_bytes(s: Shape, p: Program, width: int) -> float:
    """Bytes that a norm keeps per element of its input. LayerNorm is one kernel everywhere.

    Gemma multiplies by its weight in fp32, so the normalised product is fp32 too.
    """
    if s.norm_bias or p.rms_norm == "fused":
        return width
    return 8 if p.rms_norm == "composite" or s.family.startswith("gemma") else 4 + width


def _attention(s: Shape, p: Program, width: int, attention: Attention, keys: int, cp: int) -> list[Kept]:
    # Written out, attention's products need K and V for every query head.
    kv = s.query_width if p.repeats_kv or attention == "eager" else s.kv_width
    spread = cp if p.gathers_kv else 1
    kept = [
        Kept("queries", width * s.query_width, "split"),
        Kept("keys and values", 2 * width * kv * spread, "split"),
        Kept("attention output", width * s.query_width, "split"),
    ]
    family = family_of(s.family)
    if family.copies_attention:
        kept.append(Kept("copied attention output", width * s.query_width, "split"))
    if family.keeps_fused_qkv:
        kept.append(Kept("fused queries and keys", width * (s.query_width + s.kv_width), "split"))
    if s.qk_norm:
        kept.append(Kept("norms of queries and keys", norm_bytes(s, p, width) * (s.query_width + s.kv_width), "split"))
    if attention == "flash":
        kept.append(Kept("log-sum-exp of attention", 4 * s.heads, "split"))
    else:
        kept.append(Kept("attention matrices", p.attention_matrix_bytes * s.heads * keys, "split"))
    return kept


@lru_cache(maxsize=1024)
def block_kept(shape: Shape, p: Program, width: int, attention: Attention, keys: int, cp: int = 1) -> tuple[Kept, ...]:
    """What one block keeps without recomputation. `width`: bytes of the compute dtype. `keys`: tokens of a row."""
    s = shape
    kept = [Kept("norm inputs", s.norms_per_block * norm_bytes(s, p, width) * s.hidden, "whole")]
    kept.append(Kept("input of q, k, v", width * s.hidden, "gathered"))
    kept += _attention(s, p, width, attention, keys, cp)
    if not s.parallel_block:
        kept.append(Kept("input of the MLP", width * s.hidden, "gathered"))
    inner = width * (p.gated_tensors if s.gated else family_of(s.family).mlp_tensors)
    kept.append(Kept("MLP inner", inner * s.ffn, "split"))
    if p.dropout:
        kept.append(Kept("dropout masks", 2 * s.hidden, "whole"))
    return tuple(kept)


def _selective(s: Shape, p: Program, width: int, attention: Attention, keys: int, cp: int) -> tuple[Kept, ...]:
    """What selective recomputation keeps of a block."""
    if p.selective == "attention":
        return tuple(one for one in block_kept(s, p, width, attention, keys, cp) if one.name != "attention matrices")
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


@lru_cache(maxsize=4096)
def kept_tensors(
    shape: Shape, p: Program, width: int, attention: Attention, keys: int, recompute: Recompute, cp: int = 1
) -> tuple[Kept, ...]:
    """What one block keeps from forward to backward under a recomputation mode."""
    if recompute == "full":
        return (Kept("block input", width * shape.hidden, "whole"),)
    if recompute == "selective":
        return _selective(shape, p, width, attention, keys, cp)
    return block_kept(shape, p, width, attention, keys, cp)


def total_per_token(kept: tuple[Kept, ...], tp: int, sequence_parallel: bool, keeps_gathered: bool) -> float:
    """Bytes per token on one tensor-parallel rank."""
    divided = tp if sequence_parallel else 1
    by = {"split": tp, "whole": divided, "gathered": 1 if keeps_gathered else divided}
    return sum(one.bytes_per_token / by[one.where] for one in kept)


def workspace_per_token(shape: Shape, width: int, tp: int, sequence_parallel: bool) -> float:
    """Gradients of activations inside one block's backward at their most: the MLP's inner ones and two of the stream.

    With sequence parallel the gathered input of the product is there too while its weight gradient is computed.
    """
    inner = (3 if shape.gated else 2) * width * shape.ffn / tp
    stream = 2 * width * shape.hidden / (tp if sequence_parallel else 1)
    return inner + stream + (2 * width * shape.hidden if sequence_parallel and tp > 1 else 0)


def loss_copies(p: Program, width: int, split: bool, pipelined: bool) -> tuple[tuple[str, float], ...]:
    """(name, bytes per local logit) alive together in the backward of the loss; `split`: the vocabulary is divided."""
    copies = p.split_loss_copies if split else p.loss_copies
    return (("logits", float(width)), *copies) if holds_logits(p, pipelined) else copies


def holds_logits(p: Program, pipelined: bool) -> bool:
    """Whether the logits in the compute dtype are alive until the loss's backward is done."""
    return p.holds_logits or (pipelined and p.engine == "torch")

"""Attention of a block of queries to a block of keys, with the log-sum-exp that lets blocks be merged.

B rows, N query heads, K kv heads (N a multiple of K), Q queries, P keys, H head width. Tensors are [B, heads, tokens, H],
log-sum-exps [B, N, Q]. The accumulation dtype is float64 for float64 and float32 otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.backends.facts import backend_facts
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import (
    flash_attention_cpu,
    flash_attention_cpu_backward,
    flash_attention_cuda,
    flash_attention_cuda_backward,
)


@dataclass(frozen=True)
class AttentionOutput:
    """Output [B, N, Q, H] and log-sum-exp of the scores [B, N, Q] of one block; `seeds` is what CUDA's backward needs."""

    out: Tensor
    lse: Tensor
    seeds: tuple[Tensor, ...] = ()


def kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Which implementation computes these: `cpu_flash`, `cuda_flash` or `plain`."""
    if query.shape[-1] != value.shape[-1] or not key.numel():
        return "plain"
    if query.device.type == "cpu":
        return "cpu_flash" if query.dtype in (torch.float64, torch.float32, torch.bfloat16) else "plain"
    return "cuda_flash" if fits_cuda_flash(query, value) else "plain"


def fits_cuda_flash(query: Tensor, value: Tensor) -> bool:
    """Whether torch's flash kernels for CUDA compute these."""
    width, is_16bit = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_16bit and width == value.shape[-1] and width % 8 == 0 and width <= 256


def seeds_without_dropout(query: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """`AttentionOutput.seeds` as torch's kernel takes them where no forward has returned any: without dropout it reads none."""
    if not fits_cuda_flash(query, value):
        return ()
    return torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> AttentionOutput:
    """softmax(scale x query key^T) value, and its log-sum-exp. `causal` needs as many queries as keys: the same tokens."""
    how = kernel(query, key, value)
    if how == "cpu_flash":
        out, lse = flash_attention_cpu(query, key, value, 0.0, causal, scale=scale)
        return AttentionOutput(out, lse)
    if how == "cuda_flash":
        found = flash_attention_cuda(query, key, value, 0.0, causal, False, scale=scale)
        return AttentionOutput(found[0], found[1], (found[6], found[7]))
    scores = _scores(query, key, scale, causal)
    lse = scores.logsumexp(-1)
    out = _per_head((scores - lse.unsqueeze(-1)).exp(), value.to(scores.dtype))
    return AttentionOutput(out.to(query.dtype), lse)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: AttentionOutput, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of this block, where `whole` is the merged result over all blocks of these queries.

    The block's part of the softmax is exp(score - whole.lse), so blocks need no results of their own.
    """
    how, (out, lse) = kernel(query, key, value), (whole.out, whole.lse)
    if how == "cpu_flash":
        given = [grad, query, key, value, out]
        if backward_in_float32(query):
            given = [t.float() for t in given]
        found = flash_attention_cpu_backward(*given, lse, 0.0, causal, scale=scale)
        given.clear()
        return tuple(g.to(query.dtype) for g in found)
    if how == "cuda_flash":
        sizes = (None, None, query.shape[2], key.shape[2])
        return flash_attention_cuda_backward(
            grad, query, key, value, out, lse, *sizes, 0.0, causal, *whole.seeds, scale=scale
        )
    scores = _scores(query, key, scale, causal)
    dtype = scores.dtype
    share = (scores - lse.to(dtype).unsqueeze(-1)).exp()
    g, v = grad.to(dtype), value.to(dtype)
    inner = _per_head_transposed(g, v) - (g * out.to(dtype)).sum(-1, keepdim=True)
    by_score = share * inner * scale
    grads = (
        _per_head(by_score, key.to(dtype)),
        _to_kv_heads(by_score.transpose(-1, -2) @ query.to(dtype), key),
        _to_kv_heads(share.transpose(-1, -2) @ g, value),
    )
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def backward_in_float32(query: Tensor) -> bool:
    """Whether `attend_backward` computes in float32 what came in bf16, since that is faster."""
    dtype = "bf16" if query.dtype == torch.bfloat16 else ""
    return backend_facts(query.device.type).backward_in_float32(dtype, query.shape[2], query.shape[3])


def own_backward_is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `Attention` is faster for these than torch's own gradient. Compiled blocks are left to torch."""
    if torch.compiler.is_compiling():
        return False
    return backward_in_float32(query) and kernel(query, key, value) == "cpu_flash"


class Attention(torch.autograd.Function):
    """`attend` with `attend_backward` as its gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        whole = attend(query, key, value, scale, causal)
        ctx.save_for_backward(query, key, value, whole.out, whole.lse, *whole.seeds)
        ctx.how = scale, causal
        return whole.out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, lse, *seeds = ctx.saved_tensors
        whole = AttentionOutput(out, lse, tuple(seeds))
        return *attend_backward(gradients[0], query, key, value, whole, *ctx.how), None, None


class OnlineSoftmax:
    """The result over all blocks of keys that a set of queries attends to, block by block, in the accumulation dtype.

    out = sum of exp(lse_i - lse) out_i with lse = log sum exp(lse_i): the softmax over all keys
    (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """

    def __init__(self, query: Tensor, value_width: int) -> None:
        shape, dtype = query.shape[:-1], accumulation_dtype(query.dtype)
        self.out = torch.zeros((*shape, value_width), dtype=dtype, device=query.device)
        self.lse = torch.zeros(shape, dtype=dtype, device=query.device)
        self.seeds: tuple[Tensor, ...] = ()

    def add(self, queries: slice, block: AttentionOutput, first: bool) -> None:
        """Adds what `queries` found in one block; `first`: it is the first one for these queries."""
        self.seeds = self.seeds or block.seeds
        if first:
            self.out[:, :, queries], self.lse[:, :, queries] = block.out, block.lse
            return
        own, lse = self.lse[:, :, queries], block.lse.to(self.lse.dtype)
        merged = torch.logaddexp(own, lse)
        before, share = (own - merged).exp().unsqueeze(-1), (lse - merged).exp().unsqueeze(-1)
        self.out[:, :, queries] = self.out[:, :, queries] * before + block.out * share
        self.lse[:, :, queries] = merged


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    scores = _per_head_transposed(query.to(dtype), key.to(dtype)) * scale
    if causal:
        size = (query.shape[2], key.shape[2])
        scores = scores.masked_fill(torch.ones(size, dtype=torch.bool, device=query.device).triu(1), -math.inf)
    return scores


def _per_head(weights: Tensor, value: Tensor) -> Tensor:
    """[B, N, Q, P] x [B, K, P, H] -> [B, N, Q, H]: query head n reads kv head n // (N / K)."""
    b, n, q, p = weights.shape
    k = value.shape[1]
    return (weights.reshape(b, k, n // k * q, p) @ value).reshape(b, n, q, value.shape[-1])


def _per_head_transposed(query: Tensor, key: Tensor) -> Tensor:
    """[B, N, Q, H] x [B, K, P, H] -> [B, N, Q, P]."""
    b, n, q, h = query.shape
    k = key.shape[1]
    return (query.reshape(b, k, n // k * q, h) @ key.transpose(-1, -2)).reshape(b, n, q, key.shape[2])


def _to_kv_heads(per_query_head: Tensor, like: Tensor) -> Tensor:
    """[B, N, P, H] summed over the query heads of each kv head: [B, K, P, H]."""
    return per_query_head.unflatten(1, (like.shape[1], -1)).sum(2)

"""CUDA's own operators, made of the CPU's: the signatures, dtypes and results of the kernels, not their speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_kept: list[Any] = []  # a library is gone with its object


def register(host: Callable[[Tensor], Tensor]) -> None:
    """host: a tensor of the CPU with the same memory."""
    plain = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        for tensor in (key, value, attn_mask):
            assert tensor is None or tensor.device == query.device, "attention: devices differ"
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]

    def counters(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            torch.zeros(2, dtype=torch.uint64).to(device),
            torch.empty(0, dtype=torch.uint64).to(device),
            torch.empty(0, dtype=dtype).to(device),
        )

    def flash(
        q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, mask: bool = False,
        scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert q.dtype in (torch.bfloat16, torch.float16), "CUDA's flash attention takes 16 bits"
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(host(q), host(k), host(v), dropout, causal, scale=scale)
        seed, offset, debug = counters(q.device, q.dtype)
        return out.to(q.device), lse.to(q.device), None, None, q.shape[2], k.shape[2], seed, offset, debug

    def flash_backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Any, cu_k: Any, max_q: int,
        max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.dtype == torch.float32
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(*map(host, (gradient, q, k, v, out, lse)), dropout, causal, scale=scale)
        return tuple(t.to(q.device) for t in found)

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
        mask: bool, *, scale: float | None = None, window_size_left: int | None = None, **_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert q.dtype in (torch.bfloat16, torch.float16) and cu_q.dtype == torch.int32 and cu_q.device == q.device
        outs = []
        for rows, columns in _documents(host, cu_q, cu_k):
            assert rows.stop - rows.start <= max_q and columns.stop - columns.start <= max_k
            query, key, value = _heads_first(host, (q, rows), (k, columns), (v, columns))
            repeat = query.shape[1] // key.shape[1]
            share = _share(query, key.repeat_interleave(repeat, 1), scale, causal, window_size_left)
            outs.append((share @ value.repeat_interleave(repeat, 1))[0].transpose(0, 1))
        seed, offset, debug = counters(q.device, torch.float32)
        lse = torch.zeros(q.shape[1], q.shape[0]).to(q.device)
        return torch.cat(outs).to(q.dtype).to(q.device), lse, seed, offset, debug

    def varlen_backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
        max_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *, scale: float | None = None,
        window_size_left: int | None = None, **_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts = [torch.zeros_like(host(t)) for t in (q, k, v)]
        factor = scale if scale is not None else q.shape[-1] ** -0.5
        for rows, columns in _documents(host, cu_q, cu_k):
            query, key, value, grad = _heads_first(host, (q, rows), (k, columns), (v, columns), (gradient, rows))
            repeat, heads = query.shape[1] // key.shape[1], key.shape[1]
            wide_key, wide_value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
            share = _share(query, wide_key, scale, causal, window_size_left)
            by_value = grad @ wide_value.mT
            scores = share * (by_value - (by_value * share).sum(-1, keepdim=True)) * factor
            folded = [t.unflatten(1, (heads, repeat)).sum(2) for t in (scores.mT @ query, share.mT @ grad)]
            for part, made, where in zip(parts, (scores @ wide_key, *folded), (rows, columns, columns)):
                part[where] = made[0].transpose(0, 1).to(part.dtype)
        return tuple(part.to(q.device) for part in parts)

    def addmm_into(
        total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        assert total.dtype == out.dtype == dtype == torch.float32 and a.dtype == b.dtype
        held = host(out)
        held.copy_(beta * host(total) + alpha * (host(a).float() @ host(b).float()))
        return out

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm_into, "CUDA")
    library.impl("_scaled_dot_product_flash_attention", flash, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CUDA")
    library.impl("_flash_attention_forward", varlen, "CUDA")
    library.impl("_flash_attention_backward", varlen_backward, "CUDA")
    _kept.append(library)


def _documents(host: Callable[[Tensor], Tensor], cu_q: Tensor, cu_k: Tensor) -> Iterable[tuple[slice, slice]]:
    """(rows of queries, rows of keys) of each document."""
    ends = [host(cu).tolist() for cu in (cu_q, cu_k)]
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:]):
        yield slice(a, b), slice(c, d)


def _heads_first(host: Callable[[Tensor], Tensor], *parts: tuple[Tensor, slice]) -> list[Tensor]:
    """[1, heads, length, width] in float32, of tensors [tokens, heads, width]."""
    return [host(tensor)[where].transpose(0, 1).unsqueeze(0).float() for tensor, where in parts]


def _share(query: Tensor, key: Tensor, scale: float | None, causal: bool, left: int | None) -> Tensor:
    """Softmax of the scores, [1, heads, queries, keys]; the last query stands at the last key."""
    gap = torch.arange(query.shape[2])[:, None] + (key.shape[2] - query.shape[2]) - torch.arange(key.shape[2])
    seen = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= gap <= left
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    return ((query @ key.mT) * factor).masked_fill(~seen, float("-inf")).softmax(-1)

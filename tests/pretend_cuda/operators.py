"""CUDA's own operators, made of the CPU's: the signatures, dtypes and results of the kernels, not their speed.

B batch, H heads, T and S tokens of queries and keys, D head width. The operators below compute on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_kept: list[Any] = []  # a library is gone with its object
HALVES = (torch.bfloat16, torch.float16)


def register(device_: Any) -> None:
    """device_: the module of the pretend device."""

    def launched(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The operator on the device: it reads and writes memory on the present stream, and the host does not wait."""

        def operator(*given: Any, **options: Any) -> Any:
            tensors = [value for value in (*given, *options.values()) if isinstance(value, Tensor)]
            device = tensors[0].device
            assert all(tensor.device == device for tensor in tensors), f"{name}: devices differ"
            host = lambda value: device_.host_view(value) if isinstance(value, Tensor) else value  # noqa: E731
            out = options.get("out")
            device_.kernel(name, tensors, [] if out is None else [out])
            found = compute(*map(host, given), **{key: host(value) for key, value in options.items()})
            if out is not None:
                return out
            return tuple(device_.from_host(t, device, name) if isinstance(t, Tensor) else t for t in found)

        return operator

    library = torch.library.Library("aten", "IMPL")
    for name, compute in OPERATORS.items():
        library.impl(name, launched(name, compute), "CUDA")
    _kept.append(library)
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


def _counters(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Seed and offset of dropout, and a mask for debugging."""
    return torch.zeros(2, dtype=torch.uint64), torch.empty(0, dtype=torch.uint64), torch.empty(0, dtype=dtype)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, mask: bool = False, scale: float | None = None
) -> tuple[Any, ...]:  # fmt: skip
    """q [B, H, T, D], k and v [B, H, S, D]."""
    assert q.dtype in HALVES, "CUDA's flash attention takes 16 bits"
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    return out, lse, None, None, q.shape[2], k.shape[2], *_counters(q.dtype)


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Any, cu_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.dtype == torch.float32
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, out, lse, dropout, causal, scale=scale)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    mask: bool, *, scale: float | None = None, window_size_left: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q [all T, H, D], k and v [all S, H, D]; cu_q and cu_k: where each document begins, and the end of the last."""
    assert q.dtype in HALVES and cu_q.dtype == torch.int32
    outs = []
    for rows, columns in _documents(cu_q, cu_k):
        assert rows.stop - rows.start <= max_q and columns.stop - columns.start <= max_k
        query, key, value = _heads_first((q, rows), (k, columns), (v, columns))
        repeat = query.shape[1] // key.shape[1]
        share = _share(query, key.repeat_interleave(repeat, 1), scale, causal, window_size_left)
        outs.append((share @ value.repeat_interleave(repeat, 1))[0].transpose(0, 1))
    return torch.cat(outs).to(q.dtype), torch.zeros(q.shape[1], q.shape[0]), *_counters(torch.float32)


def varlen_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    parts = [torch.zeros_like(t) for t in (q, k, v)]
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    for rows, columns in _documents(cu_q, cu_k):
        query, key, value, grad = _heads_first((q, rows), (k, columns), (v, columns), (gradient, rows))
        repeat, heads = query.shape[1] // key.shape[1], key.shape[1]
        wide_key, wide_value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        share = _share(query, wide_key, scale, causal, window_size_left)
        by_value = grad @ wide_value.mT
        scores = share * (by_value - (by_value * share).sum(-1, keepdim=True)) * factor
        folded = [t.unflatten(1, (heads, repeat)).sum(2) for t in (scores.mT @ query, share.mT @ grad)]
        for part, made, where in zip(parts, (scores @ wide_key, *folded), (rows, columns, columns)):
            part[where] = made[0].transpose(0, 1).to(part.dtype)
    return tuple(parts)


def addmm_into(
    total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> None:
    assert total.dtype == out.dtype == dtype == torch.float32 and a.dtype == b.dtype
    out.copy_(beta * total + alpha * (a.float() @ b.float()))


OPERATORS: dict[str, Callable[..., Any]] = {
    "addmm.dtype_out": addmm_into,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_forward": varlen,
    "_flash_attention_backward": varlen_backward,
}


def _documents(cu_q: Tensor, cu_k: Tensor) -> Iterable[tuple[slice, slice]]:
    """(rows of queries, rows of keys) of each document."""
    ends = [cu.tolist() for cu in (cu_q, cu_k)]
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:]):
        yield slice(a, b), slice(c, d)


def _heads_first(*parts: tuple[Tensor, slice]) -> list[Tensor]:
    """[1, heads, length, width] in float32, of tensors [tokens, heads, width]."""
    return [tensor[where].transpose(0, 1).unsqueeze(0).float() for tensor, where in parts]


def _share(query: Tensor, key: Tensor, scale: float | None, causal: bool, left: int | None) -> Tensor:
    """Softmax of the scores, [1, heads, queries, keys]; the last query stands at the last key."""
    gap = torch.arange(query.shape[2])[:, None] + (key.shape[2] - query.shape[2]) - torch.arange(key.shape[2])
    seen = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= gap <= left
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    return ((query @ key.mT) * factor).masked_fill(~seen, float("-inf")).softmax(-1)

"""The core attention of packed rows in compiled blocks: one operator, whatever the lengths of documents are.

Lengths differ in each microbatch. torch.compile would take each of them for a constant of the code, and compile anew. So the
numbers of documents go into the operator as a tensor, and the operator looks at the lengths when it runs: shapes outside of it
depend on the rows of a microbatch and their width only.

B rows, T tokens of a row, N query heads, K kv heads, H head width, G documents of the same L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.attention.core import AttentionOutput, attend, attend_backward, fits_cuda_flash, seeds_without_dropout
from shardwright.attention.packed_rows import PackedRows, TokenOrder, recent_rows
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import (
    flash_attention_by_lengths,
    flash_attention_by_lengths_backward,
    overload,
    own_operator,
)

COMPILED_IS_PLAIN = (
    "In a compiled block attention to documents or pieces of rows has no windows, softcap, sinks or dropout."
)


def give_gradients(attend: Any, attend_backward: Any) -> None:
    """Tells torch.compile the shapes and the gradient of an attention operator.

    attend: (query, key, value, documents, *numbers) -> (output, log-sum-exp), as `attend_documents`. attend_backward: (grad,
    query, key, value, output, log-sum-exp, documents, *numbers) -> gradients of query, key and value.
    """

    def shapes(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        return out, query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query.dtype))

    def backward_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(t.new_empty(t.shape) for t in (query, key, value))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.numbers = inputs[4:]
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, documents, out, lse = ctx.saved_tensors
        found = attend_backward(grad, query, key, value, out, lse, documents, *ctx.numbers)
        return *found, None, *(None for _ in ctx.numbers)

    attend.register_fake(shapes)
    attend_backward.register_fake(backward_shapes)
    attend.register_autograd(backward, setup_context=keep)


def _by_length(rows: PackedRows, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """`tensors` [B, heads, T, ...] as [G, heads, L, ...] of each length of documents."""
    if rows.whole:
        return [tensors]
    flat = [rows.grouped.take(t.transpose(1, 2).flatten(0, 1)) for t in tensors]
    sizes = [count * length for count, length in rows.groups]
    pieces = zip(*(t.split(sizes) for t in flat))
    return [
        tuple(t.unflatten(0, group).transpose(1, 2) for t in piece)
        for group, piece in zip(rows.groups, pieces, strict=True)
    ]


def _in_rows(rows: PackedRows, found: list[Tensor], like: Tensor) -> Tensor:
    """[B, heads, T, ...] of `found` [G, heads, L, ...] of each length; zeros for padding. like: as the result, of any width."""
    if rows.whole:
        return found[0].contiguous()
    order: TokenOrder = rows.grouped
    flat = order.put(torch.cat([t.transpose(1, 2).flatten(0, 1) for t in found]))
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2).contiguous()


def _dense(rows: PackedRows, tensor: Tensor) -> Tensor:
    """[R, heads, ...]: the real tokens of `tensor` [B, heads, T, ...]."""
    return rows.dense.take(tensor.transpose(1, 2).flatten(0, 1))


def _undense(rows: PackedRows, tensor: Tensor) -> Tensor:
    """The inverse of `_dense`; zeros for padding."""
    return rows.dense.put(tensor).unflatten(0, rows.documents.shape).transpose(1, 2).contiguous()


def _flash(rows: PackedRows, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_documents` on a GPU in 16 bits: one call takes all documents by their lengths."""
    lengths = (rows.ends, rows.ends, rows.longest, rows.longest)
    tensors = (_dense(rows, t) for t in (query, key, value))
    out, lse = flash_attention_by_lengths(*tensors, *lengths, 0.0, True, False, scale=scale)[:2]
    return _undense(rows, out), _undense(rows, lse.T).contiguous()


def _flash_backward(
    rows: PackedRows,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (rows.ends, rows.ends, rows.longest, rows.longest)
    tensors = (_dense(rows, t) for t in (grad, query, key, value, out))
    seeds = seeds_without_dropout(query, value)
    log_sums = _dense(rows, lse).T.contiguous()
    found = flash_attention_by_lengths_backward(*tensors, log_sums, *lengths, 0.0, True, *seeds, scale=scale)
    by_query, by_key, by_value = (_undense(rows, t) for t in found)
    return by_query, by_key, by_value


@own_operator
def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(output [B, N, T, H], log-sum-exp [B, N, T]) of queries that see the keys of their own document up to their own.

    query: [B, N, T, H]. key, value: [B, K, T, H]. documents: [B, T] on the CPU, as in `PackedRows`.
    """
    rows = recent_rows(documents, query.device)
    if fits_cuda_flash(query, value):
        return _flash(rows, query, key, value, scale)
    found = [attend(q, k, v, scale, True) for q, k, v in _by_length(rows, (query, key, value))]
    wide = accumulation_dtype(query.dtype)
    lse = _in_rows(rows, [one.lse.to(wide).unsqueeze(-1) for one in found], query).squeeze(-1)
    return _in_rows(rows, [one.out for one in found], query), lse


@own_operator
def attend_documents_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given that of the output."""
    rows = recent_rows(documents, query.device)
    if fits_cuda_flash(query, value):
        return _flash_backward(rows, grad, query, key, value, out, lse, scale)
    pieces = _by_length(rows, (grad, query, key, value, out, lse.unsqueeze(-1)))
    found = [
        attend_backward(g, q, k, v, AttentionOutput(o, e.squeeze(-1).contiguous()), scale, True)
        for g, q, k, v, o, e in pieces
    ]
    by_query, by_key, by_value = (
        _in_rows(rows, [one[i] for one in found], like) for i, like in enumerate((query, key, value))
    )
    return by_query, by_key, by_value


give_gradients(attend_documents, attend_documents_backward)

ATTEND_DOCUMENTS = overload(attend_documents)
"""Its result is kept by selective recomputation."""

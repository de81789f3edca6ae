"""Context-parallel attention in compiled blocks, as operators that torch.compile does not look into.

Which tokens see each other depends on documents, whose numbers go in as a tensor. The communication is that of `attention.py`.

Shapes as in `attention.py`. Documents [B, S] are on the CPU, with the numbers of whole rows; an empty tensor stands for rows
of one document each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.attention.compiled import COMPILED_IS_PLAIN, give_gradients
from shardwright.attention.core import seeds_without_dropout
from shardwright.attention.packed_rows import PackedRows, recent_rows
from shardwright.errors import ModelError
from shardwright.parallel.context.attention import (
    SHARD,
    AttentionToBlocks,
    Gathered,
    Ring,
    context_attention,
    replace_attention,
)
from shardwright.parallel.context.shard import Block, ContextShard, as_one_row, as_rows, document_blocks
from shardwright.torch_private import overload, own_operator

_SHARDS: list[ContextShard] = []
"""The shards of this process, by the number by which an operator is told which one it works for."""


def number_of(shard: ContextShard) -> int:
    """The number of `shard`: the same one for equal shards."""
    if shard not in _SHARDS:
        _SHARDS.append(shard)
    return _SHARDS.index(shard)


class _Context:
    """What an autograd function is given as `ctx`."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _blocks(shard: ContextShard, documents: Tensor, tokens: int, device: torch.device) -> list[Any]:
    """What `attention.py` is given as blocks: of the whole row, or of each rank of a ring. tokens: on this rank."""
    length = tokens * shard.size
    rows = recent_rows(documents, device) if documents.numel() else None
    if shard.attention == "ring":
        sources = range(shard.size)
        if rows is None:
            return [shard.blocks(source, tokens) for source in sources]
        return [shard.document_blocks(source, rows) for source in sources]
    found: list[Block] = shard.row_blocks(length)
    return found if rows is None else document_blocks(rows.spans, shard.chunks(length), [range(length)])


def _flat(documents: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Rows one behind another where documents say what sees what."""
    return [as_one_row(t) if documents.numel() else t for t in tensors]


def _unflat(documents: Tensor, *tensors: Tensor) -> list[Tensor]:
    found = [as_rows(t, documents.shape[0]) if documents.numel() else t for t in tensors]
    return [t.contiguous() for t in found]


@own_operator
def gather_row(own: Tensor, shard: int) -> Tensor:
    """Keys with values [B, K, S, 2 H] of the whole row, from those of this rank [B, K, T, 2 H]."""
    return Gathered.join(own, _SHARDS[shard])


@gather_row.register_fake
def _(own: Tensor, shard: int) -> Tensor:
    return own.new_empty((*own.shape[:2], own.shape[2] * _SHARDS[shard].size, own.shape[3]))


@own_operator
def gather_row_backward(grad: Tensor, shard: int) -> Tensor:
    """The gradient of `own` of `gather_row`: summed over the ranks."""
    return Gathered.sum_parts(grad.contiguous(), _SHARDS[shard])


@gather_row_backward.register_fake
def _(grad: Tensor, shard: int) -> Tensor:
    return grad.new_empty((*grad.shape[:2], grad.shape[2] // _SHARDS[shard].size, grad.shape[3]))


def _keep_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shard = inputs[1]


gather_row.register_autograd(lambda ctx, grad: (gather_row_backward(grad, ctx.shard), None), setup_context=_keep_shard)


@own_operator
def attend_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scale: float, shard: int
) -> tuple[Tensor, Tensor]:
    """(output [B, N, T, H], log-sum-exp) of this rank's queries to the keys of the row that they see.

    key, value: of the whole row, or of this rank where the shard's attention is a ring.
    """
    own, context = _SHARDS[shard], _Context()
    blocks = _blocks(own, documents, query.shape[2], query.device)
    q, k, v = _flat(documents, query, key, value)
    if own.attention == "ring":
        out = Ring.forward(context, q, k, v, scale, own, blocks)
    else:
        out = AttentionToBlocks.forward(context, q, k, v, scale, blocks)
    found = _unflat(documents, out, context.saved_tensors[4].unsqueeze(-1))
    return found[0], found[1].squeeze(-1)


@own_operator
def attend_over_ranks_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor,
    scale: float,
    shard: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given that of the output."""
    own, context = _SHARDS[shard], _Context()
    context.blocks = _blocks(own, documents, query.shape[2], query.device)  # type: ignore[attr-defined]
    context.scale, context.shard = scale, own  # type: ignore[attr-defined]
    q, k, v, o, g = _flat(documents, query, key, value, out, grad)
    (e,) = _flat(documents, lse.unsqueeze(-1))
    context.save_for_backward(q, k, v, o, e.squeeze(-1), *seeds_without_dropout(query, value))
    function: Any = Ring if own.attention == "ring" else AttentionToBlocks
    by_query, by_key, by_value = _unflat(documents, *function.backward(context, g)[:3])
    return by_query, by_key, by_value


give_gradients(attend_over_ranks, attend_over_ranks_backward)

ATTEND_OVER_RANKS = overload(attend_over_ranks)
"""Its result is kept by selective recomputation."""


def compiled_context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    documents: PackedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`context_attention` inside a compiled block, which knows no sliding window (`rules.py` refuses it)."""
    shard: ContextShard | None = vars(module).get(SHARD)
    if shard is None or attention_mask is not None or not torch.compiler.is_compiling():
        options |= {"scaling": scaling, "documents": documents}
        return context_attention(module, query, key, value, attention_mask, **options)
    if options.get("sliding_window") is not None or options.get("dropout"):
        raise ModelError(f"{type(module).__name__} is compiled.", COMPILED_IS_PLAIN)
    scale, number = query.shape[-1] ** -0.5 if scaling is None else scaling, vars(module)[NUMBER]
    if shard.attention == "all_gather":
        row = gather_row(torch.cat([key, value], -1), number)
        key, value = row.split((key.shape[-1], value.shape[-1]), -1)
    numbers = query.new_empty(0) if documents is None else documents.documents
    return attend_over_ranks(query, key, value, numbers, scale, number)[0].transpose(1, 2), None


NUMBER = "_context_shard_number"
"""Attribute of each attention module: `number_of` its shard."""


def replace_compiled_attention(model: nn.Module, blocks: Iterable[nn.Module], shard: ContextShard) -> None:
    """`replace_attention` for blocks that are compiled."""
    blocks = list(blocks)
    replace_attention(model, blocks, shard, compiled_context_attention)
    for module in (module for block in blocks for module in block.modules()):
        vars(module)[NUMBER] = number_of(shard)

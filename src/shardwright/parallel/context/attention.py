"""Context parallelism: each rank holds part of every row, and its queries attend to the whole row.

The core attention is registered with Transformers' `AttentionInterface`. `all_gather` gathers keys and values of the whole
row (Llama 3, arXiv:2407.21783, section 3.3.2). `ring` passes keys and values from rank to rank and merges results by their
log-sum-exp (Liu et al. 2023, arXiv:2310.01889). No rank of a ring holds the keys of a whole row, and a ring knows causality
and documents, but no sliding windows.

B rows, S tokens of a row, T = S / cp tokens on this rank, N query heads, K kv heads, H head width, R ranks (cp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.attention.core import AttentionOutput, OnlineSoftmax, attend, attend_backward
from shardwright.attention.packed_rows import PackedRows
from shardwright.errors import ModelError
from shardwright.layout.size_rules import chunks
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.parallel.context.shard import Block, ContextShard, as_one_row, as_rows, document_blocks

NAME = "shardwright_context"
"""Name of the core attention in Transformers' registry."""
SHARD = "_context_shard"
"""Name of the attribute in which each attention module holds its `ContextShard`."""


def replace_attention(
    model: nn.Module, blocks: Iterable[nn.Module], shard: ContextShard, attention: Callable[..., Any] | None = None
) -> None:
    """Makes the attention of `blocks` see whole rows although each rank holds part of each row.

    Transformers finds a core attention by name in `AttentionInterface`. No mask function is registered under that name:
    Transformers (5.12 to 5.24) then builds no mask. attention: in place of `context_attention`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention or context_attention)
    for block in blocks:
        for module in block.modules():
            vars(module)[SHARD] = shard
    setter: Any = model
    setter.set_attn_implementation(NAME)


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: PackedRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [B, T, N, H] of this rank's queries [B, N, T, H] to the whole row.

    sliding_window: how many keys a query sees; the key of the query's own token is one of these. documents: of the whole
    rows [B, S]; a query sees its own document only.
    """
    shard: ContextShard | None = vars(module).get(SHARD)
    name, length = type(module).__name__, query.shape[2] * (shard.size if shard else 1)
    if shard is None:
        raise ModelError(
            f"{name} attends outside of the repeated blocks.", "Its queries would see this rank's tokens only."
        )
    if attention_mask is not None or dropout:
        raise ModelError(
            f"{name} asks for {'dropout' if dropout else 'a mask'} inside attention.",
            "Each rank holds part of the row.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None or sliding_window >= length else sliding_window
    if shard.attention == "all_gather":
        key, value = Gathered.apply(key, value, shard)
        if window is not None:
            return _windowed(query, key, value, scale, window, documents, shard), None
        attend_over, rest = AttentionToBlocks.apply, list[ContextShard]()
        blocks: list[Any] = shard.row_blocks(length)
        if documents is not None:
            blocks = document_blocks(documents.spans, shard.chunks(length), [range(length)])
    elif window is not None:
        raise ModelError(
            f"{name} asks for a sliding window.",
            "Ring attention has no windows.",
            "Set parallelism.cp_attention to all_gather.",
        )
    else:
        attend_over, rest = Ring.apply, [shard]
        sources = range(shard.size)
        blocks = [shard.blocks(source, query.shape[2]) for source in sources]
        if documents is not None:
            blocks = [shard.document_blocks(source, documents) for source in sources]
    if documents is None:
        return attend_over(query, key, value, scale, *rest, blocks).transpose(1, 2), None
    out = attend_over(*map(as_one_row, (query, key, value)), scale, *rest, blocks)
    return as_rows(out, len(query)).transpose(1, 2), None


def _windowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    documents: PackedRows | None,
    shard: ContextShard,
) -> Tensor:
    """Attention in a sliding window, with keys and values of the whole row, as one call of torch for each chunk."""
    outs, start = [], 0
    length = key.shape[2]
    for own, mask in zip(shard.chunks(length), _masks(shard, length, window, query.device)):
        queries = query[:, :, start : start + len(own)]
        if documents is not None:
            numbers = documents.on_device
            same = numbers[:, own.start : own.stop, None] == numbers[:, None, : own.stop]
            mask = mask & same.unsqueeze(1)
        outs.append(
            nn.functional.scaled_dot_product_attention(
                queries,
                key[:, :, : own.stop],
                value[:, :, : own.stop],
                attn_mask=mask,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
        start += len(own)
    return torch.cat(outs, 2).transpose(1, 2).contiguous()


def _masks(shard: ContextShard, length: int, window: int, device: torch.device) -> list[Tensor]:
    """For each chunk of this rank, a mask [tokens of the chunk, keys from 0 to the end of the chunk]. The masks are kept."""
    name = (length, window, str(device))
    if name not in shard.masks:
        made = []
        for own in shard.chunks(length):
            queries = torch.arange(own.start, own.stop, device=device).unsqueeze(1)
            distance = queries - torch.arange(own.stop, device=device)
            made.append((distance >= 0) & (distance < window))
        shard.masks[name] = made
    return shard.masks[name]


class Gathered(torch.autograd.Function):
    """Keys and values [B, K, T, H] of all ranks as [B, K, S, H] in the row's order; gradients are summed over ranks.

    One message carries both. Gradients are sent by all-to-all and summed here in float32 or wider: as many bytes as a
    reduce-scatter, one rounding instead of one per hop, and half of the bytes of gloo's reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, shard: ContextShard) -> tuple[Tensor, Tensor]:
        ctx.shard = shard
        ctx.widths = (key.shape[-1], value.shape[-1])
        row_key, row_value = Gathered.join(torch.cat([key, value], -1), shard).split(ctx.widths, -1)
        return row_key, row_value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        by_key, by_value = Gathered.sum_parts(torch.cat(grads, -1), ctx.shard).split(ctx.widths, -1)
        return by_key, by_value, None

    @staticmethod
    def join(own: Tensor, shard: ContextShard) -> Tensor:
        """[B, K, S, ...] in the row's order, of [B, K, T, ...] on each rank."""
        gathered = own.new_empty((shard.size, *own.shape))
        _all_gather(gathered, own, shard.group)
        return torch.cat([gathered[rank][:, :, tokens] for rank, tokens in _order(shard, own.shape[2])], 2)

    @staticmethod
    def sum_parts(row: Tensor, shard: ContextShard) -> Tensor:
        """The gradient of `own` of `join`, given that of the row on each rank."""
        tokens = row.shape[2] // shard.size
        sent = row.new_empty((shard.size, *row.shape[:2], tokens, row.shape[3]))
        start = 0
        for rank, part in _order(shard, tokens):
            count = part.stop - part.start
            sent[rank][:, :, part] = row[:, :, start : start + count]
            start += count
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=shard.group)
        return received.sum(0, dtype=accumulation_dtype(row.dtype)).to(row.dtype)


def _order(shard: ContextShard, tokens: int) -> list[tuple[int, slice]]:
    """(rank, slice of this rank's tokens) in the order of the row."""
    found: list[tuple[int, int, slice]] = []
    for rank in range(shard.size):
        start = 0
        for own in chunks(tokens * shard.size, shard.size, rank, shard.balanced):
            found.append((own.start, rank, slice(start, start + len(own))))
            start += len(own)
    return [(rank, part) for _, rank, part in sorted(found, key=lambda item: item[0])]


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(out.flatten(0, 1), own, group=group)


class AttentionToBlocks(torch.autograd.Function):
    """Queries [B, N, Q, H] attending to blocks of keys and values [B, K, P, H]; zeros for queries without a block."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
        merged, begun = OnlineSoftmax(query, value.shape[-1]), set()
        for queries, keys, causal in blocks:
            found = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], scale, causal)
            merged.add(queries, found, first=queries.start not in begun)
            begun.add(queries.start)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse, *merged.seeds)
        ctx.scale, ctx.blocks = scale, blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *seeds = ctx.saved_tensors
        whole, wide = AttentionOutput(out, lse, tuple(seeds)), accumulation_dtype(query.dtype)
        sums = [torch.zeros_like(t, dtype=wide) for t in (query, key, value)]
        for block in ctx.blocks:
            _add_gradients(sums, grads[0], (query, key, value), whole, ctx.scale, block)
        return sums[0].to(query.dtype), sums[1].to(key.dtype), sums[2].to(value.dtype), None, None


def _add_gradients(
    sums: list[Tensor],
    grad: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    whole: AttentionOutput,
    scale: float,
    block: Block,
) -> None:
    """Adds one block's gradients of query, key and value to `sums`."""
    queries, keys, causal = block
    query, key, value = tensors
    own = AttentionOutput(whole.out[:, :, queries], whole.lse[:, :, queries].contiguous(), whole.seeds)
    found = attend_backward(
        grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], own, scale, causal
    )
    for total, part, gradient in zip(sums, (queries, keys, keys), found):
        total[:, :, part] += gradient


class Ring(torch.autograd.Function):
    """Ring attention: in step i this rank holds the keys and values of rank - i, and sends these to the next rank.

    blocks: for each rank, the keys of that rank that this rank's queries see. Every query has one causal block: the first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        shard: ContextShard,
        blocks: list[list[Block]],
    ) -> Tensor:
        merged = OnlineSoftmax(query, value.shape[-1])
        held, width = torch.cat([key, value], -1), key.shape[-1]
        for step in range(shard.size):
            passing = _RingShift(held, shard) if step + 1 < shard.size else None
            for queries, keys, causal in blocks[(shard.rank - step) % shard.size]:
                part = held[:, :, keys]
                found = attend(query[:, :, queries], part[..., :width], part[..., width:], scale, causal)
                merged.add(queries, found, first=causal)
            held = held if passing is None else passing.wait()
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse, *merged.seeds)
        ctx.scale, ctx.shard, ctx.blocks = scale, shard, blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values follow one step later. Each rank adds its part; the owner of the keys gets the sum."""
        query, key, value, out, lse, *seeds = ctx.saved_tensors
        shard: ContextShard = ctx.shard
        whole, wide = AttentionOutput(out, lse, tuple(seeds)), accumulation_dtype(query.dtype)
        by_query = torch.zeros_like(query, dtype=wide)
        held, width = torch.cat([key, value], -1), key.shape[-1]
        own = torch.zeros_like(held, dtype=wide)
        behind: _RingShift | None = None
        for step in range(shard.size):
            passing = _RingShift(held, shard) if step + 1 < shard.size else None
            found = own if step == 0 else torch.zeros_like(own)
            for block in ctx.blocks[(shard.rank - step) % shard.size]:
                sums = [by_query, found[..., :width], found[..., width:]]
                parts = (query, held[..., :width], held[..., width:])
                _add_gradients(sums, grads[0], parts, whole, ctx.scale, block)
            if step:
                behind = _RingShift(found if behind is None else found.add_(behind.wait()), shard)
            held = held if passing is None else passing.wait()
        if behind is not None:
            own += behind.wait()
        by_key, by_value = own[..., :width].to(key.dtype), own[..., width:].to(value.dtype)
        return by_query.to(query.dtype), by_key, by_value, None, None, None


class _RingShift:
    """Sends a tensor to the next rank while receiving the tensor of the rank before."""

    def __init__(self, tensor: Tensor, shard: ContextShard) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        ranks = dist.get_process_group_ranks(shard.group)
        after, before = ranks[(shard.rank + 1) % shard.size], ranks[(shard.rank - 1) % shard.size]
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, shard.group),
                dist.P2POp(dist.irecv, self._received, before, shard.group),
            ]
        )

    def wait(self) -> Tensor:
        """The tensor of the rank before."""
        for work in self._work:
            work.wait()
        return self._received

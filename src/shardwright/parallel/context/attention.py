"""Context parallelism: each rank holds part of every row, and a core attention that sees the whole of it.

B rows, S tokens of a row, T = S / cp tokens on this rank, N query heads, K kv heads, H head width, R ranks (cp). The
attention is registered with Transformers' `AttentionInterface` in two kinds. `all_gather` collects keys and values of the
whole row (Llama 3, arXiv:2407.21783, section 3.3.2); its mask may be anything. `ring` passes them from rank to rank and
merges results by their log-sum-exp (Liu et al. 2023, arXiv:2310.01889); it knows causality and documents, and never holds
a row.
No mask function is registered with Transformers: it then builds no mask at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.attention.core import Attended, Merged, attend, attend_backward
from shardwright.attention.packed_rows import PackedRows
from shardwright.errors import ModelError
from shardwright.layout.size_rules import chunks
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.parallel.context.documents import Block, as_one_row, as_rows, document_blocks

PLACE = "_context_shard"
"""Attribute of each attention module: its `ContextShard`."""


@dataclass(frozen=True)
class ContextShard:
    """Where a rank stands among its context-parallel peers, and which tokens it holds. `group` has `size` ranks."""

    size: int
    rank: int
    balanced: bool
    group: dist.ProcessGroup | None = None
    attention: str = "all_gather"
    masks: dict[tuple[int, int | None, str], list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def chunks(self, length: int) -> tuple[range, ...]:
        """The positions of a row of `length` tokens that are here."""
        return chunks(length, self.size, self.rank, self.balanced)

    def part(self, rows: Tensor) -> Tensor:
        """This rank's tokens [B, T] of `rows` [B, S]."""
        return torch.cat([rows[:, own.start : own.stop] for own in self.chunks(rows.shape[1])], 1)

    def position_ids(self, length: int, device: torch.device) -> Tensor:
        """[1, T]: where this rank's tokens stand in their rows of `length` tokens."""
        parts = [torch.arange(own.start, own.stop, device=device) for own in self.chunks(length)]
        return torch.cat(parts).unsqueeze(0)

    def blocks(self, source: int, tokens: int) -> list[Block]:
        """What this rank's `tokens` queries attend to among the keys of rank `source`, under causality.

        Balanced, each rank's head chunk lies before its tail chunk, so that a peer before this one contributes its
        head to all queries and a peer after it contributes everything to the tail.
        """
        half, every = tokens // 2, slice(0, tokens)
        if source == self.rank:
            return [(every, every, True)]
        if not self.balanced:
            return [(every, every, False)] if source < self.rank else []
        if source < self.rank:
            return [(every, slice(0, half), False)]
        return [(slice(half, tokens), every, False)]

    def document_blocks(self, source: int, documents: PackedRows) -> list[Block]:
        """What queries here see of their documents among the keys of rank `source`; rows one behind another."""
        length = documents.documents.shape[1]
        held = chunks(length, self.size, source, self.balanced)
        return document_blocks(documents.spans, self.chunks(length), held)

    def row_blocks(self, length: int) -> list[Block]:
        """The same against keys and values of the whole row, in order: per chunk, all before it and the chunk itself."""
        found: list[Block] = []
        start = 0
        for own in self.chunks(length):
            queries = slice(start, start + len(own))
            if own.start:
                found.append((queries, slice(0, own.start), False))
            found.append((queries, slice(own.start, own.stop), True))
            start += len(own)
        return found


def split_attention(model: nn.Module, blocks: Iterable[nn.Module], place: ContextShard) -> None:
    """Makes the attention of `blocks` see whole rows although each rank holds part of them."""
    from transformers import AttentionInterface

    for kind, function in ATTENTIONS.items():
        AttentionInterface.register(f"shardwright_{kind}", function)
    for block in blocks:
        for module in block.modules():
            vars(module)[PLACE] = place
    setter: Any = model
    setter.set_attn_implementation(f"shardwright_{place.attention}")


def _place(module: nn.Module, attention_mask: Tensor | None, dropout: float) -> ContextShard:
    place = vars(module).get(PLACE)
    if place is None:
        raise ModelError(
            f"{type(module).__name__} attends outside of the repeated blocks.",
            "It would see its own shard only.",
        )
    if attention_mask is not None or dropout:
        raise ModelError(
            f"{type(module).__name__} asks for {'dropout' if dropout else 'a mask'} inside attention.",
            "Each rank holds part of the row.",
        )
    return place


def gathered_attention(
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
    """Attention output [B, T, N, H] of queries [B, N, T, H] to the whole row, keys and values gathered.

    sliding_window: a query sees that many keys, its own among them. documents: of the whole rows [B, S]; a query sees its
    own document only.
    """
    place = _place(module, attention_mask, dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    length = query.shape[2] * place.size
    key, value = _Gathered.apply(key, value, place)
    if sliding_window is None or sliding_window >= length:
        if documents is None:
            out = _Attention.apply(query, key, value, scale, place.row_blocks(length))
            return out.transpose(1, 2), None
        blocks = document_blocks(documents.spans, place.chunks(length), [range(length)])
        out = _Attention.apply(*map(as_one_row, (query, key, value)), scale, blocks)
        return as_rows(out, len(query)).transpose(1, 2), None
    outs, start = [], 0
    masks = _masks(place, length, sliding_window, query.device)
    for own, mask in zip(place.chunks(length), masks):
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
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


def _masks(place: ContextShard, length: int, window: int | None, device: torch.device) -> list[Tensor]:
    """For each chunk here, which keys [0, end of the chunk) its queries see: [tokens of the chunk, keys], kept."""
    name = (length, window, str(device))
    if name not in place.masks:
        made = []
        for own in place.chunks(length):
            queries = torch.arange(own.start, own.stop, device=device).unsqueeze(1)
            distance = queries - torch.arange(own.stop, device=device)
            made.append((distance >= 0) & (distance < (window or length)))
        place.masks[name] = made
    return place.masks[name]


def ring_attention(
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
    """Attention output [B, T, N, H] of queries [B, N, T, H] to the whole row, keys and values passed around.

    documents: of the whole rows [B, S]; a query sees its own document only.
    """
    place, tokens = _place(module, attention_mask, dropout), query.shape[2]
    if sliding_window is not None and sliding_window < tokens * place.size:
        raise ModelError(
            f"{type(module).__name__} asks for a sliding window.",
            "The ring knows no windows.",
            "Set parallelism.cp_attention to all_gather.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if documents is None:
        blocks = [place.blocks(source, tokens) for source in range(place.size)]
        return _Ring.apply(query, key, value, scale, place, blocks).transpose(1, 2), None
    blocks = [place.document_blocks(source, documents) for source in range(place.size)]
    out = _Ring.apply(*map(as_one_row, (query, key, value)), scale, place, blocks)
    return as_rows(out, len(query)).transpose(1, 2), None


ATTENTIONS = {"all_gather": gathered_attention, "ring": ring_attention}


class _Gathered(torch.autograd.Function):
    """Keys and values [B, K, T, H] of all ranks as [B, K, S, H] in the row's order; gradients go back summed.

    Both travel in one tensor. Gradients travel by all-to-all and are summed here, in wide dtype: the bytes of a
    reduce-scatter, one rounding instead of one per hop, and half of what gloo's reduce-scatter sends.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, place: ContextShard) -> tuple[Tensor, Tensor]:
        ctx.place = place
        own = torch.cat([key, value], -1)
        ctx.widths = (key.shape[-1], value.shape[-1])
        gathered = own.new_empty((place.size, *own.shape))
        _all_gather(gathered, own, place.group)
        parts = [gathered[rank][:, :, tokens] for rank, tokens in _order(place, key.shape[2])]
        row_key, row_value = torch.cat(parts, 2).split(ctx.widths, -1)
        return row_key, row_value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        place: ContextShard = ctx.place
        row = torch.cat(grads, -1)
        tokens = row.shape[2] // place.size
        sent = row.new_empty((place.size, *row.shape[:2], tokens, row.shape[3]))
        start = 0
        for rank, part in _order(place, tokens):
            count = part.stop - part.start
            sent[rank][:, :, part] = row[:, :, start : start + count]
            start += count
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=place.group)
        summed = received.sum(0, dtype=accumulation_dtype(row.dtype)).to(row.dtype)
        by_key, by_value = summed.split(ctx.widths, -1)
        return by_key, by_value, None


def _order(place: ContextShard, tokens: int) -> list[tuple[int, slice]]:
    """(rank, which of its tokens) in the order of the row."""
    found: list[tuple[int, int, slice]] = []
    for rank in range(place.size):
        start = 0
        for own in chunks(tokens * place.size, place.size, rank, place.balanced):
            found.append((own.start, rank, slice(start, start + len(own))))
            start += len(own)
    return [(rank, part) for _, rank, part in sorted(found, key=lambda item: item[0])]


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(out.flatten(0, 1), own, group=group)


class _Attention(torch.autograd.Function):
    """Queries [B, N, Q, H] attending to blocks of keys and values [B, K, P, H]; zeros for queries without a block."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
        merged, begun = Merged(query, value.shape[-1]), set()
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
        whole, wide = Attended(out, lse, tuple(seeds)), accumulation_dtype(query.dtype)
        sums = [torch.zeros_like(t, dtype=wide) for t in (query, key, value)]
        for block in ctx.blocks:
            _add_gradients(sums, grads[0], (query, key, value), whole, ctx.scale, block)
        return sums[0].to(query.dtype), sums[1].to(key.dtype), sums[2].to(value.dtype), None, None


def _add_gradients(
    sums: list[Tensor],
    grad: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    whole: Attended,
    scale: float,
    block: Block,
) -> None:
    """Adds one block's gradients of query, key and value to `sums`."""
    queries, keys, causal = block
    query, key, value = tensors
    own = Attended(whole.out[:, :, queries], whole.lse[:, :, queries].contiguous(), whole.seeds)
    found = attend_backward(
        grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], own, scale, causal
    )
    for total, part, gradient in zip(sums, (queries, keys, keys), found):
        total[:, :, part] += gradient


class _Ring(torch.autograd.Function):
    """Attention while keys and values go round: in step i this rank holds those of rank - i, and passes them on.

    blocks: what the queries here see of each rank's keys; one causal block of its own for each query, first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        place: ContextShard,
        blocks: list[list[Block]],
    ) -> Tensor:
        merged = Merged(query, value.shape[-1])
        held, width = torch.cat([key, value], -1), key.shape[-1]
        for step in range(place.size):
            passing = _Passing(held, place) if step + 1 < place.size else None
            for queries, keys, causal in blocks[(place.rank - step) % place.size]:
                part = held[:, :, keys]
                found = attend(query[:, :, queries], part[..., :width], part[..., width:], scale, causal)
                merged.add(queries, found, first=causal)
            held = held if passing is None else passing.wait()
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse, *merged.seeds)
        ctx.scale, ctx.place, ctx.blocks = scale, place, blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values travel one step behind them, each rank adding its part, and end at their owner."""
        query, key, value, out, lse, *seeds = ctx.saved_tensors
        place: ContextShard = ctx.place
        whole, wide = Attended(out, lse, tuple(seeds)), accumulation_dtype(query.dtype)
        by_query = torch.zeros_like(query, dtype=wide)
        held, width = torch.cat([key, value], -1), key.shape[-1]
        own = torch.zeros_like(held, dtype=wide)
        behind: _Passing | None = None
        for step in range(place.size):
            passing = _Passing(held, place) if step + 1 < place.size else None
            found = own if step == 0 else torch.zeros_like(own)
            for block in ctx.blocks[(place.rank - step) % place.size]:
                sums = [by_query, found[..., :width], found[..., width:]]
                parts = (query, held[..., :width], held[..., width:])
                _add_gradients(sums, grads[0], parts, whole, ctx.scale, block)
            if step:
                behind = _Passing(found if behind is None else found.add_(behind.wait()), place)
            held = held if passing is None else passing.wait()
        if behind is not None:
            own += behind.wait()
        by_key, by_value = own[..., :width].to(key.dtype), own[..., width:].to(value.dtype)
        return by_query.to(query.dtype), by_key, by_value, None, None, None


class _Passing:
    """A tensor on its way to the next rank, while the one of the rank before arrives."""

    def __init__(self, tensor: Tensor, place: ContextShard) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        ranks = dist.get_process_group_ranks(place.group)
        after, before = ranks[(place.rank + 1) % place.size], ranks[(place.rank - 1) % place.size]
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, place.group),
                dist.P2POp(dist.irecv, self._received, before, place.group),
            ]
        )

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self._work:
            work.wait()
        return self._received

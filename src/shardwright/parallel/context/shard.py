"""Which tokens of each row a context-parallel rank holds, and which pairs of tokens see each other.

B rows of S tokens, of which a rank holds T = S / cp. Packed rows stand one behind another: token t of row b is b x width + t,
where the width is T or S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.layout.size_rules import chunks

Block = tuple[slice, slice, bool]
"""Queries, keys, and whether the block is causal (both are the same tokens) or full."""
Chunks = Sequence[range]
"""The tokens of a row that a rank holds, in the order of its memory."""


@dataclass(frozen=True)
class ContextShard:
    """The tokens of each row that this rank holds.

    size, rank: of the context-parallel group, and in it.
    balanced: each rank holds one chunk from the first half of the row and one from the second, so that causal work is equal.
    group: the process group.
    attention: `all_gather` or `ring`.
    masks: masks of sliding windows, by (row length, window, device), kept from call to call.
    """

    size: int
    rank: int
    balanced: bool
    group: dist.ProcessGroup | None = None
    attention: str = "all_gather"
    masks: dict[tuple[int, int | None, str], list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def chunks(self, length: int) -> tuple[range, ...]:
        """The positions that this rank holds of a row of `length` tokens."""
        return chunks(length, self.size, self.rank, self.balanced)

    def part(self, rows: Tensor) -> Tensor:
        """This rank's tokens [B, T] of `rows` [B, S]."""
        return torch.cat([rows[:, own.start : own.stop] for own in self.chunks(rows.shape[1])], 1)

    def position_ids(self, length: int, device: torch.device) -> Tensor:
        """[1, T]: the positions of this rank's tokens in rows of `length` tokens."""
        parts = [torch.arange(own.start, own.stop, device=device) for own in self.chunks(length)]
        return torch.cat(parts).unsqueeze(0)

    def blocks(self, source: int, tokens: int) -> list[Block]:
        """The keys of rank `source` to which this rank's `tokens` queries attend, under causality.

        Balanced, a rank before this one contributes its first chunk to all queries here, and a rank after this one contributes
        both chunks to the queries of the second chunk here.
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
        """The keys of rank `source` that queries here see, each query in its own document; rows one behind another."""
        length = documents.documents.shape[1]
        held = chunks(length, self.size, source, self.balanced)
        return document_blocks(documents.spans, self.chunks(length), held)

    def row_blocks(self, length: int) -> list[Block]:
        """The keys of the whole row that queries here see: for each chunk here all keys before it, then its own."""
        found: list[Block] = []
        start = 0
        for own in self.chunks(length):
            queries = slice(start, start + len(own))
            if own.start:
                found.append((queries, slice(0, own.start), False))
            found.append((queries, slice(own.start, own.stop), True))
            start += len(own)
        return found


def document_blocks(spans: Sequence[tuple[int, int, int]], own: Chunks, held: Chunks) -> list[Block]:
    """The keys at `held` that the queries at `own` see in their documents; causal blocks first.

    spans: (row, first token, end) of each document. Every query whose own key is held is in one causal block.
    """
    found: list[Block] = []
    width, depth = sum(map(len, own)), sum(map(len, held))
    for row, start, end in spans:
        for queries, at in _overlaps(own, start, end):
            seen = slice(row * width + at, row * width + at + len(queries))
            for keys, key_at in _overlaps(held, start, queries.stop):
                first = row * depth + key_at
                before = keys.start < queries.start
                count = min(keys.stop, queries.start) - keys.start if before else 0
                if keys.stop > queries.start:
                    found.append((seen, slice(first + count, first + len(keys)), True))
                if before:
                    found.append((seen, slice(first, first + count), False))
    return sorted(found, key=lambda block: not block[2])


def _overlaps(chunks: Chunks, start: int, end: int) -> Iterator[tuple[range, int]]:
    """(tokens, index of the first among `chunks`) of each part of [start, end) that `chunks` hold."""
    at = 0
    for chunk in chunks:
        low, high = max(start, chunk.start), min(end, chunk.stop)
        if low < high:
            yield range(low, high), at + low - chunk.start
        at += len(chunk)


def as_one_row(rows: Tensor) -> Tensor:
    """[1, heads, B tokens, H] of [B, heads, tokens, H]: rows one behind another."""
    return rows.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def as_rows(row: Tensor, count: int) -> Tensor:
    """The inverse of `as_one_row` for `count` rows."""
    return row.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1)

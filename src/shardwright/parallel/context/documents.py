"""Which pairs of tokens see each other when rows of packed documents are cut over context-parallel ranks.

B rows of S tokens, of which a rank holds T = S / cp. Rows stand one behind another: token t of row b is b x width + t, where
the width is T or S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

Block = tuple[slice, slice, bool]
"""Queries, keys, and whether the block is causal (the same tokens on both sides) or full."""
Chunks = Sequence[range]
"""The tokens of a row that are held somewhere, in the order in which they stand there."""


def document_blocks(spans: Sequence[tuple[int, int, int]], own: Chunks, held: Chunks) -> list[Block]:
    """What queries at `own` see among the keys at `held` of their documents: the causal blocks are first for their queries.

    spans: (row, first token, end) of each document. Every query of a document that is held too is in one causal block.
    """
    found: list[Block] = []
    width, depth = sum(map(len, own)), sum(map(len, held))
    for row, start, end in spans:
        for queries, place in _overlaps(own, start, end):
            seen = slice(row * width + place, row * width + place + len(queries))
            for keys, key_place in _overlaps(held, start, queries.stop):
                first = row * depth + key_place
                before = keys.start < queries.start
                count = min(keys.stop, queries.start) - keys.start if before else 0
                if keys.stop > queries.start:
                    found.append((seen, slice(first + count, first + len(keys)), True))
                if before:
                    found.append((seen, slice(first, first + count), False))
    return sorted(found, key=lambda block: not block[2])


def _overlaps(chunks: Chunks, start: int, end: int) -> Iterator[tuple[range, int]]:
    """(tokens, where the first of them stands among `chunks`) of each part of [start, end) that is there."""
    place = 0
    for chunk in chunks:
        low, high = max(start, chunk.start), min(end, chunk.stop)
        if low < high:
            yield range(low, high), place + low - chunk.start
        place += len(chunk)


def as_one_row(rows: Tensor) -> Tensor:
    """[1, heads, B tokens, H] of [B, heads, tokens, H]: rows one behind another."""
    return rows.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def as_rows(row: Tensor, count: int) -> Tensor:
    """The inverse of `as_one_row` for `count` rows."""
    return row.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1)

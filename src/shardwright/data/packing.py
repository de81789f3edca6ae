"""From documents to rows: documents are cut to length, counted, and put one to a row or packed. Arrays only, no files.

A piece is (start, length) in tokens.bin and lies within one document. Its first token is no target, since the token before it
is not in the piece; each later token is a target, unless its weight is 0.

Best fit decreasing takes pieces from the longest to the shortest and puts each into the row with the least room that still
holds the piece. Pieces of one length are alike, and so are rows with equal room. So a whole run of equal pieces is placed
into a whole run of equal rows in one step, and every row is filled as by one piece after the other. The rows with room r are
ranges of row numbers, and one integer holds a bit for each r that occurs, so that the least sufficient room is a shift and a
lowest bit. The number of steps grows with the number of lengths, not of pieces. Pieces are given in the order in which they
are preferred among equals; within a row they keep this order, and rows are numbered by their first piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from shardwright.data.arrays import Float32, Float64, Int64
from shardwright.data.permutation import DOCUMENTS_EPOCH, permute

Overlong = Literal["split", "truncate", "error"]
PackingStrategy = Literal["bfd", "wrapped"]

_BLOCK = 2**22  # weights read at a time


@dataclass(frozen=True)
class RowRules:
    """How documents become rows of at most `max_length` tokens."""

    max_length: int
    overlong: Overlong
    packing: PackingStrategy | None = None  # which documents share a row; None: a row holds one piece
    seed: int | None = None  # shuffles the documents before they are packed; None: the order of the files
    bounds: tuple[int, ...] | None = None  # first document of each source, and their number; rows hold one source

    @property
    def name(self) -> str:
        """Names the rows among other rows of the same documents."""
        name = f"rows-{self.overlong}-{self.max_length}"
        if self.packing is not None:
            name += f"-{self.packing}-{'in-order' if self.seed is None else self.seed}"
        if self.bounds is not None:
            name += f"-{hashlib.blake2b(repr(self.bounds).encode(), digest_size=4).hexdigest()}"
        return name


@dataclass(frozen=True)
class RowRanges:
    """Rows as ranges of pieces."""

    pieces: Int64  # [pieces, 2]: start and length, row by row
    rows: Int64  # [rows, 3]: the end of each row among the pieces, its tokens, its targets
    weights: Float64 | None  # sum of the weights of each row's targets; None: every weight is 0 or 1
    counts: dict[str, int]  # rows, pieces, row_tokens, targets, targetless_rows, split_ and truncated_documents, ...
    bounds: tuple[int, ...]  # first row of each source, and the number of rows


def make_rows(ends: Int64, rules: RowRules, weights: Float32 | None = None) -> RowRanges:
    """Rows of the documents that end at `ends` in tokens.bin, whose tokens have `weights` (None: 1).

    Pieces and rows without a target are left out and counted as targetless_rows.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    documents, weighted = np.stack([starts, ends - starts], axis=1), weights is not None and not _is_mask(weights)
    bounds = rules.bounds or (0, len(documents))
    parts = []
    for first, last in pairwise(bounds):
        pieces, row_ends, counts = _arranged(documents[first:last], rules, weights)
        if rules.packing == "wrapped":  # documents that stand in more than one piece
            in_pieces = np.bincount(np.searchsorted(ends, pieces[:, 0], side="right"))
            counts["split_documents"] = int((in_pieces > 1).sum())
        parts.append(_counted(pieces, row_ends, weights, weighted, counts))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _arranged(documents: Int64, rules: RowRules, weights: Float32 | None) -> tuple[Int64, Int64, dict[str, int]]:
    """(pieces row by row, end of each row among them, counts) of the documents of one source."""
    long = documents[:, 1] > rules.max_length
    names = ("split_documents", "truncated_documents", "truncated_tokens", "targetless_rows")
    counts = dict.fromkeys(names, 0)
    if rules.overlong == "truncate":
        counts["truncated_documents"] = int(long.sum())
        counts["truncated_tokens"] = int((documents[long, 1] - rules.max_length).sum())
        documents[long, 1] = rules.max_length
    elif rules.packing != "wrapped":
        counts["split_documents"] = int(long.sum())
        documents = _split_long(documents, rules.max_length)
    kept = documents[_targets(documents, weights)[0] > 0]
    counts["targetless_rows"] = len(documents) - len(kept)
    if rules.packing is None:
        return kept, np.arange(1, len(kept) + 1), counts
    if rules.seed is not None:
        kept = kept[permute(np.arange(len(kept)), len(kept), rules.seed, DOCUMENTS_EPOCH)]
    pack = best_fit if rules.packing == "bfd" else wrapped
    return *pack(kept, rules.max_length), counts


def _joined(parts: Sequence[RowRanges]) -> RowRanges:
    """The rows of several sources, one source after the other."""
    before = np.cumsum([0, *(len(part.pieces) for part in parts)])
    rows = [part.rows + np.array([offset, 0, 0]) for part, offset in zip(parts, before)]
    weights = [part.weights for part in parts if part.weights is not None]
    return RowRanges(
        np.concatenate([part.pieces for part in parts]),
        np.concatenate(rows),
        np.concatenate(weights) if weights else None,
        {key: sum(part.counts[key] for part in parts) for key in parts[0].counts},
        tuple(np.cumsum([0, *(len(part.rows) for part in parts)]).tolist()),
    )


def _split_long(documents: Int64, max_length: int) -> Int64:
    """`documents` [n, 2] in pieces of `max_length` and a rest."""
    starts, lengths = documents.T
    count = -(-lengths // max_length)
    number = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    begins = np.repeat(starts, count) + number * max_length
    return np.stack([begins, np.minimum(np.repeat(starts + lengths, count) - begins, max_length)], axis=1)


def _targets(pieces: Int64, weights: Float32 | None) -> tuple[Int64, Float64]:
    """The targets of each of `pieces`, which must not overlap, and the sum of their weights."""
    lengths = pieces[:, 1]
    if weights is None:
        return lengths - 1, (lengths - 1).astype(np.float64)
    targets, sums = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.float64)
    order = np.argsort(pieces[:, 0], kind="stable")
    starts = pieces[order, 0]
    first = 0
    while first < len(order):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK)))
        chosen = order[first:last]
        begin, end = pieces[chosen, 0] + 1, pieces[chosen].sum(1)
        low, high = int(begin[0]) - 1, int(end[-1])
        block = np.append(np.asarray(weights[low:high], np.float64), 0.0)
        bounds = np.stack([begin - low, end - low], axis=1).ravel()
        many = lengths[chosen] > 1  # reduceat takes an empty range for its first element
        sums[chosen] = np.add.reduceat(block, bounds)[::2] * many
        targets[chosen] = np.add.reduceat((block != 0).astype(np.int64), bounds)[::2] * many
        first = last
    return targets, sums


def _counted(
    pieces: Int64, row_ends: Int64, weights: Float32 | None, weighted: bool, counts: dict[str, int]
) -> RowRanges:
    targets, sums = _targets(pieces, weights)
    totals = [np.concatenate([np.zeros(1, np.int64), np.cumsum(part)]) for part in (pieces[:, 1], targets)]
    bounds = np.concatenate([np.zeros(1, np.int64), row_ends])
    tokens, found = (np.diff(total[bounds]) for total in totals)
    rows, row_weights = np.stack([row_ends, tokens, found], axis=1).astype(np.int64), None
    if weighted:
        row_weights = np.add.reduceat(sums, bounds[:-1]) if len(row_ends) else sums
    if not found.all():  # only where `wrapped` has cut pieces after those without targets were left out
        keep = found > 0
        sizes = np.diff(bounds)
        pieces, rows = pieces[np.repeat(keep, sizes)], rows[keep]
        rows[:, 0] = np.cumsum(sizes[keep])
        row_weights = None if row_weights is None else row_weights[keep]
        counts = counts | {"targetless_rows": counts["targetless_rows"] + int((~keep).sum())}
    counts = counts | {
        "rows": len(rows),
        "pieces": len(pieces),
        "row_tokens": int(rows[:, 1].sum()),
        "targets": int(rows[:, 2].sum()),
    }
    return RowRanges(pieces, rows, row_weights, counts, (0, len(rows)))


def _is_mask(weights: Float32) -> bool:
    """Whether every weight is 0 or 1: then labels mark the targets, and losses are not multiplied by weights."""
    for first in range(0, len(weights), _BLOCK):
        block = np.asarray(weights[first : first + _BLOCK])
        if not ((block == 0) | (block == 1)).all():
            return False
    return True


def best_fit(pieces: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Rows of whole pieces [n, 2], none longer than `capacity`: (pieces row by row, end of each row among them)."""
    lengths = pieces[:, 1].astype(np.uint16 if capacity < 2**16 else np.int64)  # 16 bits sort in one pass
    counts = np.bincount(lengths, minlength=capacity + 1)
    row = np.empty(len(pieces), np.int32)
    row[np.argsort(capacity - lengths, kind="stable")] = _expanded(fill(counts.tolist(), capacity))
    rows = int(row.max(initial=-1)) + 1
    first = np.empty(rows, np.int32)
    first[row[::-1]] = np.arange(len(pieces) - 1, -1, -1, dtype=np.int32)  # the last one written stays
    number = np.empty(rows, np.int32)
    number[np.argsort(first)] = np.arange(rows, dtype=np.int32)
    row = number[row]
    return pieces[np.argsort(row, kind="stable")], np.cumsum(np.bincount(row, minlength=rows))


def fill(counts: Sequence[int], capacity: int) -> list[tuple[int, int, int]]:
    """Where best fit decreasing puts `counts[n]` pieces of n tokens, n from `capacity` down to 1.

    A step (first, rows, each) puts `each` of the next pieces into each of `rows` rows from number `first` on.
    """
    steps: list[tuple[int, int, int]] = []
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]  # of rows, by the room left in them
    occupied = rows = 0  # bit r of `occupied` is set where ranges[r] is not empty

    def place(first: int, size: int, each: int, room: int) -> None:
        nonlocal occupied
        steps.append((first, size, each))
        ranges[room].append((first, size))
        occupied |= 1 << room

    for length in range(capacity, 0, -1):
        left = counts[length]
        while left:
            if fitting := occupied >> length:
                room = length + (fitting & -fitting).bit_length() - 1
                first, size = ranges[room].pop()
                if not ranges[room]:
                    occupied ^= 1 << room
            else:
                room, first, size = capacity, rows, -(-left // (capacity // length))
                rows += size
            each = room // length
            whole = min(size, left // each)
            if whole:
                place(first, whole, each, room - each * length)
                left -= whole * each
            if whole < size and left:
                place(first + whole, 1, left, room - left * length)
                left, whole = 0, whole + 1
            if whole < size:
                ranges[room].append((first + whole, size - whole))
                occupied |= 1 << room
    return steps


def _expanded(steps: Sequence[tuple[int, int, int]]) -> Int64:
    """The row of each piece, in the order in which `fill` placed them."""
    first, size, each = np.array(steps, np.int64).reshape(-1, 3).T
    rows = np.arange(size.sum()) + np.repeat(first - np.cumsum(size) + size, size)
    return np.repeat(rows, np.repeat(each, size))


def wrapped(pieces: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Rows filled exactly, by cutting pieces at row ends: (pieces row by row, end of each row among them).

    Only the last row may have room left.
    """
    ends = np.cumsum(pieces[:, 1])
    total = int(ends[-1]) if len(ends) else 0
    row_ends = np.append(np.arange(capacity, total, capacity), total)[: -(-total // capacity)]
    cuts = np.union1d(ends, row_ends)
    begins = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[: len(cuts)]
    source = np.searchsorted(ends, begins, side="right")
    starts = pieces[source, 0] + begins - (ends - pieces[:, 1])[source]
    return np.stack([starts, cuts - begins], axis=1), np.searchsorted(cuts, row_ends, side="right")

"""Which pieces of documents share a row: best fit decreasing, or one after the other and cut at row ends.

Best fit decreasing takes pieces from the longest to the shortest and puts each where the least room is left that still
holds it. Pieces of one length are alike, and so are rows with equal room: here a whole run of equal pieces is placed into
a whole run of equal rows in one step, with the same fill of every row as one piece after the other. The rows with room r
are ranges of row numbers, and one integer holds a bit for each r that occurs, so that the least sufficient room is a shift
and a lowest bit. Steps grow with the number of lengths, not of pieces.

A piece is (start, length) in tokens.bin. Pieces are given in the order in which they are preferred among equals; within a
row they keep it, and rows are numbered by their first piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.data.order import Int64, permute

_STREAM = 2**32
"""Epoch number of the permutation of documents: no run reaches it, so rows and documents are shuffled independently."""


def shuffled(pieces: Int64, seed: int) -> Int64:
    """`pieces` in an order that depends on their number and `seed` only."""
    return pieces[permute(np.arange(len(pieces), dtype=np.int64), len(pieces), seed, _STREAM)]


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

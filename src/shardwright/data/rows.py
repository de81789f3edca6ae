"""From documents to rows: cut to length, counted, and one to a row or packed. Arrays only; files are `table.py`'s matter.

A piece is (start, length) in tokens.bin and lies within one document. Its first token is no target, since what comes before
it is not read with it; each later one is, unless its weight is 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwright.data.order import Int64
from shardwright.data.packing import best_fit, shuffled, wrapped

Overlong = Literal["split", "truncate", "error"]
PackingStrategy = Literal["bfd", "wrapped"]
Float64 = npt.NDArray[np.float64]
Weights = npt.NDArray[np.float32]

_BLOCK = 2**22  # weights read at a time


@dataclass(frozen=True)
class Cut:
    """How documents become rows of at most `max_length` tokens.

    packing: which documents share a row; None: one piece to a row, in the order of the files. seed: shuffles the documents
    before they are packed; None: the order of the files. bounds: first document of each source, and the number of
    documents, where a row may hold documents of one source only. None: there is one source, or it does not matter.
    """

    max_length: int
    overlong: Overlong
    packing: PackingStrategy | None = None
    seed: int | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Names the rows among others of the same documents."""
        name = f"rows-{self.overlong}-{self.max_length}"
        if self.packing is not None:
            name += f"-{self.packing}-{'in-order' if self.seed is None else self.seed}"
        if self.bounds is not None:
            name += f"-{hashlib.blake2b(repr(self.bounds).encode(), digest_size=4).hexdigest()}"
        return name


@dataclass(frozen=True)
class CutRows:
    """Rows as ranges of pieces.

    pieces: int64 [pieces, 2], start and length, row by row. rows: int64 [rows, 3]: the end of each row among the pieces, its
    tokens, its targets. weights: sum of the weights of each row's targets; None: every weight is 0 or 1. counts: rows,
    row_tokens, targets, pieces, split_documents, truncated_documents, truncated_tokens, targetless_rows. bounds: first
    row of each source, and the number of rows.
    """

    pieces: Int64
    rows: Int64
    weights: Float64 | None
    counts: dict[str, int]
    bounds: tuple[int, ...]


def cut_rows(ends: Int64, cut: Cut, weights: Weights | None = None) -> CutRows:
    """Rows of the documents that end at `ends` in tokens.bin, whose tokens have `weights` (None: 1).

    Pieces and rows without a target are left out and counted (`targetless_rows`).
    """
    documents, weighted = _pieces_of(ends), weights is not None and not _is_mask(weights)
    bounds = cut.bounds or (0, len(documents))
    parts = []
    for first, last in pairwise(bounds):
        pieces, row_ends, counts = _arranged(documents[first:last], cut, weights)
        if cut.packing == "wrapped":
            counts["split_documents"] = _split(pieces, ends)
        parts.append(_counted(pieces, row_ends, weights, weighted, counts))
    if len(parts) == 1:
        return parts[0]
    return _joined(parts)


def _arranged(documents: Int64, cut: Cut, weights: Weights | None) -> tuple[Int64, Int64, dict[str, int]]:
    """(pieces row by row, end of each row among them, counts) of the documents of one source."""
    long = documents[:, 1] > cut.max_length
    names = ("split_documents", "truncated_documents", "truncated_tokens", "targetless_rows")
    counts = dict.fromkeys(names, 0)
    if cut.overlong == "truncate":
        counts["truncated_documents"] = int(long.sum())
        counts["truncated_tokens"] = int((documents[long, 1] - cut.max_length).sum())
        documents[long, 1] = cut.max_length
    elif cut.packing != "wrapped":
        counts["split_documents"] = int(long.sum())
        documents = _split_long(documents, cut.max_length)
    kept = documents[_targets(documents, weights)[0] > 0]
    counts["targetless_rows"] = len(documents) - len(kept)
    if cut.packing is None:
        return kept, np.arange(1, len(kept) + 1), counts
    given = kept if cut.seed is None else shuffled(kept, cut.seed)
    pack = best_fit if cut.packing == "bfd" else wrapped
    return *pack(given, cut.max_length), counts


def _joined(parts: Sequence[CutRows]) -> CutRows:
    """The rows of several sources, one source after the other."""
    before = np.cumsum([0, *(len(part.pieces) for part in parts)])
    rows = [part.rows + np.array([offset, 0, 0]) for part, offset in zip(parts, before)]
    weights = [part.weights for part in parts if part.weights is not None]
    return CutRows(
        np.concatenate([part.pieces for part in parts]),
        np.concatenate(rows),
        np.concatenate(weights) if weights else None,
        {key: sum(part.counts[key] for part in parts) for key in parts[0].counts},
        tuple(np.cumsum([0, *(len(part.rows) for part in parts)]).tolist()),
    )


def _pieces_of(ends: Int64) -> Int64:
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    return np.stack([starts, ends - starts], axis=1)


def _split_long(documents: Int64, max_length: int) -> Int64:
    """`documents` [n, 2] in pieces of `max_length` and a rest."""
    starts, lengths = documents.T
    count = -(-lengths // max_length)
    number = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    begins = np.repeat(starts, count) + number * max_length
    return np.stack([begins, np.minimum(np.repeat(starts + lengths, count) - begins, max_length)], axis=1)


def _split(pieces: Int64, ends: Int64) -> int:
    """How many of the documents that end at `ends` stand in more than one of `pieces`."""
    return int((np.bincount(np.searchsorted(ends, pieces[:, 0], side="right")) > 1).sum())


def _targets(pieces: Int64, weights: Weights | None) -> tuple[Int64, Float64]:
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
    pieces: Int64, row_ends: Int64, weights: Weights | None, weighted: bool, counts: dict[str, int]
) -> CutRows:
    targets, sums = _targets(pieces, weights)
    totals = [np.concatenate([np.zeros(1, np.int64), np.cumsum(part)]) for part in (pieces[:, 1], targets)]
    bounds = np.concatenate([np.zeros(1, np.int64), row_ends])
    tokens, found = (np.diff(total[bounds]) for total in totals)
    rows, row_weights = np.stack([row_ends, tokens, found], axis=1).astype(np.int64), None
    if weighted:
        row_weights = np.add.reduceat(sums, bounds[:-1]) if len(row_ends) else sums
    if not found.all():  # only rows of pieces that were cut after the choice of documents
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
    return CutRows(pieces, rows, row_weights, counts, (0, len(rows)))


def _is_mask(weights: Weights) -> bool:
    """Whether every weight is 0 or 1: then targets are marked by their labels, and nothing is multiplied."""
    for first in range(0, len(weights), _BLOCK):
        block = np.asarray(weights[first : first + _BLOCK])
        if not ((block == 0) | (block == 1)).all():
            return False
    return True

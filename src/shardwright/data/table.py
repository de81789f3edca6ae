"""Rows of tokenised documents, on disk and memory-mapped. A directory rows-... beside the documents holds:

pieces.npy      int64 [pieces, 2]: start in tokens.bin and length of each piece of a document, row by row
rows.npy        int64 [rows, 3]: where the row ends among the pieces, its tokens, its targets
weights.npy     float64 for each row: sum of the weights of its targets; absent where every weight is 0 or 1
meta.json       counts, fingerprint
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwright.data.arrays import FILLER, Float32, Float64, Int32, Int64
from shardwright.data.documents import Documents, new_directory
from shardwright.data.packing import RowRanges, RowRules, make_rows
from shardwright.errors import DataError
from shardwright.layout.loss import IGNORE_INDEX

_T = TypeVar("_T", bound=np.generic)
_BLOCK = 2**22  # weights hashed at a time


@dataclass(frozen=True)
class Block:
    """Rows as arrays [rows, width]: the fields of `loader.Microbatch` of the same names."""

    input_ids: Int64
    labels: Int64
    documents: Int32 | None
    weights: Float32 | None


class Table:
    """Rows over memory-mapped documents.

    fingerprint: of the rows' content, wherever the files lie. packed: a row may hold several documents. max_length: tokens for
    which a row has room. bounds: first row of each source whose rows were cut apart, and the number of rows.
    """

    def __init__(self, documents: Documents, rules: RowRules, found: RowRanges, fingerprint: str) -> None:
        self.documents, self.rules, self.counts, self.fingerprint = documents, rules, found.counts, fingerprint
        self.max_length, self.packed, self.bounds = rules.max_length, rules.packing is not None, found.bounds
        # plain arrays: a slice of a memmap costs several times as much
        self._pieces, self._rows = np.asarray(found.pieces), np.asarray(found.rows)
        self._row_weights = None if found.weights is None else np.asarray(found.weights)
        self._tokens = np.asarray(documents.tokens)
        self._weights = None if documents.weights is None else np.asarray(documents.weights)

    @classmethod
    def make(cls, documents: Documents, rules: RowRules) -> Table:
        """Opens the rows of `documents`, which are made first where they do not exist.

        Raises `DataError` for a document that is too long with overlong = error, and when no row holds a target.
        """
        path = documents.path / rules.name
        if rules.overlong == "error":
            _refuse_long(documents, rules.max_length)
        if not path.exists():
            _write_rows(path, documents, rules)
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if not meta["counts"]["rows"]:
            raise DataError(
                f"None of the {len(documents.ends)} documents gives a row with a target token.",
                "A row needs two tokens: one to read and one to predict.",
                "Check data.text_column, data.max_length and the files.",
            )
        pieces, rows = (np.load(path / name, mmap_mode="r") for name in ("pieces.npy", "rows.npy"))
        weights = np.load(path / "weights.npy", mmap_mode="r") if (path / "weights.npy").is_file() else None
        return cls(
            documents,
            rules,
            RowRanges(pieces, rows, weights, meta["counts"], tuple(meta["bounds"])),
            meta["fingerprint"],
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest_piece(self) -> int:
        """Tokens of the longest piece of a document in a row."""
        return int(self._pieces[:, 1].max())

    @property
    def weighted(self) -> bool:
        """Whether some target has a weight other than 1."""
        return self._row_weights is not None

    def pieces(self, row: int) -> Int64:
        """[n, 2], start in tokens.bin and length of each piece of a row, in order; none of a `FILLER` row."""
        if row == FILLER:
            return self._pieces[:0]
        return self._pieces[self._rows[row - 1, 0] if row else 0 : self._rows[row, 0]]

    def row(self, row: int) -> tuple[Int64, Int64]:
        """(input ids, labels) of a row; labels[t] is input_ids[t + 1], and -100 where this token is no target."""
        block = self.block([row], int(self._rows[row, 1]), 0)
        return block.input_ids[0], block.labels[0]

    def block(self, rows: Sequence[int], width: int, pad_id: int) -> Block:
        """The contents of `rows` in `width` positions each; a `FILLER` row is padding throughout."""
        found = [self.pieces(row) for row in rows]
        pieces = np.concatenate(found)
        inside = pieces.tolist()
        ends = np.cumsum(pieces[:, 1])  # of each piece, among the tokens of all rows
        bounds = np.concatenate([[0], ends])[np.cumsum([0, *map(len, found)])].tolist()
        tokens = _joined(self._tokens, inside)
        ids = _spread(tokens.astype(np.int64), bounds, width, pad_id)
        labels = np.empty(len(tokens), np.int64)
        labels[:-1] = tokens[1:]
        labels[ends - 1] = IGNORE_INDEX
        documents = weights = None
        if self._weights is not None:
            weight = np.zeros(len(tokens), np.float32)
            weight[:-1] = _joined(self._weights, inside)[1:]
            weight[ends - 1] = 0
            labels[weight == 0] = IGNORE_INDEX
            weights = _spread(weight, bounds, width, 0) if self.weighted else None
        if self.packed:
            numbers = np.concatenate([np.arange(len(own), dtype=np.int32) for own in found])
            documents = _spread(np.repeat(numbers, pieces[:, 1]), bounds, width, -1)
        return Block(ids, _spread(labels, bounds, width, IGNORE_INDEX), documents, weights)

    def real_tokens(self, rows: Int64) -> Int64:
        """Tokens of each of `rows`."""
        return np.asarray(self._rows[rows, 1])

    def target_tokens(self, rows: Int64) -> Int64:
        """Targets of each of `rows`."""
        return np.asarray(self._rows[rows, 2])

    def weighs(self, rows: Int64) -> bool:
        """Whether targets of `rows` may have weights other than 1."""
        return self.weighted

    def target_weights(self, rows: Int64) -> Float64:
        """The sum of the weights of the targets of each of `rows`."""
        if self._row_weights is None:
            return self.target_tokens(rows).astype(np.float64)
        return np.asarray(self._row_weights[rows])


def _joined(source: npt.NDArray[_T], pieces: list[list[int]]) -> npt.NDArray[_T]:
    """The values of `source` in `pieces`, one after the other."""
    return np.concatenate([source[:0], *(source[start : start + length] for start, length in pieces)])


def _spread(values: npt.NDArray[_T], bounds: list[int], width: int, rest: int) -> npt.NDArray[_T]:
    """`values` in rows [n, width]: row b holds those from bounds[b] to bounds[b + 1], then `rest`."""
    result = np.empty((len(bounds) - 1, width), values.dtype)
    for b, (first, last) in enumerate(itertools.pairwise(bounds)):
        result[b, : last - first] = values[first:last]
        result[b, last - first :] = rest
    return result


def _write_rows(path: Path, documents: Documents, rules: RowRules) -> None:
    found = make_rows(np.asarray(documents.ends[:, 0]), rules, documents.weights)
    arrays: dict[str, npt.NDArray[Any]] = {"pieces": found.pieces, "rows": found.rows}
    if found.weights is not None:
        arrays["weights"] = found.weights
    digest = hashlib.blake2b(documents.meta["tokens_digest"].encode(), digest_size=16)
    if documents.weights is not None:
        for first in range(0, len(documents.weights), _BLOCK):
            digest.update(documents.weights[first : first + _BLOCK].tobytes())
    with new_directory(path) as work:
        for name, array in arrays.items():
            np.save(work / f"{name}.npy", array)
            digest.update(array.tobytes())
        meta = {"counts": found.counts, "bounds": found.bounds, "fingerprint": digest.hexdigest()}
        (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _refuse_long(documents: Documents, max_length: int) -> None:
    lengths = documents.lengths
    long = np.flatnonzero(lengths > max_length)
    if len(long):
        raise DataError(
            f"{documents.place(int(long[0]))}: the document has {lengths[long[0]]} tokens, more than "
            f"data.max_length = {max_length}. {len(long)} of {len(lengths)} documents are too long.",
            "data.overlong is error.",
            f"Set data.overlong to split or truncate, or data.max_length to {lengths.max()}.",
        )

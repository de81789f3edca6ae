"""Tokenised documents and the rows cut from them, on disk and memory-mapped.

A directory holds, for one set of files and one tokenizer:
  tokens.bin      tokens of all documents, one after the other: uint16, or uint32 if the vocabulary needs it
  documents.npy   int64 [documents, 3]: where the document ends in tokens.bin, its file, its line
  weights.bin     float32, one for each token: its weight as a target, 0 for one that is not trained; absent where all are 1
  meta.json       files, counts, special tokens
and, for each way of cutting rows,
  rows-<overlong>-<max_length>/rows.npy   int64 [rows, 2]: start in tokens.bin, length
  rows-<overlong>-<max_length>/meta.json  counts, fingerprint
Directories are written under a temporary name and renamed, so one that exists is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError

FORMAT = 1
Overlong = Literal["split", "truncate", "error"]
Int64 = npt.NDArray[np.int64]


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest of uint16 and uint32 that holds token ids 0 to `vocabulary` - 1."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` on success and is removed on failure.

    When another process made `path` in the meantime, its directory stays and this one is dropped: both hold
    the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        yield work
        try:
            work.rename(path)
        except OSError:
            if not (path / "meta.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class Documents:
    """Tokenised documents: `tokens` of all, and `ends` [documents, 3]: end, file number, line of each.

    weights: float32 for each of `tokens`, its weight as a target, 0 where it is not trained. None: all are 1.
    """

    path: Path
    meta: dict[str, Any]
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None

    @classmethod
    def open(cls, path: Path) -> Documents:
        """Memory-maps the directory `path`. Raises `DataError` when tokens.bin has changed its size."""
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"])
        size = (path / "tokens.bin").stat().st_size
        if size != meta["tokens"] * dtype.itemsize:
            raise DataError(
                f"{path / 'tokens.bin'} has {size} bytes, not {meta['tokens'] * dtype.itemsize}.",
                "It was changed after it was written.",
                f"Remove {path}; it is made again.",
            )
        tokens = np.memmap(path / "tokens.bin", dtype, mode="r") if size else np.empty(0, dtype)
        weighted = (path / "weights.bin").is_file()
        weights = np.memmap(path / "weights.bin", np.float32, mode="r") if weighted and size else None
        return cls(path, meta, tokens, np.load(path / "documents.npy", mmap_mode="r"), weights)

    def place(self, document: int) -> str:
        """`file:line` of a document."""
        _, file, line = self.ends[document]
        return f"{self.meta['files'][file]}:{line}"


def cut_rows(ends: Int64, max_length: int, overlong: Overlong) -> tuple[Int64, dict[str, int]]:
    """Rows of at most `max_length` tokens as (start, length) pairs [rows, 2], and counts.

    A row never spans two documents. A row of n tokens has n - 1 targets, the tokens whose predecessor is in
    the same row. Rows of one token have none and are left out (`targetless_rows`). Counts: rows, row_tokens,
    targets, split_documents, truncated_documents, truncated_tokens, targetless_rows.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    lengths = ends - starts
    long = lengths > max_length
    counts = {"split_documents": 0, "truncated_documents": 0, "truncated_tokens": 0}
    if overlong == "truncate":
        counts["truncated_documents"] = int(long.sum())
        counts["truncated_tokens"] = int((lengths[long] - max_length).sum())
        lengths = np.minimum(lengths, max_length)
    else:
        counts["split_documents"] = int(long.sum())
        pieces = -(-lengths // max_length)
        piece = np.arange(int(pieces.sum()), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + piece * max_length
        lengths = np.minimum(np.repeat(lengths, pieces) - piece * max_length, max_length)
    rows = np.stack([starts, lengths], axis=1)
    kept = rows[lengths > 1]
    counts |= {
        "rows": len(kept),
        "row_tokens": int(kept[:, 1].sum()),
        "targets": int((kept[:, 1] - 1).sum()),
        "targetless_rows": len(rows) - len(kept),
    }
    return kept, counts


@dataclass(frozen=True)
class Table:
    """Rows over memory-mapped documents; `fingerprint` is of their content, wherever the files lie."""

    documents: Documents
    max_length: int
    rows: Int64
    counts: dict[str, int]
    fingerprint: str

    @classmethod
    def make(cls, documents: Documents, max_length: int, overlong: Overlong) -> Table:
        """Opens the rows of `documents`, cutting them first where that was not done before.

        Raises `DataError` for a document that is too long with overlong = error, and when no row holds a
        target.
        """
        path = documents.path / f"rows-{overlong}-{max_length}"
        if overlong == "error":
            _refuse_long(documents, max_length)
        if not path.exists():
            rows, counts = cut_rows(np.asarray(documents.ends[:, 0]), max_length, overlong)
            fingerprint = hashlib.blake2b(
                documents.meta["tokens_digest"].encode() + rows.tobytes(), digest_size=16
            )
            with new_directory(path) as work:
                np.save(work / "rows.npy", rows)
                meta = {"counts": counts, "fingerprint": fingerprint.hexdigest()}
                (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if not meta["counts"]["rows"]:
            raise DataError(
                f"None of the {len(documents.ends)} documents gives a row with a target token.",
                "A row needs two tokens: one to read and one to predict.",
                "Look at data.text_column, data.max_length and the files.",
            )
        return cls(documents, max_length, np.load(path / "rows.npy", mmap_mode="r"), **meta)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, row: int) -> tuple[Int64, Int64]:
        """(input ids, labels) of a row; labels[t] is input_ids[t + 1], and -100 at the end."""
        start, length = self.rows[row]
        tokens = self.documents.tokens[start : start + length].astype(np.int64)
        return tokens, np.append(tokens[1:], np.int64(-100))

    def real_tokens(self, rows: Int64) -> Int64:
        """Tokens of each of `rows`."""
        return np.asarray(self.rows[rows, 1])

    def target_tokens(self, rows: Int64) -> Int64:
        """Targets of each of `rows`."""
        return np.asarray(self.rows[rows, 1]) - 1


def _refuse_long(documents: Documents, max_length: int) -> None:
    lengths = np.diff(documents.ends[:, 0], prepend=0)
    long = np.flatnonzero(lengths > max_length)
    if len(long):
        raise DataError(
            f"{documents.place(int(long[0]))}: the document has {lengths[long[0]]} tokens, more than "
            f"data.max_length = {max_length}. {len(long)} of {len(lengths)} documents are too long.",
            "data.overlong is error.",
            f"Set data.overlong to split or truncate, or data.max_length to {lengths.max()}.",
        )

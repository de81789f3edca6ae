"""Tokenised documents on disk, memory-mapped. A directory holds, for one set of files and one tokenizer:

tokens.bin      tokens of all documents, one after the other: uint16, or uint32 if the vocabulary needs it
documents.npy   int64 [documents, 3]: where the document ends in tokens.bin, its file, its line
weights.bin     float32 for each token: its weight as a target, 0 where it is not trained; absent where all weights are 1
meta.json       files, counts, notes, special tokens
rows-*          a directory for each way to make rows of these documents (`table.py`)

Directories are written under a temporary name and renamed, so that an existing directory is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.data.arrays import Float32, Int64
from shardwright.data.encode import Encoded
from shardwright.data.notices import Notes
from shardwright.data.records import RecordSlice
from shardwright.errors import DataError

FORMAT = 4
"""Raised when the files of a directory change their meaning."""
_ONES = 1 << 22  # weights written at a time


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    """The smaller of uint16 and uint32 that holds token ids 0 to `vocabulary` - 1."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` on success and is removed on failure.

    When another process has made `path` in the meantime, its directory stays and this one is dropped: both hold the same.
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
    """Tokenised documents, one after the other."""

    path: Path
    meta: dict[str, Any]  # meta.json
    tokens: npt.NDArray[np.unsignedinteger[Any]]  # of all documents
    ends: Int64  # [documents, 3]: end among the tokens, file number, line
    weights: Float32 | None = None  # of each token as a target, 0 where it is not trained; None: all are 1

    @classmethod
    def open(cls, path: Path) -> Documents:
        """Memory-maps the directory `path`. Raises `DataError` when the size of tokens.bin has changed."""
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"])
        size, expected = (path / "tokens.bin").stat().st_size, meta["tokens"] * dtype.itemsize
        if size != expected:
            raise DataError(
                f"{path / 'tokens.bin'} has {size} bytes, not {expected}.",
                "The file was changed after it was written.",
                f"Remove {path}; the next start makes it again.",
            )
        tokens = np.memmap(path / "tokens.bin", dtype, mode="r") if size else np.empty(0, dtype)
        weighted = (path / "weights.bin").is_file()
        weights = np.memmap(path / "weights.bin", np.float32, mode="r") if weighted and size else None
        return cls(path, meta, tokens, np.load(path / "documents.npy", mmap_mode="r"), weights)

    @property
    def lengths(self) -> Int64:
        """Tokens of each document."""
        return np.asarray(np.diff(np.asarray(self.ends[:, 0]), prepend=0), np.int64)

    def place(self, document: int) -> str:
        """`file:line` of a document."""
        _, file, line = self.ends[document]
        return f"{self.meta['files'][file]}:{line}"


class DocumentWriter:
    """Writes tokens.bin, documents.npy, meta.json and, once a weight is not 1, weights.bin."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        self.directory, self.dtype = directory, token_dtype(vocabulary)
        (directory / "tokens.bin").touch()
        self.digest = hashlib.blake2b(digest_size=16)
        self.ends: list[np.ndarray] = []
        self.notes = Notes()
        self.tokens, self.largest, self.weighted = 0, -1, False

    def append(self, part: RecordSlice, found: Encoded) -> None:
        """Appends the documents of a slice."""
        content = found.ids.astype(self.dtype).tobytes()
        with open(self.directory / "tokens.bin", "ab") as out:
            out.write(content)
        self.digest.update(content)
        if found.weights is not None or self.weighted:
            self._append_weights(found)
        ends = self.tokens + np.cumsum(found.lengths, dtype=np.int64)
        files = np.full(len(ends), part.file, np.int64)
        self.ends.append(np.stack([ends, files, np.asarray(found.lines, np.int64)], axis=1))
        self.tokens += len(found.ids)
        self.largest = max(self.largest, int(found.ids.max(initial=-1)))
        self.notes.update(found.notes)

    def _append_weights(self, found: Encoded) -> None:
        with open(self.directory / "weights.bin", "ab") as out:
            if not self.weighted:
                for start in range(0, self.tokens, _ONES):
                    out.write(np.ones(min(_ONES, self.tokens - start), np.float32).tobytes())
                self.weighted = True
            weights = np.ones(len(found.ids), np.float32) if found.weights is None else found.weights
            out.write(weights.tobytes())

    def finish(self, files: Sequence[str], formats: Iterable[str | None], other: Mapping[str, Any]) -> None:
        """Writes documents.npy and meta.json. other: further entries of meta.json."""
        ends = np.concatenate([np.empty((0, 3), np.int64), *self.ends])
        np.save(self.directory / "documents.npy", ends)
        meta = {
            "dtype": np.dtype(self.dtype).name,
            "tokens": self.tokens,
            "documents": len(ends),
            "largest_token_id": self.largest,
            "tokens_digest": self.digest.hexdigest(),
            "notes": [astuple(note) for note in self.notes],
            "format": FORMAT,
            "files": list(files),
            "formats": sorted({form for form in formats if form is not None}),
            **other,
        }
        (self.directory / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

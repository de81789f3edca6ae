"""Tokenises slices of files in as many processes as asked for, and writes them as one memory-mappable directory.

The processes are forked after the tokenizer is loaded. Each reads its slice itself, so that reading JSON and rendering
chat templates are divided too; results are written in the order of the files.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import astuple
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from shardwright.arch.model_files import TOKENIZER_FILES
from shardwright.config.schema import Data
from shardwright.data.encode import Encoded, Encoder
from shardwright.data.files import DataFile
from shardwright.data.notes import Notes
from shardwright.data.sources import Slice, slices
from shardwright.data.table import FORMAT, Documents, new_directory, token_dtype
from shardwright.errors import ConfigError, DataError

_AHEAD = 4  # slices in work or waiting to be written, for each process
_ONES = 1 << 22  # weights written at a time
_HERE: dict[str, Encoder] = {}
"""The encoder of a tokenising process."""


def tokenizer_directory(name: str, key: str) -> Path:
    """The directory of the tokenizer `name`: a directory, or a name that Hugging Face's local cache holds.

    Raises `ConfigError` when it has no tokenizer. Nothing is fetched.
    """
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ConfigError(
                f"{key}: `{name}` is no directory, and Hugging Face's local cache does not hold it.",
                "Nothing is fetched over the network.",
                "Name a directory with a tokenizer.json.",
            ) from None
    if not tokenizer_files(path):
        raise ConfigError(
            f"{key}: {path} has no tokenizer.",
            "Text cannot be tokenised without one.",
            "Set model.tokenizer_name_or_path to a directory with a tokenizer.json.",
        )
    return path


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the directory that decide how text is tokenised."""
    return sorted({file for pattern in TOKENIZER_FILES for file in path.glob(pattern)})


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer in the directory `path`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"The tokenizer in {path} cannot be loaded.", str(error).strip().splitlines()[0]) from error


def write_documents(
    path: Path,
    files: Sequence[DataFile],
    formats: Sequence[str | None],
    tokenizer_path: Path | None,
    data: Data,
    *,
    num_proc: int,
    split: str,
) -> Documents:
    """Reads and tokenises `files`, of `formats`, into the new directory `path` and opens it.

    Shows its progress on a terminal. Raises `DataError` with file and line for what cannot be read.
    """
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    kinds = frozenset(name for name in formats if name is not None)
    encoder = Encoder(tokenizer, data, kinds, tokenizer_path)
    work = (
        (part, form)
        for number, (file, form) in enumerate(zip(files, formats))
        if form is not None
        for part in slices(number, file.path, encoder.keep)
    )
    known = None if tokenizer is None or "tokens" in kinds else len(tokenizer)
    with new_directory(path) as directory:
        writer = DocumentWriter(directory, token_dtype(known or 2**32))
        with Console(stderr=True).status(f"Tokenising {split}") as status:
            for part, found in _encoded(work, encoder, num_proc):
                writer.append(part, found)
                status.update(f"Tokenising {split}: {writer.counts['read']:,} documents")
        if not writer.counts["read"]:
            raise DataError(
                f"There is no document in {', '.join(file.path for file in files)}.", "The files are empty."
            )
        writer.finish([file.path for file in files], formats, special_tokens(tokenizer))
    return Documents.open(path)


def special_tokens(tokenizer: Any) -> dict[str, int | None]:
    """The size of a tokenizer's vocabulary, its end token and its padding token; None where there is none."""
    if tokenizer is None:
        return {"vocabulary": None, "eos_id": None, "pad_id": None}
    return {
        "vocabulary": len(tokenizer), "eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _encoded(work: Iterator[tuple[Slice, str]], encoder: Encoder, num_proc: int) -> Iterator[tuple[Slice, Encoded]]:
    """Each slice of `work` with its documents, in order."""
    first = list(islice(work, num_proc))
    if len(first) < 2:
        for part, form in chain(first, work):
            yield part, encoder.slice(part, form)
        return
    waiting: deque[tuple[Slice, Future[Encoded]]] = deque()
    pool = ProcessPoolExecutor(
        len(first), multiprocessing.get_context("fork"), initializer=_HERE.__setitem__, initargs=("encoder", encoder)
    )
    try:
        for part, form in chain(first, work):
            waiting.append((part, pool.submit(_encode, part, form)))
            if len(waiting) >= _AHEAD * len(first):
                part, future = waiting.popleft()
                yield part, future.result()
        while waiting:
            part, future = waiting.popleft()
            yield part, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(part: Slice, form: str) -> Encoded:
    return _HERE["encoder"].slice(part, form)


class DocumentWriter:
    """Writes tokens.bin, documents.npy and, once a weight is not 1, weights.bin."""

    def __init__(self, directory: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
        self.directory, self.dtype = directory, dtype
        (directory / "tokens.bin").touch()
        self.digest = hashlib.blake2b(digest_size=16)
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.ends: list[np.ndarray] = []
        self.notes = Notes()
        self.tokens, self.largest, self.weighted = 0, -1, False

    def append(self, part: Slice, found: Encoded) -> None:
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
        self.counts.update(found.counts)
        self.notes.update(found.notes)
        for name, line in found.first.items():
            self.first.setdefault(name, f"{part.path}:{line}")

    def _append_weights(self, found: Encoded) -> None:
        with open(self.directory / "weights.bin", "ab") as out:
            if not self.weighted:
                for start in range(0, self.tokens, _ONES):
                    out.write(np.ones(min(_ONES, self.tokens - start), np.float32).tobytes())
                self.weighted = True
            weights = np.ones(len(found.ids), np.float32) if found.weights is None else found.weights
            out.write(weights.tobytes())

    def finish(self, files: Sequence[str], formats: Sequence[str | None], other: Mapping[str, Any]) -> None:
        """Writes documents.npy and meta.json. other: what else meta.json says."""
        ends = np.concatenate([np.empty((0, 3), np.int64), *self.ends])
        np.save(self.directory / "documents.npy", ends)
        meta = {
            "dtype": np.dtype(self.dtype).name,
            "tokens": self.tokens,
            "documents": len(ends),
            "largest_token_id": self.largest,
            "tokens_digest": self.digest.hexdigest(),
            "counts": dict(self.counts),
            "first": self.first,
            "notes": [astuple(note) for note in self.notes],
            "format": FORMAT,
            "files": list(files),
            "formats": list(formats),
            **other,
        }
        (self.directory / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

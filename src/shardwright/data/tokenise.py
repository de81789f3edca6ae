"""From the files of a split to tokenised documents: found in the cache, or tokenised now in several processes.

The processes are forked after the tokenizer is loaded. Each reads its slice itself, so that parsing JSON and rendering chat
templates are divided too; the documents are written in the order of the files.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from shardwright.config.schema import Data, RunFile
from shardwright.data.chat_template import read_template
from shardwright.data.documents import FORMAT, Documents, DocumentWriter, new_directory
from shardwright.data.encode import Encoded, Encoder
from shardwright.data.files import DataFile, find_files, sources_of
from shardwright.data.formats import find_format, refuse_without_effect
from shardwright.data.notices import Notes
from shardwright.data.records import RecordSlice, slices
from shardwright.data.tokenizer import find_tokenizer, load_tokenizer, special_ids, tokenizer_files
from shardwright.errors import DataError

Split = Literal["train", "validation"]
ENCODING = 2
"""Raised when the same records and settings give other tokens or weights than before."""
_AHEAD = 4  # slices for each process that are tokenised or wait to be written
_ENCODER: list[Encoder] = []
"""The encoder of a tokenising process."""


@dataclass(frozen=True)
class TokenisedSplit:
    """Tokenised documents of a split."""

    documents: Documents
    sources: tuple[int, ...]  # of each file, the number of the source that named it
    tokenizer_path: Path | None
    cached: bool  # nothing had to be tokenised


def read_documents(run: RunFile, split: Split) -> TokenisedSplit | None:
    """The documents of `run`'s split; None when the split names no files.

    Raises `ConfigError` or `DataError`, with file and line where there is one, and when no document is left.
    """
    entries = run.data.train if split == "train" else run.data.validation
    if not entries:
        return None
    files = find_files(sources_of(entries), f"data.{split}")
    tokenizer_path, missing = find_tokenizer(run)
    path = cache_directory(run) / f"tokens-{cache_key(run.data, tokenizer_path, files)}"
    cached = (path / "meta.json").is_file()
    documents = Documents.open(path) if cached else _tokenise(run.data, split, files, path, tokenizer_path, missing)
    if split == "train":
        refuse_without_effect(run.data, documents.meta["formats"])
    if not documents.meta["documents"]:
        raise _nothing_left(split, documents.meta)
    return TokenisedSplit(documents, tuple(file.source for file in files), tokenizer_path, cached)


def _tokenise(
    data: Data,
    split: Split,
    files: Sequence[DataFile],
    path: Path,
    tokenizer_path: Path | None,
    missing: Exception | None,
) -> Documents:
    """Reads and tokenises `files` into the new directory `path`, with progress on a terminal."""
    formats = [find_format(file.path, data) for file in files]
    known = frozenset(form for form in formats if form is not None)
    if split == "train" and known:
        refuse_without_effect(data, sorted(known))
    if missing is not None and known != {"tokens"}:
        raise missing
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    encoder = Encoder(tokenizer, data, known, tokenizer_path)
    work = (
        (part, form)
        for number, (file, form) in enumerate(zip(files, formats))
        if form is not None
        for part in slices(number, file.path, encoder.keep)
    )
    paths = [file.path for file in files]
    with new_directory(path) as directory:
        writer, read = DocumentWriter(directory, encoder.vocabulary), 0
        with Console(stderr=True).status(f"Tokenising {split}") as status:
            for part, found in _encoded(work, encoder, data.num_proc or os.cpu_count() or 1):
                writer.append(part, found)
                read += found.notes.count("document")
                status.update(f"Tokenising {split}: {read:,} documents")
        if not read:
            raise DataError(f"There is no document in {', '.join(paths)}.", "The files are empty.")
        writer.finish(paths, formats, special_ids(tokenizer))
    return Documents.open(path)


def _encoded(
    work: Iterator[tuple[RecordSlice, str]], encoder: Encoder, num_proc: int
) -> Iterator[tuple[RecordSlice, Encoded]]:
    """Each slice of `work` with its documents, in order."""
    first = list(islice(work, num_proc))
    if len(first) < 2:
        for part, form in chain(first, work):
            yield part, encoder.slice(part, form)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(len(first), context, initializer=_ENCODER.append, initargs=(encoder,))
    waiting: deque[tuple[RecordSlice, Future[Encoded]]] = deque()
    try:
        for part, form in chain(first, work):
            waiting.append((part, pool.submit(_encode, part, form)))
            if len(waiting) >= _AHEAD * len(first):
                part, future = waiting.popleft()
                yield part, future.result()
        for part, future in waiting:
            yield part, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(part: RecordSlice, form: str) -> Encoded:
    return _ENCODER[0].slice(part, form)


def cache_directory(run: RunFile) -> Path:
    """data.cache_dir, or `.cache` beside output_dir, so that runs side by side share tokenised data."""
    return Path(run.data.cache_dir) if run.data.cache_dir else Path(run.checkpoint.output_dir).parent / ".cache"


def cache_key(data: Data, tokenizer_path: Path | None, files: Sequence[DataFile], *other: Any) -> str:
    """The name of a cache entry, from versions, settings, and the path, size and time of change of each file."""
    versions = [FORMAT, ENCODING, version("tokenizers"), version("transformers"), version("jinja2")]
    stats = [(file.path, (found := os.stat(file.path)).st_size, found.st_mtime_ns) for file in files]
    return digest_of([versions, settings_of(data, tokenizer_path), stats, *other])


def settings_of(data: Data, tokenizer_path: Path | None) -> list[Any]:
    """The settings that decide which tokens and weights records become; tokenizer and template by content."""
    files = [] if tokenizer_path is None else tokenizer_files(tokenizer_path)
    return [
        data.format,
        data.text_column,
        data.append_eos,
        data.assistant_only_loss is not False,
        data.completion_only_loss is not False,
        None if data.chat_template is None else read_template(data.chat_template),
        [(file.name, hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()) for file in files],
    ]


def digest_of(value: Any) -> str:
    """24 hexadecimal digits of a value that JSON can hold."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


def _nothing_left(split: Split, meta: dict[str, Any]) -> DataError:
    notes, files = Notes.of(meta), ", ".join(meta["files"])
    read, empty, masked = (notes.count(kind) for kind in ("document", "empty", "masked"))
    if not masked:
        return DataError(f"data.{split}: all {read} documents are empty.", "", f"Files: {files}.")
    return DataError(
        f"data.{split}: none of {read} documents has a trained token ({masked} are masked throughout, {empty} are empty).",
        f"The first is {notes.totals(meta['files'])['masked', ''].first}.",
        "Check the roles and marks there, data.assistant_only_loss and data.completion_only_loss.",
    )

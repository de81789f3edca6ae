"""The documents of a run's split: found in the cache, or read and tokenised now."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from shardwright.config.schema import Data, RunFile
from shardwright.data.chat import read_template
from shardwright.data.files import DataFile, find_files, sources_of
from shardwright.data.formats import find_format, refuse_without_effect
from shardwright.data.table import FORMAT, Documents
from shardwright.data.tokenise import tokenizer_directory, tokenizer_files, write_documents
from shardwright.errors import ConfigError, DataError

Split = Literal["train", "validation"]
ENCODING = 2
"""Raised when the same records and settings give other tokens or weights than before."""


@dataclass(frozen=True)
class Read:
    """Tokenised documents. formats: of their files. sources: of each file, the number of the entry that named it."""

    documents: Documents
    formats: tuple[str, ...]
    sources: tuple[int, ...]
    tokenizer_path: Path | None
    cached: bool


def read_documents(run: RunFile, split: Split) -> Read | None:
    """The documents of `run`'s split; None when it names no files.

    Raises `ConfigError` or `DataError` with file and line where there is one, and when no document is left.
    """
    entries = run.data.train if split == "train" else run.data.validation
    if not entries:
        return None
    files = find_files(sources_of(entries), f"data.{split}")
    tokenizer_path, missing = find_tokenizer(run)
    path = cache_directory(run) / _key(files, tokenizer_path, run.data)
    cached = (path / "meta.json").is_file()
    documents = Documents.open(path) if cached else _tokenise(run, split, files, path, tokenizer_path, missing)
    formats = tuple(sorted({form for form in documents.meta["formats"] if form is not None}))
    if split == "train":
        refuse_without_effect(run.data, formats)
    if not documents.meta["documents"]:
        raise _nothing_left(split, documents.meta)
    return Read(documents, formats, tuple(file.source for file in files), tokenizer_path, cached)


def cache_directory(run: RunFile) -> Path:
    """data.cache_dir, or `.cache` beside output_dir, so that runs side by side share tokenised data."""
    return Path(run.data.cache_dir) if run.data.cache_dir else Path(run.checkpoint.output_dir).parent / ".cache"


def find_tokenizer(run: RunFile) -> tuple[Path | None, ConfigError | None]:
    """The directory of the run's tokenizer, or the error that there is none, which only text needs."""
    name, key = run.model.tokenizer_name_or_path, "model.tokenizer_name_or_path"
    if name is None:
        name, key = run.model.model_name_or_path, "model.model_name_or_path"
    try:
        return tokenizer_directory(name, key), None
    except ConfigError as error:
        return None, error


def _tokenise(
    run: RunFile,
    split: Split,
    files: Sequence[DataFile],
    path: Path,
    tokenizer_path: Path | None,
    missing: ConfigError | None,
) -> Documents:
    data = run.data
    formats = [find_format(file.path, data) for file in files]
    known = sorted({form for form in formats if form is not None})
    if split == "train" and known:
        refuse_without_effect(data, known)
    if missing is not None and known != ["tokens"]:
        raise missing
    processes = data.num_proc or os.cpu_count() or 1
    return write_documents(path, files, formats, tokenizer_path, data, num_proc=processes, split=split)


def _key(files: Sequence[DataFile], tokenizer_path: Path | None, data: Data) -> str:
    """Name of the cache entry: files by path, size, mtime; tokenizer and template by content; settings; versions."""
    versions = [FORMAT, ENCODING, version("tokenizers"), version("transformers"), version("jinja2")]
    return f"tokens-{digest_of([versions, settings_of(data, tokenizer_path), stats_of(files)])}"


def stats_of(files: Sequence[DataFile]) -> list[tuple[str, int, int]]:
    """(path, size, time of change) of each file."""
    return [(file.path, (found := os.stat(file.path)).st_size, found.st_mtime_ns) for file in files]


def settings_of(data: Data, tokenizer_path: Path | None) -> list[Any]:
    """What beside records decides which tokens and weights they become; tokenizer and template by content."""
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
    counts, files = meta["counts"], ", ".join(meta["files"])
    empty, masked = counts.get("empty", 0), counts.get("masked", 0)
    if not masked:
        return DataError(f"data.{split}: all {counts['read']} documents are empty.", "", f"Files: {files}.")
    return DataError(
        f"data.{split}: none of {counts['read']} documents has a token that is trained ({masked} are masked "
        f"throughout, {empty} are empty).",
        f"The first is {meta['first']['masked']}.",
        "Look at the roles and marks there, at data.assistant_only_loss and at data.completion_only_loss.",
    )

"""`prepare`: where a run's text becomes a table of rows. One process does it; the others find it done."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwright.config.schema import Data, RunFile
from shardwright.data.chat import read_template
from shardwright.data.formats import find_format, refuse_without_effect
from shardwright.data.sources import DataFile, find_files, sources_of
from shardwright.data.table import FORMAT, Documents, Overlong, Table
from shardwright.data.tokenise import tokenizer_directory, tokenizer_files, write_documents
from shardwright.errors import ConfigError, DataError

Split = Literal["train", "validation"]
ENCODING = 1
"""Raised when the same records and settings give other tokens or weights than before."""


@dataclass(frozen=True)
class Prepared:
    """A split as rows.

    path: the documents' directory. fingerprint: of the rows' tokens, the same wherever training is the same.
    pad_id: fills up rows; no position after it is a target. largest_token_id: below the model's vocabulary.
    counts: documents_read, empty_documents, masked_documents, crossing_tokens, documents, tokens, and those of
    `table.cut_rows`. formats: of its files. cached: nothing had to be tokenised. notices: what a person should know,
    one line each.
    """

    split: Split
    path: Path
    table: Table
    fingerprint: str
    pad_id: int
    largest_token_id: int
    counts: dict[str, int]
    formats: tuple[str, ...]
    cached: bool
    notices: tuple[str, ...]

    def summary(self) -> str:
        """`train: 40 documents of text, 3,155 tokens -> 58 rows of 96, 3,096 targets, padding 43% (cached)`."""
        counts, length = self.counts, self.table.max_length
        padding = 1 - counts["row_tokens"] / (counts["rows"] * length)
        return (
            f"{self.split}: {counts['documents']:,} documents of {' and '.join(self.formats)}, {counts['tokens']:,} tokens -> "
            f"{counts['rows']:,} rows of {length}, {counts['targets']:,} targets, "
            f"padding {padding:.0%}{' (cached)' if self.cached else ''}"
        )


def prepare(run: RunFile, split: Split = "train") -> Prepared | None:
    """The rows of `run`'s split, tokenised now or found in the cache; None when the split names no files.

    Call it in the parent before ranks start, or on rank 0 before the others: a second call, in any process,
    only maps the result. Raises `ConfigError` or `DataError` with file and line where there is one.
    """
    data = run.data
    patterns = data.train if split == "train" else data.validation
    if not patterns:
        return None
    sources = sources_of(patterns)
    files = find_files(sources, f"data.{split}")
    tokenizer_path, missing = _tokenizer(run)
    path = cache_directory(run) / _key(files, tokenizer_path, data)
    cached = (path / "meta.json").is_file()
    documents = (
        Documents.open(path) if cached else _tokenise(run, split, files, path, tokenizer_path, missing)
    )
    meta = documents.meta
    formats = sorted({form for form in meta["formats"] if form is not None})
    if split == "train":
        refuse_without_effect(data, formats)
    if not meta["documents"]:
        raise _nothing_left(split, meta)
    _check_vocabulary(run, tokenizer_path, meta)
    overlong = _overlong(data, documents, formats)
    table = Table.make(documents, data.max_length, overlong)
    counts = {
        "documents_read": meta["counts"]["read"],
        "empty_documents": meta["counts"].get("empty", 0),
        "masked_documents": meta["counts"].get("masked", 0),
        "crossing_tokens": meta["counts"].get("crossing", 0),
        "documents": meta["documents"],
        "tokens": meta["tokens"],
        **table.counts,
    }
    pad_id = next(i for i in (meta["pad_id"], meta["eos_id"], 0) if i is not None)
    return Prepared(
        split=split,
        path=path,
        table=table,
        fingerprint=table.fingerprint,
        pad_id=pad_id if pad_id < _vocabulary(run, pad_id + 1) else 0,
        largest_token_id=meta["largest_token_id"],
        counts=counts,
        formats=tuple(formats),
        cached=cached,
        notices=tuple(_notices(run, split, tokenizer_path, meta, counts)),
    )


def cache_directory(run: RunFile) -> Path:
    """data.cache_dir, or `.cache` beside output_dir, so that runs side by side share tokenised data."""
    return (
        Path(run.data.cache_dir) if run.data.cache_dir else Path(run.checkpoint.output_dir).parent / ".cache"
    )


def _tokenizer(run: RunFile) -> tuple[Path | None, ConfigError | None]:
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


def _overlong(data: Data, documents: Documents, formats: Sequence[str]) -> Overlong:
    """data.overlong, or what its default is for these formats."""
    if data.overlong is not None:
        return data.overlong
    cut = {"split" if form in ("text", "tokens") else "truncate" for form in formats}
    longest = int(np.diff(np.asarray(documents.ends[:, 0]), prepend=0).max())
    if len(cut) > 1 and longest > data.max_length:
        raise ConfigError(
            f"data.overlong is not set, and {' and '.join(formats)} have no common default.",
            f"The longest document has {longest} tokens, and data.max_length is {data.max_length}.",
            "Set data.overlong to split, truncate or error.",
        )
    return "split" if "split" in cut else "truncate"


def _key(files: Sequence[DataFile], tokenizer_path: Path | None, data: Data) -> str:
    """Name of the cache entry: files by path, size, mtime; tokenizer and template by content; settings; versions."""
    digest = hashlib.blake2b(digest_size=12)
    stats = [(file.path, (found := os.stat(file.path)).st_size, found.st_mtime_ns) for file in files]
    template = None if data.chat_template is None else read_template(data.chat_template)
    settings = [
        data.format,
        data.text_column,
        data.append_eos,
        data.assistant_only_loss is not False,
        data.completion_only_loss is not False,
        template,
    ]
    versions = [FORMAT, ENCODING, version("tokenizers"), version("transformers"), version("jinja2")]
    digest.update(json.dumps([versions, settings, stats]).encode())
    for file in [] if tokenizer_path is None else tokenizer_files(tokenizer_path):
        digest.update(file.name.encode() + hashlib.blake2b(file.read_bytes()).digest())
    return f"tokens-{digest.hexdigest()}"


def _vocabulary(run: RunFile, default: int) -> int:
    """vocab_size of the model's config.json with its overrides; `default` where there is none to read."""
    path = Path(run.model.model_name_or_path) / "config.json"
    if not path.is_file():
        return default
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) | run.model.config_overrides
    text = config.get("text_config", config)
    return int(config.get("vocab_size", text.get("vocab_size", default)))


def _check_vocabulary(run: RunFile, tokenizer_path: Path | None, meta: dict[str, Any]) -> None:
    largest = meta["largest_token_id"]
    vocabulary = _vocabulary(run, largest + 1)
    if largest >= vocabulary:
        raise ConfigError(
            f"The data holds token id {largest}, but the model's vocab_size is {vocabulary}.",
            f"The tokenizer in {tokenizer_path} has {meta['vocabulary']} tokens."
            if tokenizer_path is not None
            else "The data was tokenised for another model.",
            "Use the model's own tokenizer, or for a new model set model.config_overrides to "
            f"{{vocab_size: {max(largest + 1, meta['vocabulary'] or 0)}}}.",
        )


def _notices(
    run: RunFile, split: str, tokenizer_path: Path | None, meta: dict[str, Any], counts: dict[str, int]
) -> list[str]:
    """Lines for what was left out, cut or has no effect."""
    length, read, documents = run.data.max_length, counts["documents_read"], counts["documents"]
    lines = []
    reads_eos = {"text", "prompt_completion"} & set(meta["formats"])
    if run.data.append_eos and meta["eos_id"] is None and reads_eos:
        lines.append(f"the tokenizer in {tokenizer_path} has no eos token: data.append_eos has no effect")
    if counts["empty_documents"]:
        lines.append(f"{counts['empty_documents']} of {read} documents are empty and left out")
    if counts["masked_documents"]:
        lines.append(
            f"{counts['masked_documents']} of {read} documents have no token that is trained and are left out; "
            f"the first is {meta['first']['masked']}"
        )
    if counts["crossing_tokens"]:
        lines.append(
            f"in {counts['crossing_tokens']} of {read} documents a token holds characters of what is given and of "
            f"what is trained, and is trained; the first is {meta['first']['crossing']}"
        )
    if counts["split_documents"]:
        lines.append(
            f"{counts['split_documents']} of {documents} documents are longer than {length} tokens and split"
        )
    if counts["truncated_documents"]:
        lines.append(
            f"{counts['truncated_documents']} of {documents} documents are longer than {length} tokens and "
            f"cut off; {counts['truncated_tokens']} of {counts['tokens']} tokens are lost"
        )
    if counts["targetless_rows"]:
        lines.append(f"{counts['targetless_rows']} rows of a single token hold no target and are left out")
    return [f"{split}: {line}" for line in lines]

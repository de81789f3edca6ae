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

from shardwright.config.schema import RunFile
from shardwright.data.rows import Cut
from shardwright.data.sources import find_files
from shardwright.data.table import FORMAT, Documents, Table
from shardwright.data.tokenise import tokenizer_directory, tokenizer_files, write_documents
from shardwright.errors import ConfigError, DataError

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Prepared:
    """A split as rows.

    path: the documents' directory. fingerprint: of the rows' tokens, the same wherever training is the same.
    pad_id: fills up rows; no position after it is a target. largest_token_id: below the model's vocabulary.
    counts: documents_read, empty_documents, documents, tokens, and those of `table.cut_rows`.
    cached: nothing had to be tokenised. notices: what a person should know, one line each.
    """

    split: Split
    path: Path
    table: Table
    fingerprint: str
    pad_id: int
    largest_token_id: int
    counts: dict[str, int]
    cached: bool
    notices: tuple[str, ...]

    def summary(self) -> str:
        """`train: 40 documents, 3,155 tokens -> 58 rows of 96, 3,096 targets, padding 43% (cached)`.

        Rows that may hold several documents are `packed rows`; the padding of whole rows of max_length is said of all.
        """
        counts, length = self.counts, self.table.max_length
        padding = f"{self.padding:.0%}" if self.padding >= 0.1 else f"{self.padding:.2%}"
        return (
            f"{self.split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens -> "
            f"{counts['rows']:,} {'packed ' if self.table.packed else ''}rows of {length}, "
            f"{counts['targets']:,} targets, padding {padding}{' (cached)' if self.cached else ''}"
        )

    @property
    def padding(self) -> float:
        """Padding among the slots of rows that are all max_length wide."""
        return 1 - self.counts["row_tokens"] / (self.counts["rows"] * self.table.max_length)


def prepare(run: RunFile, split: Split = "train") -> Prepared | None:
    """The rows of `run`'s split, tokenised now or found in the cache; None when the split names no files.

    Call it in the parent before ranks start, or on rank 0 before the others: a second call, in any process,
    only maps the result. Raises `ConfigError` or `DataError` with file and line where there is one.
    """
    data = run.data
    patterns = data.train if split == "train" else data.validation
    if not patterns:
        return None
    name, key = run.model.tokenizer_name_or_path, "model.tokenizer_name_or_path"
    if name is None:
        name, key = run.model.model_name_or_path, "model.model_name_or_path"
    tokenizer_path = tokenizer_directory(name, key)
    files = find_files(patterns, f"data.{split}")
    path = cache_directory(run) / _key(files, tokenizer_path, data.text_column, data.append_eos)
    cached = (path / "meta.json").is_file()
    if cached:
        documents = Documents.open(path)
    else:
        documents = write_documents(
            path,
            files,
            tokenizer_path,
            text_column=data.text_column,
            append_eos=data.append_eos,
            num_proc=data.num_proc or os.cpu_count() or 1,
            split=split,
        )
    meta = documents.meta
    if not meta["documents"]:
        raise DataError(
            f"data.{split}: all {meta['documents_read']} documents are empty.",
            "",
            f"Files: {', '.join(patterns)}.",
        )
    _check_vocabulary(run, tokenizer_path, meta)
    table = Table.make(documents, _cut(run, split))
    counts = {
        "documents_read": meta["documents_read"],
        "empty_documents": meta["documents_read"] - meta["documents"],
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
        cached=cached,
        notices=tuple(_notices(run, split, tokenizer_path, meta, counts)),
    )


def _cut(run: RunFile, split: Split) -> Cut:
    """How `run` makes rows; the rows of the validation split do not depend on the seed."""
    data, packing = run.data, run.data.packing_strategy if run.data.batching == "pack" else None
    seed = run.training.seed if packing and data.shuffle and split == "train" else None
    return Cut(data.max_length, data.overlong, packing, seed)


def cache_directory(run: RunFile) -> Path:
    """data.cache_dir, or `.cache` beside output_dir, so that runs side by side share tokenised data."""
    return (
        Path(run.data.cache_dir) if run.data.cache_dir else Path(run.checkpoint.output_dir).parent / ".cache"
    )


def _key(files: Sequence[Path], tokenizer_path: Path, text_column: str, append_eos: bool) -> str:
    """Name of the cache entry: files by path, size, mtime; tokenizer by content; settings; versions."""
    digest = hashlib.blake2b(digest_size=12)
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest.update(json.dumps([FORMAT, version("tokenizers"), text_column, append_eos, stats]).encode())
    for file in tokenizer_files(tokenizer_path):
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


def _check_vocabulary(run: RunFile, tokenizer_path: Path, meta: dict[str, Any]) -> None:
    largest = meta["largest_token_id"]
    vocabulary = _vocabulary(run, largest + 1)
    if largest >= vocabulary:
        raise ConfigError(
            f"The data holds token id {largest}, but the model's vocab_size is {vocabulary}.",
            f"The tokenizer in {tokenizer_path} has {meta['vocabulary']} tokens.",
            "Use the model's own tokenizer, or for a new model set model.config_overrides to "
            f"{{vocab_size: {meta['vocabulary']}}}.",
        )


def _notices(
    run: RunFile, split: str, tokenizer_path: Path, meta: dict[str, Any], counts: dict[str, int]
) -> list[str]:
    """Lines for what was left out, cut or has no effect."""
    length, read, documents = run.data.max_length, counts["documents_read"], counts["documents"]
    lines = []
    if run.data.append_eos and meta["eos_id"] is None:
        lines.append(f"the tokenizer in {tokenizer_path} has no eos token: data.append_eos has no effect")
    if counts["empty_documents"]:
        lines.append(f"{counts['empty_documents']} of {read} documents are empty and left out")
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
        lines.append(f"{counts['targetless_rows']} pieces of documents hold no target and are left out")
    full = -(-counts["row_tokens"] // length)
    if run.data.batching == "pad" and counts["rows"] > 2 * full:
        lines.append(
            f"more than half of the slots are padding; with data.batching pack about {full:,} rows hold what these "
            f"{counts['rows']:,} do, with bucket they are no wider than the longest beside them"
        )
    return [f"{split}: {line}" for line in lines]

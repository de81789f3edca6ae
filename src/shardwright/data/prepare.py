"""`prepare`: where a run's text becomes a table of rows. One process does it; the others find it done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.schema import Data, RunFile
from shardwright.data.files import sources_of
from shardwright.data.formats import refuse_without_effect
from shardwright.data.mixture import Mixture
from shardwright.data.notices import notices
from shardwright.data.read import Read, Split, read_documents
from shardwright.data.rows import Cut, Overlong, PackingStrategy
from shardwright.data.streaming.stream import Place, Stream
from shardwright.data.streaming.windows import Windows
from shardwright.data.table import Table
from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Prepared:
    """A split as rows.

    path: the documents' directory. fingerprint: of the rows' tokens, the same wherever training is the same.
    pad_id: fills up rows; no position after it is a target. largest_token_id: below the model's vocabulary.
    tokenizer_path: its directory; None: the data was tokenised already. counts: documents_read, empty_documents,
    masked_documents, crossing_tokens, documents, tokens, and those of `rows.cut_rows`. formats: of its files. mixture: the
    rows of an epoch where sources have weights. cached: nothing had to be tokenised. notices: what a person should know,
    one line each.
    """

    split: Split
    path: Path
    table: Table
    fingerprint: str
    pad_id: int
    largest_token_id: int
    tokenizer_path: Path | None
    counts: dict[str, int]
    formats: tuple[str, ...]
    mixture: Mixture | None
    cached: bool
    notices: tuple[str, ...]

    def summary(self) -> str:
        """`train: 40 documents of text, 3,155 tokens -> 58 rows of 96, 3,096 targets, padding 43% (cached)`.

        Rows that may hold several documents are `packed rows`; the padding of whole rows of max_length is said of all.
        """
        counts, length = self.counts, self.table.max_length
        padding = f"{self.padding:.0%}" if self.padding >= 0.1 else f"{self.padding:.2%}"
        return (
            f"{self.split}: {counts['documents']:,} documents of {' and '.join(self.formats)}, {counts['tokens']:,} tokens -> "
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
    streamed = split == "train" and run.data.streaming
    read = _first_window(run) if streamed else read_documents(run, split)
    if read is None:
        return None
    documents, meta = read.documents, read.documents.meta
    check_vocabulary(run, read.tokenizer_path, meta)
    table = Table.make(documents, _cut(run, split, read))
    mixture = _mixture(run, split, table)
    counts = {
        "documents_read": meta["counts"]["read"],
        "empty_documents": meta["counts"].get("empty", 0),
        "masked_documents": meta["counts"].get("masked", 0),
        "crossing_tokens": meta["counts"].get("crossing", 0),
        "documents": meta["documents"],
        "tokens": meta["tokens"],
        **table.counts,
    }
    return Prepared(
        split=split,
        path=documents.path,
        table=table,
        fingerprint=table.fingerprint if mixture is None else mixture.fingerprint(table.fingerprint),
        pad_id=pad_of(run, meta),
        largest_token_id=meta["largest_token_id"],
        tokenizer_path=read.tokenizer_path,
        counts=counts,
        formats=read.formats,
        mixture=mixture,
        cached=read.cached,
        notices=(
            *([_STREAMED] if streamed else ()),
            *notices(run, split, read.tokenizer_path, meta, counts),
            *(() if mixture is None else _mixture_notice(run, mixture)),
        ),
    )


_STREAMED = "train: read as a stream; what is said of it is so of its first window"


def open_windows(run: RunFile) -> Windows:
    """The stream that data.train is, in windows of documents. Raises `ConfigError` or `DataError` as `Windows` does."""
    stream = Stream(run.data)
    formats = sorted({form for form in stream.formats if form is not None})
    refuse_without_effect(run.data, formats)
    overlong, defaults = run.data.overlong, _overlong_of(formats)
    if overlong is None and len(defaults) > 1:
        raise ConfigError(
            f"data.overlong is not set, and {' and '.join(formats)} have no common default.",
            "How long the documents of a stream are is not known before.",
            "Set data.overlong to split, truncate or error.",
        )
    overlong = overlong or ("truncate" if "truncate" in defaults else "split")
    return Windows(run, stream, Cut(run.data.max_length, overlong, *packing_of(run, "train")))


def _first_window(run: RunFile) -> Read:
    windows = open_windows(run)
    documents = windows.open(0, Place()).table.documents
    windows.close()
    formats = tuple(sorted(set(documents.meta["formats"])))
    return Read(documents, formats, (), windows.tokenizer_path, False)


def pad_of(run: RunFile, special: dict[str, Any]) -> int:
    """What fills up rows: the padding token, else the end token, else 0; a token of the model's vocabulary."""
    pad_id = next(i for i in (special["pad_id"], special["eos_id"], 0) if i is not None)
    return pad_id if pad_id < _vocabulary(run, pad_id + 1) else 0


def _weights(run: RunFile, split: Split) -> list[float] | None:
    """The weight of each source; None where all are 1."""
    weights = [source.weight for source in sources_of(run.data.train if split == "train" else run.data.validation)]
    if split == "validation" and set(weights) != {1.0}:
        raise ConfigError("A weight in data.validation has no effect.", "Each row is evaluated once.", "Remove it.")
    return None if set(weights) == {1.0} else weights


def _mixture(run: RunFile, split: Split, table: Table) -> Mixture | None:
    weights = _weights(run, split)
    return None if weights is None else Mixture(table.bounds, weights, run.training.seed)


def _mixture_notice(run: RunFile, mixture: Mixture) -> list[str]:
    parts = ", ".join(
        f"{count:,} of {size:,} of {source.path}"
        for source, count, size in zip(
            sources_of(run.data.train), mixture.counts.tolist(), np.diff(mixture.bounds).tolist()
        )
    )
    return [f"train: the weights of the sources make epochs of {len(mixture):,} rows: {parts}"]


def packing_of(run: RunFile, split: Split) -> tuple[PackingStrategy | None, int | None]:
    """(which documents share a row, the seed that shuffles them first); rows of the validation split need no seed."""
    packing = run.data.packing_strategy if run.data.batching == "pack" else None
    return packing, run.training.seed if packing and run.data.shuffle and split == "train" else None


def _cut(run: RunFile, split: Split, read: Read) -> Cut:
    """How `run` makes rows."""
    bounds = None
    if _weights(run, split) is not None:  # rows of one source each, so that a source can be passed more often
        files = np.asarray(read.sources)[np.asarray(read.documents.ends[:, 1])]
        bounds = tuple(np.searchsorted(files, np.arange(max(read.sources) + 2)).tolist())
    return Cut(run.data.max_length, _overlong(run.data, read), *packing_of(run, split), bounds)


def _overlong(data: Data, read: Read) -> Overlong:
    """data.overlong, or what its default is for the formats that were read."""
    if data.overlong is not None:
        return data.overlong
    cut = _overlong_of(read.formats)
    longest = int(np.diff(np.asarray(read.documents.ends[:, 0]), prepend=0).max())
    if len(cut) > 1 and longest > data.max_length:
        raise ConfigError(
            f"data.overlong is not set, and {' and '.join(read.formats)} have no common default.",
            f"The longest document has {longest} tokens, and data.max_length is {data.max_length}.",
            "Set data.overlong to split, truncate or error.",
        )
    return "split" if "split" in cut else "truncate"


def _overlong_of(formats: Sequence[str]) -> set[Overlong]:
    """The defaults of data.overlong for these formats."""
    return {"split" if form in ("text", "tokens") else "truncate" for form in formats}


def _vocabulary(run: RunFile, default: int) -> int:
    """vocab_size of the model's config.json with its overrides; `default` where there is none to read."""
    path = Path(run.model.model_name_or_path) / "config.json"
    if not path.is_file():
        return default
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for values in (run.model.config_overrides, config):
        for part in (values.get("text_config"), values):
            if part and "vocab_size" in part:
                return int(part["vocab_size"])
    return default


def check_vocabulary(run: RunFile, tokenizer_path: Path | None, meta: dict[str, Any]) -> None:
    """Raises `ConfigError` where the documents of `meta` hold a token that the model does not have."""
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

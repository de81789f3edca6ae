"""From a run file to rows and their order. `prepare` makes the rows in one process; other processes map the result.

Torch is not needed here, so that a run whose rows are in the cache is checked before torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.schema import RunFile
from shardwright.data.arrays import Int64
from shardwright.data.documents import Documents
from shardwright.data.files import sources_of
from shardwright.data.formats import FORMATS, refuse_without_effect
from shardwright.data.mixture import Mixture
from shardwright.data.notices import Notes, notices
from shardwright.data.order import RowOrder
from shardwright.data.packing import Overlong, PackingStrategy, RowRules
from shardwright.data.streaming.record_stream import RecordStream, StreamPosition
from shardwright.data.streaming.rows import StreamOrder, StreamTable
from shardwright.data.streaming.windows import StreamWindows
from shardwright.data.table import Table
from shardwright.data.tokenise import Split, TokenisedSplit, read_documents
from shardwright.errors import ConfigError

_STREAMING = "train: while streaming, these statistics cover the first window only"


@dataclass(frozen=True)
class Prepared:
    """A split as rows."""

    split: Split
    table: Table
    fingerprint: str  # of the rows' tokens: the same wherever training is the same
    pad_id: int  # fills up rows; no position after a padding token is a target
    tokenizer_path: Path | None  # its directory; None: the records were tokens already
    counts: dict[str, int]  # of documents (documents_read, empty_documents, ...) and of rows (`packing.RowRanges`)
    mixture: Mixture | None  # the rows of an epoch, where sources have weights
    cached: bool  # nothing had to be tokenised
    notices: tuple[str, ...]  # lines to print before training

    @property
    def formats(self) -> list[str]:
        """The formats of the files."""
        return list(self.table.documents.meta["formats"])

    @property
    def padding(self) -> float:
        """The fraction of padding in rows that are all max_length wide."""
        return 1 - self.counts["row_tokens"] / (self.counts["rows"] * self.table.max_length)

    def summary(self) -> str:
        """`train: 40 documents of text, 3,155 tokens -> 58 rows of 96, 3,096 targets, padding 43% (cached)`.

        `packed rows` may hold several documents. The padding is that of rows that are all max_length wide.
        """
        counts = self.counts
        padding = f"{self.padding:.0%}" if self.padding >= 0.1 else f"{self.padding:.2%}"
        return (
            f"{self.split}: {counts['documents']:,} documents of {' and '.join(self.formats)}, {counts['tokens']:,} tokens -> "
            f"{counts['rows']:,} {'packed ' if self.table.packed else ''}rows of {self.table.max_length}, "
            f"{counts['targets']:,} targets, padding {padding}{' (cached)' if self.cached else ''}"
        )


@dataclass(frozen=True)
class Updates:
    """The rows of a run, and which rows each update trains on."""

    rows: Table | StreamTable
    order: RowOrder
    pad_id: int
    fingerprint: str  # of the rows, or of a stream's settings


def prepare(run: RunFile, split: Split = "train") -> Prepared | None:
    """The rows of `run`'s split, tokenised now or found in the cache; None when the split names no files.

    Call it in the parent before ranks start, or on rank 0 before the others: a second call, in any process, only maps the
    result. Raises `ConfigError` or `DataError`, with file and line where there is one.
    """
    streamed = split == "train" and run.data.streaming
    read = _first_window(run) if streamed else read_documents(run, split)
    if read is None:
        return None
    meta = read.documents.meta
    check_vocabulary(run, read.tokenizer_path, meta)
    table = Table.make(read.documents, _row_rules(run, split, read))
    weights = _weights(run, split)
    mixture = None if weights is None else Mixture(table.bounds, weights, run.training.seed)
    noted = Notes.of(meta)
    counts = {
        "documents_read": noted.count("document"),
        "empty_documents": noted.count("empty"),
        "masked_documents": noted.count("masked"),
        "crossing_tokens": noted.count("crossing"),
        "documents": meta["documents"],
        "tokens": meta["tokens"],
        **table.counts,
    }
    return Prepared(
        split=split,
        table=table,
        fingerprint=table.fingerprint if mixture is None else mixture.fingerprint(table.fingerprint),
        pad_id=_pad_id(run, meta),
        tokenizer_path=read.tokenizer_path,
        counts=counts,
        mixture=mixture,
        cached=read.cached,
        notices=(
            *([_STREAMING] if streamed else ()),
            *notices(run, split, read.tokenizer_path, meta, counts),
            *(() if mixture is None else [_mixture_notice(run, mixture)]),
        ),
    )


def open_updates(run: RunFile) -> Updates:
    """The rows of data.train and their order: rows on disk, found or made now, or a stream."""
    if not run.data.streaming:
        train = prepare(run)
        assert train is not None, "data.train names at least one file"
        return Updates(train.table, make_order(run, train), train.pad_id, train.fingerprint)
    windows, t = _open_windows(run), run.training

    def check(documents: Documents) -> None:
        check_vocabulary(run, windows.tokenizer_path, documents.meta)

    assert t.max_steps is not None, "a stream without max_steps is refused before"
    rows = StreamTable(windows, t.seed if run.data.shuffle else None, check)
    order = StreamOrder(rows, global_batch_size=t.global_batch_size, max_steps=t.max_steps)
    return Updates(rows, order, _pad_id(run, windows.special_ids()), windows.fingerprint)


def make_order(run: RunFile, train: Prepared) -> RowOrder:
    """Which rows each update of this run trains on."""
    return order_over(run, len(train.table), train.table.real_tokens, train.mixture)


def order_over(run: RunFile, rows: int, real_tokens: Callable[[Int64], Int64], mixture: Mixture | None) -> RowOrder:
    """The order of this run over any `rows` rows; `real_tokens` gives the tokens of some of these rows."""
    t, data = run.training, run.data
    return RowOrder(
        rows,
        global_batch_size=t.global_batch_size,
        seed=t.seed,
        shuffle=data.shuffle,
        max_steps=t.max_steps,
        num_train_epochs=t.num_train_epochs,
        drop_last=data.drop_last,
        bucket_updates=data.bucket_updates,
        mixture=mixture,
        lengths=real_tokens,
    )


def _open_windows(run: RunFile) -> StreamWindows:
    """The stream data.train in windows of documents."""
    stream = RecordStream(run.data)
    formats = sorted({form for form in stream.formats if form is not None})
    refuse_without_effect(run.data, formats)
    overlong, defaults = run.data.overlong, _overlong_of(formats)
    if overlong is None and len(defaults) > 1:
        raise _no_common_default(formats, "The lengths of the documents of a stream are not known in advance.")
    overlong = overlong or ("truncate" if "truncate" in defaults else "split")
    return StreamWindows(run, stream, RowRules(run.data.max_length, overlong, *packing_of(run, "train")))


def _first_window(run: RunFile) -> TokenisedSplit:
    windows = _open_windows(run)
    documents = windows.open(0, StreamPosition(), 0).table.documents
    windows.close()
    return TokenisedSplit(documents, (), windows.tokenizer_path, False)


def _weights(run: RunFile, split: Split) -> list[float] | None:
    """The weight of each source; None where all are 1."""
    weights = [source.weight for source in sources_of(run.data.train if split == "train" else run.data.validation)]
    if split == "validation" and set(weights) != {1.0}:
        why = "Each row is evaluated once."
        raise ConfigError("A weight in data.validation has no effect.", why, "Remove the weight.")
    return None if set(weights) == {1.0} else weights


def _mixture_notice(run: RunFile, mixture: Mixture) -> str:
    sizes = zip(sources_of(run.data.train), mixture.counts.tolist(), np.diff(mixture.bounds).tolist())
    parts = ", ".join(f"{count:,} of {size:,} of {source.path}" for source, count, size in sizes)
    return f"train: the weights of the sources make epochs of {len(mixture):,} rows: {parts}"


def packing_of(run: RunFile, split: Split) -> tuple[PackingStrategy | None, int | None]:
    """(which documents share a row, the seed that shuffles documents first); validation rows are not shuffled."""
    packing = run.data.packing_strategy if run.data.batching == "pack" else None
    return packing, run.training.seed if packing and run.data.shuffle and split == "train" else None


def _row_rules(run: RunFile, split: Split, read: TokenisedSplit) -> RowRules:
    """How `run` makes rows."""
    bounds = None
    if _weights(run, split) is not None:  # each row holds one source, so that a source can be passed more often
        files = np.asarray(read.sources)[np.asarray(read.documents.ends[:, 1])]
        bounds = tuple(np.searchsorted(files, np.arange(max(read.sources) + 2)).tolist())
    overlong, formats = run.data.overlong, read.documents.meta["formats"]
    if overlong is None:
        defaults, longest = _overlong_of(formats), int(read.documents.lengths.max())
        if len(defaults) > 1 and longest > run.data.max_length:
            why = f"The longest document has {longest} tokens, and data.max_length is {run.data.max_length}."
            raise _no_common_default(formats, why)
        overlong = "split" if "split" in defaults else "truncate"
    return RowRules(run.data.max_length, overlong, *packing_of(run, split), bounds)


def _overlong_of(formats: Iterable[str]) -> set[Overlong]:
    """The defaults of data.overlong for these formats."""
    return {FORMATS[form].overlong for form in formats}


def _no_common_default(formats: Iterable[str], why: str) -> ConfigError:
    what = f"data.overlong is not set, and {' and '.join(formats)} have no common default."
    return ConfigError(what, why, "Set data.overlong to split, truncate or error.")


def _pad_id(run: RunFile, special: dict[str, Any]) -> int:
    """The id that fills up rows: the padding token, else the end token, else 0; an id of the model's vocabulary."""
    pad_id = next(i for i in (special["pad_id"], special["eos_id"], 0) if i is not None)
    return pad_id if pad_id < _vocabulary(run, pad_id + 1) else 0


def _vocabulary(run: RunFile, default: int) -> int:
    """vocab_size of the model's config.json with its overrides; `default` where there is no such file or key."""
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

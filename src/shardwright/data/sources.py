"""From files, globs and data set directories to records, each with the file and line it came from.

.jsonl, .json  JSON Lines: one object per line; blank lines are passed over
.txt           one document per line, as in Hugging Face's `text` data sets; use JSONL for longer ones
.parquet       one record per row; the row's number, from 1, stands for the line
.arrow         the same, in a directory that `datasets.Dataset.save_to_disk` wrote
A directory means the files of these kinds in it, or the data set saved there; of a saved DatasetDict one split.
Files are taken in the order of the patterns, and sorted within one.

A file is read in slices, so that several processes can read one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from typing import Any

from shardwright.config.schema import Source
from shardwright.errors import DataError, did_you_mean

KINDS = (".jsonl", ".json", ".txt", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")
Record = dict[str, Any]
_SLICE_BYTES = 1 << 18
_SLICE_ROWS = 1000
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class DataFile:
    """One file, and the number of the entry of data.train (or data.validation) that named it."""

    path: str
    source: int


@dataclass(frozen=True)
class Slice:
    """Records of one file: `length` bytes of lines from `start` on, the rows in `table`, an arrow stream, or `rows`.

    file: its number. first_line: line (or row) of the first record, from 1. size: lines (or rows).
    """

    file: int
    path: str
    first_line: int
    start: int = 0
    length: int = 0
    table: bytes | None = None
    rows: tuple[Record, ...] | None = None
    size: int = 0


def sources_of(entries: Sequence[str | Source]) -> list[Source]:
    """The entries of data.train or data.validation, each as a `Source`."""
    return [Source(path=entry) if isinstance(entry, str) else entry for entry in entries]


def find_files(sources: Sequence[Source], key: str) -> list[DataFile]:
    """The files of `sources`. `key` is where they stand in the run file: data.train or data.validation.

    Raises `DataError` for a pattern without files, a file of another kind, a file that two patterns name, and a
    split that is not there.
    """
    found: dict[Path, DataFile] = {}
    for number, source in enumerate(sources):
        files = _expand(source, key)
        if not files:
            is_directory = Path(source.path).is_dir()
            what = "is a directory without data files" if is_directory else "names no file"
            raise DataError(
                f"{key}: `{source.path}` {what}.", f"Read from {Path.cwd()}.", f"Kinds: {', '.join(KINDS)}."
            )
        for file in files:
            if file.suffix not in KINDS:
                raise DataError(f"{key}: {file} is of no known kind.", "", f"Kinds: {', '.join(KINDS)}.")
            if file.resolve() in found:
                other = sources[found[file.resolve()].source].path
                raise DataError(
                    f"{key}: {file} is named by `{other}` and by `{source.path}`.",
                    "Its documents would count twice.",
                    "Narrow one of the patterns; `weight` says how often a source is passed.",
                )
            found[file.resolve()] = DataFile(str(file.resolve()), number)
    return list(found.values())


def _expand(source: Source, key: str) -> list[Path]:
    path = Path(source.path)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        split = source.split or key.removeprefix("data.")
        if split not in splits:
            raise DataError(
                f"{key}: {path} has no split `{split}`.",
                f"It has: {', '.join(splits)}.",
                f"Write {{path: {path}, split: {splits[0]}}}.",
            )
        path /= split
    elif source.split is not None:
        raise DataError(
            f"{key}: `split: {source.split}` has no effect.",
            f"{path} is no saved DatasetDict.",
            "Remove it, or name the directory that save_to_disk wrote.",
        )
    if (path / "state.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / file["filename"] for file in state["_data_files"]]
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in KINDS)
    if has_magic(source.path):
        return sorted(Path(name) for name in glob(source.path, recursive=True) if Path(name).is_file())
    return [path] if path.is_file() else []


def columns(path: str) -> list[str] | None:
    """The columns of a file's first record; None for a file of plain lines, and empty for one without records."""
    suffix = Path(path).suffix
    if suffix == ".txt":
        return None
    if suffix == ".parquet":
        return list(_parquet(path).schema_arrow.names)
    if suffix == ".arrow":
        return list(_arrow(path).schema.names)
    first = next((record for part in slices(0, path) for _, record in records(part)), None)
    return [] if first is None else list(first)


def slices(
    file: int, path: str, keep: frozenset[str] | None = None, *, byte: int = 0, line: int = 1
) -> Iterator[Slice]:
    """The slices of a file in order. keep: the only columns that are wanted of a table.

    byte, line: where to begin, the end of one of its slices; of a table its row, `line`, suffices.
    """
    if Path(path).suffix not in TABLES:
        yield from _line_slices(file, path, byte, line)
        return
    for batch in _batches(path, keep, line - 1):
        yield Slice(file, path, line, table=_to_stream(batch), size=batch.num_rows)
        line += batch.num_rows


def _batches(path: str, keep: frozenset[str] | None, skip: int) -> Iterator[Any]:
    """The rows of a table after the first `skip`, `_SLICE_ROWS` at a time."""
    batches = _of_arrow(path, keep)
    if path.endswith(".parquet"):
        source, group = _parquet(path), 0
        sizes = [source.metadata.row_group(number).num_rows for number in range(source.num_row_groups)]
        while group < len(sizes) and skip >= sizes[group]:  # whole row groups are passed over unread
            skip, group = skip - sizes[group], group + 1
        wanted = [name for name in source.schema_arrow.names if keep is None or name in keep]
        batches = chain.from_iterable(
            source.iter_batches(batch_size=_SLICE_ROWS, row_groups=[number], columns=wanted)
            for number in range(group, len(sizes))
        )
    for batch in batches:
        if batch.num_rows > skip:
            yield batch.slice(skip)
        skip = max(0, skip - batch.num_rows)


def _of_arrow(path: str, keep: frozenset[str] | None) -> Iterator[Any]:
    for batch in _arrow(path):
        wanted = [name for name in batch.schema.names if keep is None or name in keep]
        chosen = batch.select(wanted)
        yield from (chosen.slice(first, _SLICE_ROWS) for first in range(0, chosen.num_rows, _SLICE_ROWS))


def _to_stream(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _line_slices(file: int, path: str, start: int, line: int) -> Iterator[Slice]:
    with open(path, "rb") as source:
        source.seek(start)
        while block := source.read(_SLICE_BYTES):
            block += source.readline()
            lines = block.count(b"\n")
            yield Slice(file, path, line, start, len(block), size=lines)
            start, line = start + len(block), line + lines


def records(part: Slice, text_column: str = "text") -> Iterator[tuple[int, Record]]:
    """(line, record) of each record of a slice; a line of a .txt file is {text_column: line}.

    Raises `DataError` with file and line for what is no record.
    """
    if part.rows is not None:
        yield from enumerate(map(_without_nulls, part.rows), part.first_line)
    elif part.table is not None:
        import pyarrow as pa

        rows = pa.ipc.open_stream(part.table).read_all().to_pylist()
        yield from enumerate(map(_without_nulls, rows), part.first_line)
    else:
        for line, raw in _lines(part):
            where = f"{part.path}:{line}"
            if part.path.endswith(".txt"):
                yield line, {text_column: _decode(raw, where).rstrip("\r\n")}
            elif raw.strip():
                yield line, _json(_decode(raw, where).strip(), where)


def _lines(part: Slice) -> Iterator[tuple[int, bytes]]:
    with open(part.path, "rb") as source:
        source.seek(part.start)
        block = source.read(part.length)
    for line, raw in enumerate(block.removesuffix(b"\n").split(b"\n"), part.first_line):
        yield line, raw.removeprefix(_BOM) if line == 1 else raw


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} of the line is not UTF-8.", "", "Convert the file to UTF-8."
        ) from None


def _json(source: str, where: str) -> Record:
    try:
        record = json.loads(source)
    except ValueError as error:
        why = (
            f"{error.msg}, column {error.colno}." if isinstance(error, json.JSONDecodeError) else f"{error}."
        )
        fix = "A JSON array is not JSON Lines: write one object per line." if source[0] == "[" else ""
        raise DataError(f"{where}: the line is not JSON.", why, fix) from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: the line is {kind_of(record)}, not an object with columns.")
    return record


def _parquet(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file.", f"{error}".splitlines()[0]) from None


def _arrow(path: str) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(path))
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not an arrow stream.", f"{error}".splitlines()[0]) from None


def _without_nulls(record: Record) -> Record:
    """The record without the keys inside its columns that are null: tables give every object every key."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) for key, value in record.items()}


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON: `a number`, `a list`."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
    }
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def no_column(where: str, column: str, present: Sequence[str], why: str) -> DataError:
    """The error for a record without `column`; `why` says what asked for it."""
    hint = did_you_mean(column, present)
    if not hint.startswith("Did"):
        hint = f"Columns here: {', '.join(present)}." if present else "It has no columns."
    return DataError(f"{where}: there is no column `{column}`.", why, hint)


def text_of(record: Record, column: str, where: str, named_by: str = "") -> str:
    """The string in `column`; `named_by` is the key of the run file that chose it. `DataError` when it is none."""
    if column not in record:
        raise no_column(where, column, list(record), f"{named_by} names it." if named_by else "")
    text = record[column]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: `{column}` is {kind_of(text)}, not a string.",
            "Only text can be tokenised.",
            "Correct or remove the line" + (f"; {named_by} chooses another column." if named_by else "."),
        )
    return unicode_of(text, column, where)


def unicode_of(text: str, column: str, where: str) -> str:
    """`text`. Raises `DataError` when it holds half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: `{column}` holds half a surrogate pair at character {error.start + 1}.",
            "It is no Unicode text.",
            "Correct or remove the line.",
        ) from None
    return text

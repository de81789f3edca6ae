"""From files to records: dicts of columns, each with the file and line where it stands (`files.py` lists the kinds of files).

JSON Lines are one object per line; blank lines are skipped. Where there are no lines, the number of a row, from 1, stands
for the line. A file is read in slices, so that several processes can read one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shardwright.data.files import TABLES, is_compressed, kind_of_file, opened
from shardwright.errors import DataError, did_you_mean

Record = dict[str, Any]
_SLICE_BYTES = 1 << 18
_SLICE_ROWS = 1000
_BOM = b"\xef\xbb\xbf"
_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}


@dataclass(frozen=True)
class RecordSlice:
    """Consecutive records of one file, in one of four forms: a range of bytes, `lines`, `table` or `rows`."""

    file: int  # number of the file
    path: str
    first_line: int  # line (or row) of the first record, from 1
    start: int = 0  # first byte of the lines
    length: int = 0  # bytes of the lines
    size: int = 0  # lines (or rows)
    lines: bytes | None = None  # the bytes themselves, where the file is compressed
    table: bytes | None = None  # rows of a table as an arrow stream
    rows: tuple[Any, ...] | None = None  # records that are parsed already
    unread: tuple[str, ...] = ()  # columns of a table that were not asked for


def columns(path: str) -> list[str] | None:
    """The columns of a file's first record; None for a file of plain lines, and empty for a file without records."""
    kind = kind_of_file(path)
    if kind == ".txt":
        return None
    if kind in TABLES:
        return _names(path)
    first = next((record for part in slices(0, path) for _, record in records(part)), None)
    return [] if first is None else list(first)


def slices(
    file: int, path: str, keep: frozenset[str] | None = None, *, byte: int = 0, line: int = 1
) -> Iterator[RecordSlice]:
    """The slices of a file in order. keep: the columns of a table to read; None: all.

    byte, line: where to begin, which is the end of a slice; where rows are counted, `line` suffices.
    """
    kind = kind_of_file(path)
    if kind in TABLES:
        unread = () if keep is None else tuple(name for name in _names(path) if name not in keep)
        for batch in _batches(path, keep, line - 1):
            yield RecordSlice(file, path, line, table=_to_stream(batch), size=batch.num_rows, unread=unread)
            line += batch.num_rows
    elif kind == ".json" and (whole := _whole(path)) is not None:
        for first in range(line - 1, len(whole), _SLICE_ROWS):
            rows = tuple(whole[first : first + _SLICE_ROWS])
            yield RecordSlice(file, path, first + 1, rows=rows, size=len(rows))
    else:
        compressed = is_compressed(path)
        with opened(path, byte) as source:
            while block := source.read(_SLICE_BYTES):
                block += source.readline()
                size = block.count(b"\n")
                yield RecordSlice(file, path, line, byte, len(block), size, block if compressed else None)
                byte, line = byte + len(block), line + size


def _whole(path: str) -> list[Any] | None:
    """The records of a .json file that is one array or one object; None where the file is JSON Lines."""
    with opened(path) as source:
        while (first := source.readline()) and not first.removeprefix(_BOM).strip():
            pass
        first, second = first.removeprefix(_BOM).strip(), source.readline()
    is_array = first.startswith(b"[")
    if not is_array and not (first.startswith(b"{") and _is_one(first, second)):
        return None
    with opened(path) as source:
        content = source.read().removeprefix(_BOM)
    try:
        value = json.loads(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start + 1} is not UTF-8.", "", "Convert the file to UTF-8.") from None
    except ValueError as error:
        if not is_array:
            return None  # read as JSON Lines: the error will then name the line
        raise DataError(f"{path} begins like a JSON array but is not valid JSON.", f"{error}.") from None
    if isinstance(value, dict):
        return value["data"] if _is_envelope(value) else [value]
    return list(value)


def _is_one(first: bytes, second: bytes) -> bool:
    """Whether a file with these first two lines may be one object: over several lines, or around its records."""
    try:
        value = json.loads(first)
    except ValueError:
        return True
    return isinstance(value, dict) and _is_envelope(value) and not second.strip()


def _is_envelope(value: dict[str, Any]) -> bool:
    """Whether `{"data": [...]}` holds records: they are objects, and no other key belongs to a record."""
    records = value.get("data")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        return False
    beside = value.keys() - {"data"}
    return not any(isinstance(value[key], list) or any(key in record for record in records) for key in beside)


def _table(path: str) -> Any:
    """An open parquet file, or the reader of an arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_parquet = path.endswith(".parquet")
    try:
        return pq.ParquetFile(path) if is_parquet else pa.ipc.open_stream(pa.memory_map(path))
    except pa.ArrowInvalid as error:
        kind = "a parquet file" if is_parquet else "an arrow stream"
        raise DataError(f"{path} is not {kind}.", f"{error}".splitlines()[0]) from None


def _names(path: str) -> list[str]:
    """The columns of a table."""
    table = _table(path)
    return list((table.schema_arrow if path.endswith(".parquet") else table.schema).names)


def _batches(path: str, keep: frozenset[str] | None, skip: int) -> Iterator[Any]:
    """The rows of a table after the first `skip`, at most `_SLICE_ROWS` at a time."""
    table = _table(path)
    batches: Iterator[Any]
    wanted = [name for name in _names(path) if keep is None or name in keep]
    if path.endswith(".parquet"):
        sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
        group = 0
        while group < len(sizes) and skip >= sizes[group]:  # whole row groups are skipped unread
            skip, group = skip - sizes[group], group + 1
        batches = chain.from_iterable(
            table.iter_batches(batch_size=_SLICE_ROWS, row_groups=[number], columns=wanted)
            for number in range(group, len(sizes))
        )
    else:
        chosen = (batch.select(wanted) for batch in table)
        batches = (b.slice(first, _SLICE_ROWS) for b in chosen for first in range(0, b.num_rows, _SLICE_ROWS))
    for batch in batches:
        if batch.num_rows > skip:
            yield batch.slice(skip)
        skip = max(0, skip - batch.num_rows)


def _to_stream(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def records(part: RecordSlice, text_column: str = "text") -> Iterator[tuple[int, Record]]:
    """(line, record) of each record of a slice; a line of a .txt file is {text_column: line}.

    Raises `DataError` with file and line for a line or row that is no record.
    """
    if part.rows is not None:
        for line, row in enumerate(part.rows, part.first_line):
            if not isinstance(row, dict):
                raise DataError(f"{part.path}:{line}: the entry is {json_type(row)}, not an object with columns.")
            yield line, row
    elif part.table is not None:
        import pyarrow as pa

        rows = pa.ipc.open_stream(part.table).read_all().to_pylist()
        yield from enumerate(map(without_nulls, rows), part.first_line)
    else:
        is_text = kind_of_file(part.path) == ".txt"
        for line, raw in _lines(part):
            where = f"{part.path}:{line}"
            if is_text:
                yield line, {text_column: _decode(raw, where).rstrip("\r\n")}
            elif raw.strip():
                yield line, _from_line(_decode(raw, where).strip(), where)


def _lines(part: RecordSlice) -> Iterator[tuple[int, bytes]]:
    block = part.lines
    if block is None:
        with open(part.path, "rb") as source:
            source.seek(part.start)
            block = source.read(part.length)
    for line, raw in enumerate(block.removesuffix(b"\n").split(b"\n"), part.first_line):
        yield line, raw.removeprefix(_BOM) if line == 1 else raw


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{where}: byte {error.start + 1} of the line is not UTF-8."
        raise DataError(what, "", "Convert the file to UTF-8.") from None


def _from_line(source: str, where: str) -> Record:
    try:
        record = json.loads(source)
    except ValueError as error:
        why = f"{error.msg}, column {error.colno}." if isinstance(error, json.JSONDecodeError) else f"{error}."
        fix = "A JSON array is not JSON Lines: write one object per line, or give the file the suffix .json."
        raise DataError(f"{where}: the line is not JSON.", why, fix if source[0] == "[" else "") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: the line is {json_type(record)}, not an object with columns.")
    return record


def without_nulls(record: Record) -> Record:
    """The record without the keys inside its columns that are null: a table gives every object every key."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) for key, value in record.items()}


def json_type(value: object) -> str:
    """The type of a value in the words of JSON: `a number`, `a list`."""
    return _TYPES.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def no_column(where: str, column: str, present: Sequence[str], why: str) -> DataError:
    """The error for a record without `column`; `why` says what asked for the column."""
    hint = did_you_mean(column, present)
    if not hint.startswith("Did"):
        hint = f"Columns here: {', '.join(present)}." if present else "The record has no columns."
    return DataError(f"{where}: there is no column `{column}`.", why, hint)


def text_of(record: Record, column: str, where: str, named_by: str = "") -> str:
    """The text in `column`; `named_by` is the key of the run file that chose the column.

    Raises `DataError` for a column that is missing or holds no Unicode text.
    """
    if column not in record:
        raise no_column(where, column, list(record), f"{named_by} names this column." if named_by else "")
    text = record[column]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: `{column}` is {json_type(text)}, not a string.",
            "Only text can be tokenised.",
            "Correct or remove the record" + (f"; {named_by} chooses another column." if named_by else "."),
        )
    return check_unicode(text, column, where)


def check_unicode(text: str, column: str, where: str) -> str:
    """`text`. Raises `DataError` for half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{where}: `{column}` holds half a surrogate pair at character {error.start + 1}."
        raise DataError(what, "This is not valid Unicode text.", "Correct or remove the record.") from None
    return text

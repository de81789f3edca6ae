"""From files and globs to documents: one text each, with the file and line it came from.

.jsonl, .json  JSON Lines: one object per line, its `text_column` is a document; blank lines are passed over
.txt           one document per line, as in Hugging Face's `text` data sets; use JSONL for longer ones
.parquet       one document per row, from `text_column`; the row's number, from 1, stands for the line
A directory means the files of these kinds in it. Files are taken in the order of the patterns, and sorted
within one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from shardwright.errors import DataError, did_you_mean

KINDS = (".jsonl", ".json", ".txt", ".parquet")


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """The files that `patterns` (files, directories or globs) name. `key` is where they stand, for errors.

    Raises `DataError` for a pattern without files, a file of another kind, and a file that two patterns name.
    """
    found: dict[Path, str] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
        elif has_magic(pattern):
            files = sorted(Path(name) for name in glob(pattern, recursive=True) if Path(name).is_file())
        else:
            files = [path] if path.is_file() else []
        if not files:
            what = "is a directory without data files" if path.is_dir() else "names no file"
            raise DataError(
                f"{key}: `{pattern}` {what}.", f"Read from {Path.cwd()}.", f"Kinds: {', '.join(KINDS)}."
            )
        for file in files:
            if file.suffix not in KINDS:
                raise DataError(f"{key}: {file} is of no known kind.", "", f"Kinds: {', '.join(KINDS)}.")
            if file.resolve() in found:
                raise DataError(
                    f"{key}: {file} is named by `{found[file.resolve()]}` and by `{pattern}`.",
                    "Its documents would count twice.",
                    "Narrow one of the patterns.",
                )
            found[file.resolve()] = pattern
    return list(found)


def documents(files: Iterable[tuple[int, str]], text_column: str) -> Iterator[dict[str, Any]]:
    """Each document of `files` ((number, path) pairs) as {text, file, line}; file is the number.

    Raises `DataError` with file and line for what is no document.
    """
    for number, name in files:
        read = {".txt": _text, ".parquet": _parquet}.get(Path(name).suffix, _jsonl)
        for line, text in read(name, text_column):
            yield {"text": text, "file": number, "line": line}


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} of the line is not UTF-8.", "", "Convert the file to UTF-8."
        ) from None


def _text(name: str, text_column: str) -> Iterator[tuple[int, str]]:
    with open(name, "rb") as lines:
        for line, raw in enumerate(lines, 1):
            yield line, _decode(raw, f"{name}:{line}").removeprefix("\ufeff").rstrip("\r\n")


def _jsonl(name: str, text_column: str) -> Iterator[tuple[int, str]]:
    with open(name, "rb") as lines:
        for line, raw in enumerate(lines, 1):
            where = f"{name}:{line}"
            source = _decode(raw, where).removeprefix("\ufeff").strip()
            if not source:
                continue
            try:
                record = json.loads(source)
            except ValueError as error:
                why = (
                    f"{error.msg}, column {error.colno}."
                    if isinstance(error, json.JSONDecodeError)
                    else f"{error}."
                )
                fix = "A JSON array is not JSON Lines: write one object per line." if source[0] == "[" else ""
                raise DataError(f"{where}: the line is not JSON.", why, fix) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: the line is {_kind(record)}, not an object with a column `{text_column}`."
                )
            if text_column not in record:
                raise _no_column(where, text_column, list(record))
            text = record[text_column]
            _refuse_no_text(text, where, text_column)
            yield line, text


def _parquet(name: str, text_column: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(name)
    except pa.ArrowInvalid as error:
        raise DataError(f"{name} is not a parquet file.", f"{error}".splitlines()[0]) from None
    columns = file.schema_arrow.names
    if text_column not in columns:
        raise _no_column(name, text_column, columns)
    line = 0
    for batch in file.iter_batches(columns=[text_column]):
        for text in batch.column(0).to_pylist():
            line += 1
            _refuse_no_text(text, f"{name}:{line}", text_column)
            yield line, text


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
    }
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def _no_column(where: str, text_column: str, columns: Sequence[str]) -> DataError:
    hint = did_you_mean(text_column, columns)
    if not hint.startswith("Did"):
        hint = f"Columns here: {', '.join(columns)}." if columns else "It has no columns."
    return DataError(f"{where}: there is no column `{text_column}`.", "data.text_column names it.", hint)


def _refuse_no_text(text: object, where: str, text_column: str) -> None:
    if not isinstance(text, str):
        raise DataError(
            f"{where}: `{text_column}` is {_kind(text)}, not a string.",
            "Only text can be tokenised.",
            "Correct or remove the line; data.text_column chooses another column.",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: `{text_column}` holds half a surrogate pair at character {error.start + 1}.",
            "It is no Unicode text.",
            "Correct or remove the line.",
        ) from None

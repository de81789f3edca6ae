"""From the sources in data.train to files: what each source names, what kind of file it is, and its bytes.

.jsonl, .json  JSON Lines; a .json file may also be one array, or one object with an array `data`
.txt           one document per line, as in Hugging Face's `text` data sets; use JSONL for documents of several lines
.parquet       one record per row
.arrow         the same, in a directory that `datasets.Dataset.save_to_disk` wrote
Files of lines may be compressed: .gz, .bz2, .xz, .zst after the suffix. A link counts by its own suffix.
A directory means the data files in it, or the data set saved there; of a saved DatasetDict, one split. Files are taken in
the order of the sources, and sorted within a source. A file with exactly the name of a source comes before a pattern.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.config.schema import Source
from shardwright.errors import DataError
from shardwright.layout.import_path import is_import_path

LINES = (".jsonl", ".json", ".txt")
TABLES = (".parquet", ".arrow")
_NAMED = 5  # names in a line about files that are not read


def _zst(path: str) -> Any:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))


_COMPRESSED: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zst}
_KINDS = f"Supported: {', '.join((*LINES, *TABLES))}; files of lines also with {', '.join(_COMPRESSED)}."


@dataclass(frozen=True)
class DataFile:
    """A file, and the number of the source in data.train (or data.validation) that named this file."""

    path: str
    source: int


def kind_of_file(path: str | Path) -> str:
    """The suffix that says what the file holds, without a suffix of compression; empty for a file that we do not read."""
    name = Path(path)
    if name.suffix in _COMPRESSED:
        inner = Path(name.stem).suffix
        return inner if inner in LINES else ""
    return name.suffix if name.suffix in (*LINES, *TABLES) else ""


def is_compressed(path: str) -> bool:
    """Whether the file is compressed."""
    return Path(path).suffix in _COMPRESSED


@contextmanager
def opened(path: str, start: int = 0) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file, from byte `start` on. Raises `DataError` for a damaged compressed file."""
    if not is_compressed(path):
        with open(path, "rb") as source:
            source.seek(start)
            yield source
        return
    try:
        with _COMPRESSED[Path(path).suffix](path) as source:
            while start and (passed := len(source.read(min(start, 1 << 20)))):
                start -= passed
            yield source
    except (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = f"{error}.".replace("..", ".")
        raise DataError(f"{path} cannot be decompressed.", why, "Copy or create the file again.") from None


def sources_of(entries: Sequence[str | Source]) -> list[Source]:
    """The entries of data.train or data.validation, each as a `Source`."""
    return [Source(path=entry) if isinstance(entry, str) else entry for entry in entries]


def find_files(sources: Sequence[Source], key: str) -> list[DataFile]:
    """The files of `sources`, which stand in the run file under `key`: data.train or data.validation.

    Raises `DataError` for a source without files, an unsupported file, a file that is named twice, and a missing split.
    """
    found: dict[Path, tuple[Path, int]] = {}
    for number, source in enumerate(sources):
        files = _expand(source, key)
        if not files:
            raise _no_file(source, key)
        for file in files:
            if not kind_of_file(file):
                raise DataError(f"{key}: {file} is not a supported data file.", "", _KINDS)
            same = file.resolve()  # for comparison only: a link's own name says what the file holds
            if same in found:
                raise _twice(key, file, source, found[same][0], sources[found[same][1]])
            found[same] = (file, number)
    return [DataFile(os.path.abspath(file), number) for file, number in found.values()]


def _no_file(source: Source, key: str) -> DataError:
    path = Path(source.path)
    if path.is_dir():
        others = _unread(path)
        why = f"The directory holds {_some(others)}." if others else "The directory is empty."
        return DataError(f"{key}: `{path}` is a directory without data files.", why, _KINDS)
    fix = "A function needs data.streaming: true." if is_import_path(source.path) else _KINDS
    return DataError(f"{key}: `{source.path}` names no file.", f"The name was looked up from {Path.cwd()}.", fix)


def _twice(key: str, file: Path, source: Source, other: Path, by: Source) -> DataError:
    what = f"{file} is named by `{by.path}` and by `{source.path}`."
    fix = "Name the file once; `weight` says how often a source is passed."
    if other != file:
        what = f"{other} and {file} are the same file."
        fix = fix.replace("Name the file once", "Remove one of the links")
    return DataError(f"{key}: {what}", "Its documents would count twice.", fix)


def file_notices(sources: Sequence[Source]) -> Iterator[str]:
    """Lines about files beside the data files, which are not read."""
    for source in sources:
        path = Path(source.path)
        if path.is_dir() and not _is_data_set(path) and (others := _unread(path)):
            yield f"in {path} only data files are read, not {_some(others)}"
        if has_magic(source.path) and path.exists():
            others = [name for name in glob(source.path, recursive=True) if not path.samefile(name)]
            if others:
                yield f"`{path}` is read as a name, not as a pattern that also matches {_some(sorted(others))}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _unread(directory: Path) -> list[str]:
    """Names in a directory that are no data files; hidden names are left out."""
    others = (entry for entry in directory.iterdir() if not _is_data(entry) and entry.name[0] != ".")
    return sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in others)


def _is_data(entry: Path) -> bool:
    return bool(kind_of_file(entry)) and not entry.is_dir()


def _is_data_set(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _expand(source: Source, key: str) -> list[Path]:
    path = Path(source.path)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        split = source.split or key.removeprefix("data.")
        if split not in splits:
            why, fix = f"Its splits are: {', '.join(splits)}.", f"Write {{path: {path}, split: {splits[0]}}}."
            raise DataError(f"{key}: {path} has no split `{split}`.", why, fix)
        path /= split
    elif source.split is not None:
        raise DataError(
            f"{key}: `split: {source.split}` has no effect.",
            f"{path} is not a saved DatasetDict.",
            "Remove `split`, or name the directory that save_to_disk wrote.",
        )
    if (path / "state.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / file["filename"] for file in state["_data_files"]]
    if path.is_dir():
        return sorted(filter(_is_data, path.iterdir()))
    if path.exists() or not has_magic(source.path):
        return [path] if path.is_file() else []
    # the first parts of a pattern are names as long as they exist, also where they hold [ or *
    base, parts = Path(path.anchor), list(path.relative_to(path.anchor).parts)
    while (base / parts[0]).exists():
        base /= parts.pop(0)
    names = glob(str(Path(*parts)), root_dir=base, recursive=True)
    return sorted(file for name in names if (file := base / name).is_file())

"""The records of data.train as a stream that can be read from any position: pass after pass over the sources in their order.

A source is a file, or `package.module:function`, which returns an iterable of records with state_dict and load_state_dict
(datasets.IterableDataset has both). A `StreamPosition` says where reading continues: the byte and line, or the row, of a file,
so that nothing before it is read or tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from shardwright.config.schema import Data
from shardwright.data.files import DataFile, find_files, sources_of
from shardwright.data.formats import find_format, format_of
from shardwright.data.records import Record, RecordSlice, slices, without_nulls
from shardwright.data.tokenise import digest_of
from shardwright.errors import ConfigError, DataError
from shardwright.layout.import_path import import_object, is_import_path

_SLICE_RECORDS = 256


@dataclass(frozen=True)
class StreamPosition:
    """Where the reading of a stream continues. A checkpoint stores the fields by name."""

    turn: int = 0  # passes over the stream that are complete
    source: int = 0  # number of the source
    byte: int = 0  # of the file's lines
    line: int = 1  # line, or row
    state: Any = None  # state_dict of a function's iterable; None: at its beginning, or a file

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values: arguments of `StreamPosition`."""
        return asdict(self)


@dataclass(frozen=True)
class FunctionSource:
    """The records of the iterable that `package.module:function` returns."""

    name: str
    make: Callable[[], Any]

    def format(self, data: Data) -> str | None:
        """The format, from the first record; None where there is no record."""
        present = next((list(record) for record in self.make()), [])
        return format_of(present, self.name, data)

    def slices(
        self, number: int, at: StreamPosition, keep: frozenset[str]
    ) -> Iterator[tuple[RecordSlice, StreamPosition]]:
        """Slices from `at` on, each with the position after it."""
        iterable, line = self.make(), at.line
        if at.state is not None:
            iterable.load_state_dict(at.state)
        records = iter(iterable)
        while found := tuple(map(self._record, islice(records, _SLICE_RECORDS))):
            part = RecordSlice(number, self.name, line, rows=found, size=len(found))
            line += len(found)
            state = json.loads(json.dumps(iterable.state_dict()))
            yield part, replace(at, source=number, line=line, state=state)

    def _record(self, record: Any) -> Record:
        if not isinstance(record, dict):
            what = f"{self.name} yields a {type(record).__name__}."
            raise DataError(what, "A record is a dict of columns.", "Yield dicts.")
        return without_nulls(record)


@dataclass(frozen=True)
class FileSource:
    """The records of a file."""

    name: str

    def format(self, data: Data) -> str | None:
        """The format; None where there is no record."""
        return find_format(self.name, data)

    def slices(
        self, number: int, at: StreamPosition, keep: frozenset[str]
    ) -> Iterator[tuple[RecordSlice, StreamPosition]]:
        """Slices from `at` on, each with the position after it. keep: the columns of a table to read."""
        for part in slices(number, self.name, keep, byte=at.byte, line=at.line):
            yield part, replace(at, source=number, byte=part.start + part.length, line=part.first_line + part.size)


class RecordStream:
    """The sources of data.train, as a stream of slices of records.

    names, formats: of each source; a source without records has no format. files: empty where functions give the records.
    Raises `ConfigError` or `DataError` for a source that cannot be read.
    """

    def __init__(self, data: Data) -> None:
        self.sources: list[FileSource | FunctionSource] = []
        self.files: list[DataFile] = []
        named = sources_of(data.train)
        for source in named:
            if source.weight != 1:
                raise ConfigError(
                    f"data.train: `weight` of {source.path} has no effect with data.streaming.",
                    "A weight needs the number of rows of its source, and a stream does not know this number.",
                    "Remove the weight, or data.streaming.",
                )
            if is_import_path(source.path):
                self.sources.append(FunctionSource(source.path, _imported(source.path)))
        in_files = [source for source in named if not is_import_path(source.path)]
        if self.sources and in_files:
            raise ConfigError(
                "data.train names files and a function.",
                "Their order within a pass over the stream is not defined.",
                "Let the function read the files too, or name files only.",
            )
        if in_files:
            self.files = find_files(in_files, "data.train")
            self.sources = [FileSource(file.path) for file in self.files]
        self.names = [source.name for source in self.sources]
        self.formats = [source.format(data) for source in self.sources]

    def slices(
        self, position: StreamPosition, keep: frozenset[str]
    ) -> Iterator[tuple[RecordSlice, str, StreamPosition]]:
        """(slice, its format, position after it) of the rest of this pass."""
        for number in range(position.source, len(self.sources)):
            form = self.formats[number]
            if form is None:
                continue
            at = position if number == position.source else StreamPosition(position.turn, number)
            for part, after in self.sources[number].slices(number, at, keep):
                yield part, form, after

    def sizes_before(self, position: StreamPosition) -> str:
        """A digest of the sizes of the files that lie before `position`: all files after the first pass."""
        last = len(self.sources) if position.turn else position.source
        return digest_of([Path(name).stat().st_size for name in self.names[:last] if not is_import_path(name)])


def _imported(path: str) -> Callable[[], Any]:
    function: Callable[[], Any] = import_object(path, "data.train")
    made = function()
    missing = [method for method in ("state_dict", "load_state_dict", "__iter__") if not hasattr(made, method)]
    if missing:
        raise ConfigError(
            f"data.train: what {path} returns has no {' and no '.join(missing)}.",
            "A resumed run needs these methods to continue at its position in the stream.",
            "Return a datasets.IterableDataset, or give the class these methods.",
        )
    return function

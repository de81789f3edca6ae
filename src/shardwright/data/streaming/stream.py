"""The records of data.train read as a stream, from any place in it: pass after pass over the sources in their order.

A source is a file, or `package.module:function`, which returns an iterable of records with state_dict and load_state_dict
(datasets.IterableDataset has both). Where reading goes on is a `Place`: of a file the byte and line, or the row, so that
nothing before it is read or tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from shardwright.config.schema import Data
from shardwright.data.files import DataFile, find_files, sources_of
from shardwright.data.formats import find_format, format_of
from shardwright.data.read import digest_of
from shardwright.data.sources import Record, Slice, slices, without_nulls
from shardwright.errors import ConfigError, DataError
from shardwright.layout.import_path import import_object, is_import_path

_SLICE_RECORDS = 256


@dataclass(frozen=True)
class Place:
    """Where a stream is read on: the pass over it, the number of the source, and there the byte and the line (or row).

    state: of a function's iterable; None: at its begin, or a file.
    """

    turn: int = 0
    source: int = 0
    byte: int = 0
    line: int = 1
    state: Any = None

    def to_json(self) -> dict[str, Any]:
        """The place as plain values: arguments of `Place`."""
        return asdict(self)


@dataclass(frozen=True)
class FunctionSource:
    """The records of the iterable that `package.module:function` returns."""

    name: str
    make: Callable[[], Any]

    def columns(self) -> list[str]:
        """The columns of the first record, empty where there is none."""
        return next((list(record) for record in self.make()), [])

    def slices(self, number: int, place: Place) -> Iterator[tuple[Slice, Place]]:
        """Slices from `place` on, each with the place after it."""
        iterable, line = self.make(), place.line
        if place.state is not None:
            iterable.load_state_dict(place.state)
        records = iter(iterable)
        while found := tuple(map(self._record, islice(records, _SLICE_RECORDS))):
            part = Slice(number, self.name, line, rows=found, size=len(found))
            line += len(found)
            state = json.loads(json.dumps(iterable.state_dict()))
            yield part, replace(place, source=number, line=line, state=state)

    def _record(self, record: Any) -> Record:
        if not isinstance(record, dict):
            raise DataError(
                f"{self.name} gives a {type(record).__name__}.", "A record is a dict of columns.", "Yield dicts."
            )
        return without_nulls(record)


@dataclass(frozen=True)
class FileSource:
    """The records of a file."""

    name: str

    def slices(self, number: int, place: Place, keep: frozenset[str]) -> Iterator[tuple[Slice, Place]]:
        """Slices from `place` on, each with the place after it. keep: the columns that are wanted of a table."""
        for part in slices(number, self.name, keep, byte=place.byte, line=place.line):
            after = replace(place, source=number, byte=part.start + part.length, line=part.first_line + part.size)
            yield part, after


class Stream:
    """The sources of data.train.

    names, formats: of each source; a source without records has no format. Raises `ConfigError` or `DataError` for one
    that cannot be read.
    """

    def __init__(self, data: Data) -> None:
        self.sources: list[FileSource | FunctionSource] = []
        self._files: list[DataFile] = []
        named = sources_of(data.train)
        for source in named:
            if source.weight != 1:
                raise ConfigError(
                    f"data.train: `weight` of {source.path} has no effect with data.streaming.",
                    "How often a source is passed in an epoch needs its length.",
                    "Remove it, or data.streaming.",
                )
            if is_import_path(source.path):
                self.sources.append(FunctionSource(source.path, _imported(source.path)))
        files = [source for source in named if not is_import_path(source.path)]
        if self.sources and files:
            raise ConfigError(
                "data.train names files and a function.",
                "Their order within a pass over the stream would not be plain.",
                "Let the function read the files too, or name files only.",
            )
        if files:
            self._files = find_files(files, "data.train")
            self.sources = [FileSource(file.path) for file in self._files]
        self.names = [source.name for source in self.sources]
        self.formats = [_format(source, data) for source in self.sources]

    @property
    def files(self) -> Sequence[DataFile]:
        """The files; empty where a function gives the records."""
        return self._files

    def slices(self, place: Place, keep: frozenset[str]) -> Iterator[tuple[Slice, str, Place]]:
        """(slice, its format, place after it) of the rest of this pass."""
        for number in range(place.source, len(self.sources)):
            source, form = self.sources[number], self.formats[number]
            at = place if number == place.source else Place(place.turn, number)
            if form is None:
                continue
            found = source.slices(number, at, keep) if isinstance(source, FileSource) else source.slices(number, at)
            for part, after in found:
                yield part, form, after

    def passed(self, place: Place) -> str:
        """A digest of the sizes of the files that lie before `place`: all of them in a second pass."""
        last = len(self.sources) if place.turn else place.source
        return digest_of([Path(name).stat().st_size for name in self.names[:last] if not is_import_path(name)])


def _format(source: FileSource | FunctionSource, data: Data) -> str | None:
    if isinstance(source, FileSource):
        return find_format(source.name, data)
    present = source.columns()
    return format_of(present, source.name, data) if present else None


def _imported(path: str) -> Callable[[], Any]:
    function: Callable[[], Any] = import_object(path, "data.train")
    made = function()
    missing = [method for method in ("state_dict", "load_state_dict", "__iter__") if not hasattr(made, method)]
    if missing:
        raise ConfigError(
            f"data.train: what {path} returns has no {' and no '.join(missing)}.",
            "Without them a run that was stopped could not find its place in the stream again.",
            "Return a datasets.IterableDataset, or give the class these methods.",
        )
    return function

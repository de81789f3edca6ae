"""A stream in windows of documents. Each window is written once on a machine, and the ranks memory-map it.

A window holds the documents of whole slices, `data.stream_window` or a few more, or the rest of a pass. Its documents follow
from the position where it begins, and it holds the position where the next window begins. So windows are made one after the
other, each by the process that has the lock, one window ahead of the training. Old windows are removed; a rank that needs a
removed window makes it again.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.schema import RunFile
from shardwright.data.documents import Documents, DocumentWriter, new_directory
from shardwright.data.encode import Encoder
from shardwright.data.packing import RowRules
from shardwright.data.streaming.record_stream import RecordStream, StreamPosition
from shardwright.data.table import Table
from shardwright.data.tokenise import cache_directory, cache_key, digest_of, settings_of
from shardwright.data.tokenizer import find_tokenizer, load_tokenizer, special_ids
from shardwright.errors import DataError
from shardwright.mesh.cluster_environment import stop_signals

KEPT = 4
"""Windows that stay on disk: the ranks of a machine are a few updates apart at most."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class StreamWindow:
    """The rows of a window."""

    number: int
    first: int  # position of the first row among the rows of the stream
    start: StreamPosition
    next: StreamPosition  # where the next window begins
    table: Table

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.first + len(self.table)


class StreamWindows:
    """The windows of the run's data.train. fingerprint: of the settings, since the contents are not known in advance.

    Raises `ConfigError` or `DataError` for sources or settings that cannot be read.
    """

    def __init__(self, run: RunFile, stream: RecordStream, rules: RowRules) -> None:
        self.stream, self.rules, self._data = stream, rules, run.data
        self._kinds = frozenset(form for form in self.stream.formats if form is not None)
        if not self._kinds:
            raise DataError(f"There is no record in {', '.join(self.stream.names)}.", "The sources are empty.")
        self.tokenizer_path, missing = find_tokenizer(run)
        if missing is not None and self._kinds != {"tokens"}:
            raise missing
        settings = [settings_of(run.data, self.tokenizer_path), run.data.stream_window]
        self.fingerprint = f"stream-{digest_of([settings, [rules.max_length, rules.overlong, rules.packing]])}"
        if self.stream.files:
            key = cache_key(run.data, self.tokenizer_path, self.stream.files, run.data.stream_window)
            self.directory = cache_directory(run) / f"stream-{key}"
        else:  # a function may yield other records in each run, so nothing of an earlier run may be used
            self.directory = Path(tempfile.mkdtemp(prefix="stream-"))
            weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._loaded: Encoder | None = None
        self._reading: tuple[StreamPosition, Iterator[tuple[Any, str, StreamPosition]]] | None = None
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windows", initializer=_without_signals)
        self._ahead: Future[bool] | None = None

    def open(self, number: int, start: StreamPosition, first: int) -> StreamWindow:
        """Window `number`, which begins at `start` with row `first`; waits for it, and has the next window made ahead.

        Raises `DataError` with file and line for a record that cannot be read.
        """
        if self._ahead is not None:
            wait([self._ahead])
        while (found := self._opened(number, start, first)) is None:
            if not self._make(number, start):
                self._stopped.wait(_POLL_SECONDS)
        # an error of the window made ahead is raised when that window is opened
        self._ahead = self._pool.submit(self._make, number + 1, found.next)
        return found

    def special_ids(self) -> dict[str, Any]:
        """`tokenizer.special_ids` of the run's tokenizer, kept in a file so that most processes need not load it."""
        path = self.directory / "special.json"
        if not path.is_file():
            with tempfile.NamedTemporaryFile("w", dir=self.directory, delete=False) as file:
                file.write(json.dumps(special_ids(self._encoder.tokenizer)))
            Path(file.name).rename(path)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """Stops the making of a window ahead."""
        self._stopped.set()
        if self._ahead is not None:
            wait([self._ahead])
        self._stopped.clear()

    def _path(self, number: int, start: StreamPosition) -> Path:
        return self.directory / f"window-{number}-{digest_of(start.to_json())}"

    def _opened(self, number: int, start: StreamPosition, first: int) -> StreamWindow | None:
        """The window on disk; None where it does not exist, or is being removed."""
        try:
            documents = Documents.open(self._path(number, start))
            after = StreamPosition(**documents.meta["next"])
            return StreamWindow(number, first, start, after, Table.make(documents, self.rules))
        except FileNotFoundError:
            return None

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Whether this thread may write windows here, which one thread of all processes does at a time."""
        with open(self.directory / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _make(self, number: int, start: StreamPosition) -> bool:
        """Makes a window unless it exists; False where another thread is making windows."""
        path = self._path(number, start)
        with self._lock() as held:
            if held and not (path / "meta.json").is_file():
                self._write(path, number, start)
            return held

    def _write(self, path: Path, number: int, start: StreamPosition) -> None:
        for left in (path, *self.directory.glob("*.partial-*")):
            shutil.rmtree(left, ignore_errors=True)
        with new_directory(path) as directory:
            writer = DocumentWriter(directory, self._encoder.vocabulary)
            after = self._fill(writer, start)
            other = {"next": after.to_json(), **special_ids(self._encoder.tokenizer)}
            writer.finish(self.stream.names, self.stream.formats, other)
        Table.make(Documents.open(path), self.rules)
        for old in self.directory.glob("window-*"):
            if int(old.name.split("-")[1]) <= number - KEPT:
                removed = old.with_name(f"removed.partial-{old.name}")
                old.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _fill(self, writer: DocumentWriter, start: StreamPosition) -> StreamPosition:
        """Writes the documents of the window that begins at `start`; returns where the next window begins.

        The end of a pass ends a window, unless the window would hold nothing to train.
        """
        at, useful = start, 0
        reading, self._reading = self._reading, None  # an iterator that failed is already past the record that failed
        while True:
            if reading is None or reading[0] != at:
                reading = (at, self.stream.slices(at, self._encoder.keep))
            for part, form, after in reading[1]:
                if self._stopped.is_set():
                    raise InterruptedError(f"the window at {start} is no longer needed")
                found = self._encoder.slice(part, form)
                writer.append(part, found)
                useful += sum(length > 1 for length in found.lengths)
                at = after
                if useful >= self._data.stream_window:
                    self._reading = (at, reading[1])
                    return at
            whole_pass, at = start.turn < at.turn, StreamPosition(at.turn + 1)
            if useful:
                return at
            if whole_pass or start == StreamPosition(start.turn):
                raise DataError(
                    f"None of the {writer.notes.count('document')} documents of the stream can be trained.",
                    "Each document is empty, masked throughout, or one token long.",
                    f"Sources: {', '.join(self.stream.names)}.",
                )

    @property
    def _encoder(self) -> Encoder:
        if self._loaded is None:
            tokenizer = None if self.tokenizer_path is None else load_tokenizer(self.tokenizer_path)
            self._loaded = Encoder(tokenizer, self._data, self._kinds, self.tokenizer_path)
        return self._loaded


def _without_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())

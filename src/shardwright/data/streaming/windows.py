"""A stream in windows of documents, each written once on a machine and memory-mapped by the ranks that want it.

A window holds the documents of whole slices, `data.stream_window` or a few more, or what is left of a pass. What it holds
follows from the place where it begins, and where it ends stands in it: windows are made one after the other, each by
whichever process has the lock, one ahead of the training. Old ones are removed; a rank that comes too late makes its own again.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwright.config.schema import RunFile
from shardwright.data.encode import Encoder
from shardwright.data.read import ENCODING, cache_directory, digest_of, find_tokenizer, settings_of, stats_of
from shardwright.data.rows import Cut
from shardwright.data.streaming.stream import Place, Stream
from shardwright.data.table import FORMAT, Documents, Table, new_directory, token_dtype
from shardwright.data.tokenise import DocumentWriter, load_tokenizer, special_tokens
from shardwright.errors import DataError
from shardwright.mesh.cluster_environment import stop_signals

KEPT = 4
"""Windows that stay on disk: the ranks of a machine are a few updates apart at most."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Window:
    """Window `number` of a stream: its rows, where it begins and where the next one does."""

    number: int
    start: Place
    next: Place
    table: Table


class Windows:
    """The windows of the run's data.train. fingerprint: of the settings, not of contents, which nobody has seen before.

    Raises `ConfigError` or `DataError` for sources or settings that cannot be read.
    """

    def __init__(self, run: RunFile, stream: Stream, cut: Cut) -> None:
        self.stream, self.cut, self._data = stream, cut, run.data
        self._kinds = frozenset(form for form in self.stream.formats if form is not None)
        if not self._kinds:
            raise DataError(f"There is no record in {', '.join(self.stream.names)}.", "The sources are empty.")
        self.tokenizer_path, missing = find_tokenizer(run)
        if missing is not None and self._kinds != {"tokens"}:
            raise missing
        settings = [settings_of(run.data, self.tokenizer_path), run.data.stream_window]
        seedless = [cut.max_length, cut.overlong, cut.packing]
        self.fingerprint = f"stream-{digest_of([settings, seedless])}"
        if self.stream.files:
            versions = [FORMAT, ENCODING, version("tokenizers"), version("transformers"), version("jinja2")]
            key = digest_of([versions, settings, stats_of(self.stream.files)])
            self.directory = cache_directory(run) / f"stream-{key}"
        else:  # what a function will give is not known: nothing of an earlier run may be taken for it
            self.directory = Path(tempfile.mkdtemp(prefix="stream-"))
            weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._encoder: Encoder | None = None
        self._reading: tuple[Place, Iterator[tuple[Any, str, Place]]] | None = None
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windows", initializer=_without_signals)
        self._ahead: Future[None] | None = None

    def open(self, number: int, start: Place) -> Window:
        """Window `number`, which begins at `start`; waits until it is there, and has the next one made ahead.

        Raises `DataError` with file and line for a record that cannot be read.
        """
        if self._ahead is not None:
            wait([self._ahead])
        path = self._path(number, start)
        while (found := self._opened(path, number, start)) is None:
            with self._lock() as held:
                if held and not _is_complete(path):
                    self._make(path, number, start)
            if not held:
                self._stopped.wait(_POLL_SECONDS)
        self._ahead = self._pool.submit(self._make_ahead, number + 1, found.next)
        return found

    def special(self) -> dict[str, Any]:
        """What `special_tokens` says of the run's tokenizer, which is loaded only where nobody has noted it here."""
        path = self.directory / "special.json"
        if not path.is_file():
            with tempfile.NamedTemporaryFile("w", dir=self.directory, delete=False) as file:
                file.write(json.dumps(special_tokens(self._ready_encoder().tokenizer)))
            Path(file.name).rename(path)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """Ends the making of a window ahead."""
        self._stopped.set()
        if self._ahead is not None:
            wait([self._ahead])
        self._stopped.clear()

    def _path(self, number: int, start: Place) -> Path:
        return self.directory / f"window-{number}-{digest_of(start.to_json())}"

    def _opened(self, path: Path, number: int, start: Place) -> Window | None:
        """The window at `path`; None where it is not there, or is being removed."""
        try:
            documents = Documents.open(path)
            return Window(number, start, Place(**documents.meta["next"]), Table.make(documents, self.cut))
        except FileNotFoundError:
            return None

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Whether this thread alone writes windows here; another one, or another process, may do so."""
        with open(self.directory / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _make_ahead(self, number: int, start: Place) -> None:
        """Makes a window unless it is there or being made. An error is raised where the window is wanted."""
        path = self._path(number, start)
        with self._lock() as held:
            if held and not _is_complete(path):
                self._make(path, number, start)

    def _make(self, path: Path, number: int, start: Place) -> None:
        encoder = self._ready_encoder()
        tokenizer = encoder.tokenizer
        known = None if tokenizer is None or "tokens" in self._kinds else len(tokenizer)
        for left in (path, *self.directory.glob("*.partial-*")):
            shutil.rmtree(left, ignore_errors=True)
        with new_directory(path) as directory:
            writer = DocumentWriter(directory, token_dtype(known or 2**32))
            after = self._fill(writer, encoder, start)
            formats = [form for form in self.stream.formats if form is not None]
            other = {"next": after.to_json(), **special_tokens(tokenizer)}
            writer.finish(self.stream.names, sorted(set(formats)), other)
        Table.make(Documents.open(path), self.cut)
        for old in self.directory.glob("window-*"):
            if int(old.name.split("-")[1]) <= number - KEPT:
                removed = old.with_name(f"removed.partial-{old.name}")
                old.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _fill(self, writer: DocumentWriter, encoder: Encoder, start: Place) -> Place:
        """Writes the documents of a window that begins at `start`; where the next one begins.

        The end of a pass ends a window, unless it would hold nothing to train.
        """
        place, useful = start, 0
        reading, self._reading = self._reading, None  # one that failed has passed what it failed on
        while True:
            if reading is None or reading[0] != place:
                reading = (place, self.stream.slices(place, encoder.keep))
            for part, form, after in reading[1]:
                if self._stopped.is_set():
                    raise InterruptedError(f"window at {start} is no longer wanted")
                found = encoder.slice(part, form)
                writer.append(part, found)
                useful += sum(length > 1 for length in found.lengths)
                place = after
                if useful >= self._data.stream_window:
                    self._reading = (place, reading[1])
                    return place
            whole_pass, place = start.turn < place.turn, Place(place.turn + 1)
            if useful:
                return place
            if whole_pass or start == Place(start.turn):
                raise DataError(
                    f"The stream has no document that can be trained: {writer.counts['read']} were read.",
                    "All are empty, masked throughout, or one token long.",
                    f"Sources: {', '.join(self.stream.names)}.",
                )

    def _ready_encoder(self) -> Encoder:
        if self._encoder is None:
            tokenizer = None if self.tokenizer_path is None else load_tokenizer(self.tokenizer_path)
            self._encoder = Encoder(tokenizer, self._data, self._kinds, self.tokenizer_path)
        return self._encoder


def _is_complete(path: Path) -> bool:
    return (path / "meta.json").is_file()


def _without_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())

"""Standard output and error that never end a run: lines that cannot be written are lost, and the other stream says so.

A terminal that is closed (EIO), a reader that has ended (EPIPE) and a full disk (ENOSPC) otherwise raise in whatever prints:
our lines, rich, logging, warnings and progress bars of libraries, which all write to `sys.stdout` and `sys.stderr`. A terminal
that is paused (Ctrl-S) or a pager that is not scrolled would hold up all ranks until they count as stuck.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_GONE = frozenset({errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO, errno.ECONNRESET})
"""Errors after which nothing can ever be written again. A full disk may have room later."""
PATIENCE_SECONDS = 10.0
"""How long a line of a training run may wait for a reader."""

PIECE = 1024
"""Characters that are written at once: no more bytes in UTF-8 than the 4096 for which a pipe that is ready has room."""


class LossyStream(io.TextIOBase):
    """A text stream that writes to another stream and drops what that stream cannot write."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._said, self._unread = stream, name, False, False
        self.other: LossyStream | None = None
        """The stream on which a loss is reported."""
        self.patience: float | None = None
        """How many seconds a write may wait for a reader; None: for ever, since the user asked for this output."""

    def write(self, text: str, /) -> int:
        """Returns the number of characters, written or not."""
        try:
            if self.patience is None:
                return self._stream.write(text)
            for start in range(0, len(text), PIECE):
                if not self._is_read():
                    self._lost(TimeoutError(errno.ETIMEDOUT, f"nobody has read for {self.patience:g} s"))
                    break
                self._stream.write(text[start : start + PIECE])
                self._stream.flush()
            return len(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def isatty(self) -> bool:
        """Whether the stream is a terminal that is still there."""
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        """Whatever else a program asks of its standard output, for example `reconfigure`."""
        if name == "_stream":  # not made yet
            raise AttributeError(name)
        return getattr(self._stream, name)

    def close(self) -> None:
        """Does nothing: the process's own streams end with the process."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def _is_read(self) -> bool:
        """Whether a line can be written now or soon: a pipe is ready when it has room for 4096 bytes."""
        with suppress(OSError, ValueError):
            ready = select.poll()
            ready.register(self._stream.fileno(), select.POLLOUT)
            seconds = 0.0 if self._unread else self.patience or 0.0
            self._unread = not ready.poll(1000 * seconds)
        return not self._unread

    def _lost(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _GONE:
            with suppress(OSError, ValueError):  # so that buffered text and writes of native code go nowhere
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        if not self._said and self.other is not None:
            self._said = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.other.write(f"shardwright: {self._name} cannot be written ({reason}): its lines are lost.\n")
            self.other.flush()


@contextmanager
def bounded_writes() -> Iterator[None]:
    """A context in which no print waits longer than `PATIENCE_SECONDS`: ranks train meanwhile."""
    tolerate_lost_output()
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, LossyStream)]
    for stream in streams:
        stream.patience = PATIENCE_SECONDS
    try:
        yield
    finally:
        for stream in streams:
            stream.patience = None


def tolerate_lost_output() -> None:
    """Makes `sys.stdout` and `sys.stderr` lossy streams. A second call changes nothing."""
    for number in range(3):  # closed ones (`>&-`) would become the numbers of other files
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    made = [_lossy(sys.stdout, "standard output"), _lossy(sys.stderr, "standard error")]
    sys.stdout, sys.stderr = made
    made[0].other, made[1].other = made[1], made[0]


def _lossy(stream: Any, name: str) -> Any:
    if isinstance(stream, LossyStream):
        return stream
    if stream is None:
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a sample's letters in a narrow locale
    return LossyStream(stream, name)

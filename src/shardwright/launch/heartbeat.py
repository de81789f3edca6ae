"""What a rank is doing, in a small file of its own: the rank writes it with a few stores to memory, watchers read it.

A beat waits for nobody and synchronises nothing: it costs about a microsecond.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE

FILE = "heartbeat"
PHASES = ("start", "data", "forward_backward", "reduce", "step", "log", "evaluate", "save", "end")
"""In the order of an update. reduce: the reduction at the update's end, in which all ranks take part."""
_LONG = frozenset({"start", "save", "end"})
LONG_FACTOR = 5
"""Start, save, end and the first update, which compiles, may take this many times longer than other phases."""

_WORDS = struct.Struct("@5qd")


@dataclass(frozen=True)
class Beat:
    """What a rank last wrote: in `phase` of `update` (counted from 0) since `at`; `first` is where its run began, or -1."""

    process_id: int
    phase: str
    update: int
    first: int
    beats: int
    at: float

    def allowed_seconds(self, seconds: float) -> float:
        """How long this phase may last where an ordinary one may take `seconds`."""
        return seconds * (LONG_FACTOR if self.phase in _LONG or self.update <= self.first else 1)

    @property
    def position(self) -> tuple[int, int]:
        """Sorts ranks by progress."""
        return self.update, PHASES.index(self.phase)

    def __str__(self) -> str:
        return self.phase if self.phase in ("start", "end") else f"{self.phase} of update {self.update}"


class Heartbeat:
    """Written by this rank: in memory, and in a file where our launcher has given the rank a directory."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _WORDS.size)
        else:
            with path.open("w+b") as file:
                file.truncate(_WORDS.size)
                self._memory = mmap.mmap(file.fileno(), _WORDS.size)
        self._process_id, self._beats, self._phase = os.getpid(), 0, 0
        self.update, self.first = 0, -1
        self.beat()

    @classmethod
    def of_this_rank(cls) -> Heartbeat:
        """The heartbeat that the launcher of this process reads, where our launcher has started it."""
        directory = os.environ.get(STARTED_HERE)
        return cls(Path(directory) / FILE if directory else None)

    def begin(self, update: int) -> None:
        """Training begins, or resumes, at `update`."""
        self.update = self.first = update
        self.beat()

    def enter(self, phase: str) -> None:
        """`phase` begins."""
        self._phase = PHASES.index(phase)
        self.beat()

    def beat(self) -> None:
        """The phase makes progress: a long evaluation is not a hang."""
        self._beats += 1
        words = (self._process_id, self._phase, self.update, self.first, self._beats, clock.now())
        _WORDS.pack_into(self._memory, 0, *words)

    def last(self) -> Beat:
        """What watchers read."""
        return _beat(self._memory[: _WORDS.size])


def read_heartbeat(directory: Path) -> Beat | None:
    """The last beat of the rank whose directory this is; None before the first."""
    try:
        words = (directory / FILE).read_bytes()
    except FileNotFoundError:
        return None
    found = _beat(words) if len(words) == _WORDS.size else None
    return found if found is not None and found.process_id else None


def _beat(words: bytes) -> Beat:
    process_id, phase, update, first, beats, at = _WORDS.unpack(words)
    return Beat(process_id, PHASES[phase], update, first, beats, at)

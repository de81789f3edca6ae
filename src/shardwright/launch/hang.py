"""Ranks that no longer move: the launcher asks what they do, and names the rank that the others wait for (`blame.py`)."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import psutil

from shardwright.errors import ExitCode
from shardwright.launch.blame import Sight, describe
from shardwright.launch.heartbeat import Beat, Heartbeat, read_pulse
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE

STACKS = "stacks.txt"
ASKED, ANSWER = "asked", "collectives.json"
"""The launcher makes the first in a rank's directory; a thread of the rank then writes the second."""
DUMP_SIGNAL = signal.SIGUSR2
_LOOK_SECONDS = 0.5
_DUMP_SECONDS = 8.0
_LAST_SECONDS = 20.0
"""How long a rank without our launcher may go on after its stacks were printed: a collective may end it with an error."""
_MEET_SECONDS = 1.0
"""How often ranks without our launcher ask each other's store whether one of them is stuck."""
_STUCK = "shardwright/stuck"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Watched(Protocol):
    """What is needed of a rank (see `watch.Rank`)."""

    number: int
    world_size: int
    directory: Path
    code: int | None

    def send(self, number: int) -> None: ...


class Store(Protocol):
    """What is needed of the store in which ranks meet."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class HangWatch:
    """Looks at the pulses of all ranks twice a second."""

    def __init__(self, ranks: Sequence[Watched], seconds: float) -> None:
        self._ranks, self._seconds, self._next = ranks, seconds, 0.0

    def report(self, timed_out: bool = False) -> list[str]:
        """Lines that name the rank that is stuck, once a phase has lasted too long; empty until then.

        timed_out: a collective of another rank has already waited too long for it.
        Every rank's stacks are then in its directory. Takes up to eight seconds in that case.
        """
        if clock.now() < self._next and not timed_out:
            return []
        now = clock.now()
        self._next = now + _LOOK_SECONDS
        beats = {rank.number: beat for rank in self._ranks if (beat := read_pulse(rank.directory))}
        late = [b for b in beats.values() if now - b.at > b.allowed_seconds(self._seconds)]
        if not late and not timed_out:
            return []
        asked = [rank for rank in self._ranks if rank.code is None]
        for rank in asked:
            (rank.directory / STACKS).write_bytes(b"")
            (rank.directory / ASKED).touch()
            rank.send(DUMP_SIGNAL)
        stopped = {number for number, beat in beats.items() if _is_stopped(beat.process_id)}
        _wait_for_answers([rank for rank in asked if rank.number not in stopped])
        sights = [_see(rank, beats[rank.number], now) for rank in self._ranks if rank.number in beats]
        return [*describe(sights), f"Stacks of all ranks: {self._ranks[0].directory.parent}/rank_*/{STACKS}"]


def _wait_for_answers(ranks: Sequence[Watched]) -> None:
    """Until every rank has answered and the files of stacks no longer grow, or `_DUMP_SECONDS`."""
    end, before = clock.now() + _DUMP_SECONDS, [-1]
    while clock.now() < end:
        sizes = [(rank.directory / STACKS).stat().st_size for rank in ranks]
        if all(sizes) and sizes == before and all(map(_answered, ranks)):
            return
        before = sizes
        clock.sleep(0.1)


def _answered(rank: Watched) -> bool:
    return (rank.directory / ANSWER).exists()


def _see(rank: Watched, beat: Beat, now: float) -> Sight:
    answer: Mapping[str, Any] = {}
    if _answered(rank):
        answer = json.loads((rank.directory / ANSWER).read_text(encoding="utf-8"))
    stacks, ended = rank.directory / STACKS, rank.code is not None
    return Sight(
        rank=rank.number,
        world_size=rank.world_size,
        doing=str(beat),
        position=beat.position,
        seconds=now - beat.at,
        stack=() if ended else main_stack(stacks.read_text(encoding="utf-8", errors="replace")),
        issued=answer.get("issued"),
        stopped=_is_stopped(beat.process_id),
        ended=ended,
        note=answer.get("note", ""),
    )


def main_stack(text: str) -> tuple[str, ...]:
    """The frames of the main thread in what faulthandler wrote, innermost first: `file:line function`."""
    for block in re.split(r"\n(?=(?:Current t|T)hread 0x)", text):
        frames = tuple(f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(block))
        if frames and frames[-1].endswith(("<module>", "_run_module_as_main")):
            return frames
    return ()


def listen_for_dumps(issued: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Lets the launcher have this rank's stacks, whatever its main thread is doing, and what it has `issued` to others."""
    if directory := os.environ.get(STARTED_HERE):
        file = (Path(directory) / STACKS).open("ab")  # kept open: the handler writes from any place
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        _open_for_good.append(file)
        threading.Thread(target=_answer, args=(Path(directory), issued), name="answers", daemon=True).start()


_open_for_good: list[object] = []


def _answer(directory: Path, issued: Callable[[], Mapping[str, Any]]) -> None:
    """Waits until the launcher asks, and answers. A signal could not ask: its handler waits for the main thread."""
    while not (directory / ASKED).exists():
        clock.sleep(_LOOK_SECONDS)
    part = (directory / ANSWER).with_suffix(".part")
    part.write_text(json.dumps({"issued": issued(), "note": _note()}), encoding="utf-8")
    part.replace(directory / ANSWER)


def _note() -> str:
    """The error that the main thread handles, where it is in an `except` block."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    if error is None:
        return ""
    said = (str(error).splitlines() or [""])[0][:120]
    return f"while it handles {type(error).__name__}: {said}"


class OwnWatch:
    """The same for a rank that torchrun or Slurm has started: a thread that looks at this rank's own pulse.

    The thread prints the stacks, and the ranks that are alive write to the store what they do; the first of them says which is
    stuck. If no collective has ended the rank 20 s later, the thread does.
    """

    def __init__(
        self,
        pulse: Heartbeat,
        rank: int,
        world_size: int,
        seconds: float,
        store: Callable[[], Store],
        issued: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._pulse, self._rank, self._world_size, self._seconds = pulse, rank, world_size, seconds
        self._issued, self._stop = issued, threading.Event()
        self._met = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if STARTED_HERE not in os.environ:
            self._store = store()
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _run(self) -> None:
        said: Beat | None = None
        looks = 0
        while not self._stop.wait(_LOOK_SECONDS):
            beat, looks = self._pulse.last(), looks + 1
            late = clock.now() - beat.at - beat.allowed_seconds(self._seconds)
            if late > 0 and said != beat:
                said = beat
                print(
                    f"shardwright: rank {self._rank} has made no progress in {beat} for {clock.now() - beat.at:.0f} s. "
                    "Its stack follows. The ranks together then name the one that the others wait for.",
                    file=sys.stderr,
                )
                with suppress(OSError, ValueError):  # stderr without a file
                    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._meet(beat, ask=True)
            elif looks % round(_MEET_SECONDS / _LOOK_SECONDS) == 0:
                self._meet(beat)
            if late > _LAST_SECONDS:
                print(f"shardwright: rank {self._rank} ends: still in {beat}.", file=sys.stderr, flush=True)
                os._exit(ExitCode.CRASH)

    def _meet(self, beat: Beat, ask: bool = False) -> None:
        """Writes to the store what this rank does, when a rank asks; the first rank that has written says which is stuck."""
        with suppress(Exception):  # the store is gone with its rank; this rank's own stacks are printed
            if ask:
                self._store.set(_STUCK, "1")
            if self._met or not self._store.check([_STUCK]):
                return
            self._met = True
            sight = Sight(
                rank=self._rank,
                world_size=self._world_size,
                doing=str(beat),
                position=beat.position,
                seconds=clock.now() - beat.at,
                stack=_own_stack(),
                issued=self._issued(),
                note=_note(),
            )
            self._store.set(f"{_STUCK}/{self._rank}", json.dumps(asdict(sight)))
            self._stop.wait(2 * _MEET_SECONDS)
            sights = [self._sight(rank) for rank in range(self._world_size)]
            there = [sight for sight in sights if sight is not None]
            if there[0].rank == self._rank:
                print("\n".join(describe(there)), file=sys.stderr, flush=True)

    def _sight(self, rank: int) -> Sight | None:
        """What a rank has left in the store."""
        key = f"{_STUCK}/{rank}"
        if not self._store.check([key]):
            return None
        found = json.loads(self._store.get(key))
        return Sight(**{**found, "stack": tuple(found["stack"])})


def _own_stack() -> tuple[str, ...]:
    """The frames of this process's main thread, as `main_stack` has them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(frames)


def _is_stopped(process_id: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False

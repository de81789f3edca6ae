"""Ranks that no longer move: which one the others wait for, in which phase, and every rank's stack."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from shardwright.errors import ExitCode
from shardwright.launch.pulse import Beat, Pulse, read_pulse
from shardwright.layout.placement import STARTED_HERE
from shardwright.measure import clock

STACKS = "stacks.txt"
DUMP_SIGNAL = signal.SIGUSR2
_LOOK_SECONDS = 0.5
_DUMP_SECONDS = 2.0
_LAST_SECONDS = 20.0
"""How long a rank without our launcher may go on after its stacks were printed: a collective may end it with an error."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Watched(Protocol):
    """What is needed of a rank (see `watch.Rank`)."""

    number: int
    world_size: int
    directory: Path
    code: int | None

    def send(self, number: int) -> None: ...


@dataclass(frozen=True)
class _Sight:
    """One rank of a run that hangs. `waiting`: 0 stopped by someone, 1 in code of its own, 2 in backward, 3 in a collective."""

    rank: Watched
    beat: Beat
    seconds: float
    stack: tuple[str, ...]
    waiting: int

    def line(self) -> str:
        where = {
            0: "stopped by a signal" if _is_stopped(self.beat.process_id) else "deaf to signals",
            1: f"in {self.stack[0] if self.stack else 'unknown code'}",
            2: "in backward",
            3: f"waiting for others in {self.stack[0] if self.stack else 'a collective'}",
        }[self.waiting]
        return f"  rank {self.rank.number}: {self.beat} for {self.seconds:.1f} s, {where}"


class HangWatch:
    """Looks at the pulses of all ranks twice a second."""

    def __init__(self, ranks: Sequence[Watched], seconds: float) -> None:
        self._ranks, self._seconds, self._next = ranks, seconds, 0.0

    def report(self, timed_out: bool = False) -> list[str]:
        """Lines that name the rank that is stuck, once a phase has lasted too long; empty until then.

        timed_out: a collective of another rank has already waited too long for it.
        Every rank's stacks are then in its directory. Takes up to two seconds in that case.
        """
        if clock.now() < self._next and not timed_out:
            return []
        now = clock.now()
        self._next = now + _LOOK_SECONDS
        beats = {rank.number: beat for rank in self._ranks if (beat := read_pulse(rank.directory))}
        late = [b for b in beats.values() if now - b.at > b.allowed_seconds(self._seconds)]
        if not late and not timed_out:
            return []
        for rank in self._running():
            (rank.directory / STACKS).write_bytes(b"")
            rank.send(DUMP_SIGNAL)
        self._wait_for_stacks()
        sights = [_see(rank, beats[rank.number], now) for rank in self._ranks if rank.number in beats]
        return _describe(sorted(sights, key=lambda sight: (sight.waiting, sight.beat.position)))

    def _running(self) -> list[Watched]:
        return [rank for rank in self._ranks if rank.code is None]

    def _wait_for_stacks(self) -> None:
        """Until every rank has written and the files no longer grow, or two seconds."""
        end, before = clock.now() + _DUMP_SECONDS, [-1]
        while clock.now() < end:
            sizes = [(rank.directory / STACKS).stat().st_size for rank in self._running()]
            if all(sizes) and sizes == before:
                return
            before = sizes
            clock.sleep(0.1)


def _see(rank: Watched, beat: Beat, now: float) -> _Sight:
    if rank.code is not None:
        return _Sight(rank, beat, now - beat.at, ("a collective, for too long",), 3)
    stack = main_stack((rank.directory / STACKS).read_text(encoding="utf-8", errors="replace"))
    return _Sight(rank, beat, now - beat.at, stack, _waiting(stack))


def main_stack(text: str) -> tuple[str, ...]:
    """The frames of the main thread in what faulthandler wrote, innermost first: `file:line function`."""
    for block in re.split(r"\n(?=(?:Current t|T)hread 0x)", text):
        frames = tuple(f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(block))
        if frames and frames[-1].endswith(("<module>", "_run_module_as_main")):
            return frames
    return ()


def _waiting(stack: tuple[str, ...]) -> int:
    if not stack:
        return 0
    if "torch/distributed" in stack[0]:
        return 3
    return 2 if stack[0].endswith("_engine_run_backward") else 1


def _describe(sights: list[_Sight]) -> list[str]:
    first = sights[0]
    peers = [s for s in sights if (s.waiting, s.beat.position) == (first.waiting, first.beat.position)]
    names = f"rank {first.rank.number} of {first.rank.world_size} is"
    if len(peers) > 1:
        names = f"ranks {', '.join(str(s.rank.number) for s in peers)} of {first.rank.world_size} are"
    lines = [f"shardwright: {names} stuck in {first.beat} ({first.seconds:.0f} s without progress)."]
    lines += [sight.line() for sight in sorted(sights, key=lambda sight: sight.rank.number)]
    if first.stack:
        lines += [
            f"Stack of rank {first.rank.number}, innermost first:",
            *(f"  | {f}" for f in first.stack[:12]),
        ]
    lines.append(f"Stacks of all ranks: {first.rank.directory.parent}/rank_*/{STACKS}")
    return lines


def listen_for_dumps() -> None:
    """Lets the launcher have this rank's stacks, whatever its main thread is doing."""
    if directory := os.environ.get(STARTED_HERE):
        file = (Path(directory) / STACKS).open("ab")  # kept open: the handler writes from any place
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        _open_for_good.append(file)


_open_for_good: list[object] = []


class OwnWatch:
    """The same for a rank that torchrun or Slurm has started: a thread that looks at this rank's own pulse.

    It prints what the rank is stuck in and its stacks; if no collective has ended the rank 20 s later, it does.
    """

    def __init__(self, pulse: Pulse, rank: int, seconds: float) -> None:
        self._pulse, self._rank, self._seconds = pulse, rank, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if STARTED_HERE not in os.environ:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _run(self) -> None:
        said: Beat | None = None
        while not self._stop.wait(_LOOK_SECONDS):
            beat = self._pulse.last()
            late = clock.now() - beat.at - beat.allowed_seconds(self._seconds)
            if late > 0 and said != beat:
                said = beat
                print(
                    f"shardwright: rank {self._rank} has made no progress in {beat} for {clock.now() - beat.at:.0f} s. "
                    "A stack in torch/distributed means that it waits for another rank.",
                    file=sys.stderr,
                )
                with suppress(OSError, ValueError):  # stderr without a file
                    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if late > _LAST_SECONDS:
                print(f"shardwright: rank {self._rank} ends: still in {beat}.", file=sys.stderr, flush=True)
                os._exit(ExitCode.CRASH)


def _is_stopped(process_id: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False

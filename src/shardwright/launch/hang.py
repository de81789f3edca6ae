"""Hangs: when a phase of a rank lasts too long, all ranks report what they do, and the report names the culprit."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from shardwright.errors import ExitCode
from shardwright.launch.hang_analysis import RankSnapshot, describe
from shardwright.launch.heartbeat import Beat, Heartbeat, read_heartbeat
from shardwright.launch.processes import RankProcess
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE

if TYPE_CHECKING:
    from shardwright.torch_private import Store  # the launcher does not load torch

STACKS = "stacks.txt"
ASKED, ANSWER = "asked", "collectives.json"
"""The launcher makes the first file in a rank's directory; a thread of the rank then writes the second."""
DUMP_SIGNAL = signal.SIGUSR2
_LOOK_SECONDS = 0.5
_DUMP_SECONDS = 8.0
_LAST_SECONDS = 20.0
"""How long a rank without our launcher may continue after it has printed its stacks: a collective may still fail and end it."""
_STORE_SECONDS = 1.0
"""How often ranks without our launcher read in their store whether one of them is stuck."""
_STUCK = "shardwright/stuck"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class HangDetector:
    """Reads the heartbeats of all ranks twice a second."""

    def __init__(self, ranks: Sequence[RankProcess], seconds: float) -> None:
        self._ranks, self._seconds, self._next = ranks, seconds, 0.0

    def report(self, timed_out: bool = False) -> list[str]:
        """Lines that name the rank that is stuck, once a phase has lasted too long; empty until then.

        timed_out: a collective of a rank has already timed out. A report takes up to eight seconds; the stacks of every rank
        are then in its directory.
        """
        if clock.now() < self._next and not timed_out:
            return []
        now = clock.now()
        self._next = now + _LOOK_SECONDS
        beats = {rank.number: beat for rank in self._ranks if (beat := read_heartbeat(rank.directory))}
        overdue = any(now - b.at > b.allowed_seconds(self._seconds) for b in beats.values())
        if not overdue and not timed_out:
            return []
        asked = [rank for rank in self._ranks if rank.code is None]
        for rank in asked:
            (rank.directory / STACKS).write_bytes(b"")
            (rank.directory / ASKED).touch()
            rank.send(DUMP_SIGNAL)
        stopped = {number for number, beat in beats.items() if _is_stopped(beat.process_id)}
        _wait_for_answers([rank for rank in asked if rank.number not in stopped])
        snapshots = [_snapshot(rank, beats[rank.number], now) for rank in self._ranks if rank.number in beats]
        return [*describe(snapshots), f"Stacks of all ranks: {self._ranks[0].directory.parent}/rank_*/{STACKS}"]


def _wait_for_answers(ranks: Sequence[RankProcess]) -> None:
    """Returns when every rank has answered and the files of stacks no longer grow, or after `_DUMP_SECONDS`."""
    end, before = clock.now() + _DUMP_SECONDS, [-1]
    while clock.now() < end:
        sizes = [(rank.directory / STACKS).stat().st_size for rank in ranks]
        if all(sizes) and sizes == before and all(map(_answered, ranks)):
            return
        before = sizes
        clock.sleep(0.1)


def _answered(rank: RankProcess) -> bool:
    return (rank.directory / ANSWER).exists()


def _snapshot(rank: RankProcess, beat: Beat, now: float) -> RankSnapshot:
    answer: Mapping[str, Any] = {}
    if _answered(rank):
        answer = json.loads((rank.directory / ANSWER).read_text(encoding="utf-8"))
    stacks, ended = rank.directory / STACKS, rank.code is not None
    return RankSnapshot(
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


def answer_hang_reports(issued: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Answers the launcher with this rank's stacks and with what it has `issued`, whatever its main thread is doing."""
    if directory := os.environ.get(STARTED_HERE):
        file = (Path(directory) / STACKS).open("ab")  # kept open: the signal handler writes at any time
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        _open_files.append(file)
        threading.Thread(target=_answer, args=(Path(directory), issued), name="answers", daemon=True).start()


_open_files: list[object] = []


def _answer(directory: Path, issued: Callable[[], Mapping[str, Any]]) -> None:
    """Answers when the launcher asks. A Python signal handler would run in the main thread, which may be stuck."""
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


class Watchdog:
    """Detects hangs in a rank that torchrun or Slurm has started: a thread reads this rank's own heartbeat.

    The thread prints the stacks, and the ranks that are alive write to the store what they do; the first of them prints which
    rank is stuck. If no collective has ended the rank 20 s later, the thread does.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        world_size: int,
        seconds: float,
        store: Callable[[], Store],
        issued: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._heartbeat, self._rank, self._world_size, self._seconds = heartbeat, rank, world_size, seconds
        self._issued, self._stop = issued, threading.Event()
        self._exchanged = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if STARTED_HERE not in os.environ:
            self._store = store()
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _run(self) -> None:
        reported: Beat | None = None
        looks = 0
        while not self._stop.wait(_LOOK_SECONDS):
            beat, looks = self._heartbeat.last(), looks + 1
            overdue = clock.now() - beat.at - beat.allowed_seconds(self._seconds)
            if overdue > 0 and reported != beat:
                reported = beat
                print(
                    f"shardwright: rank {self._rank} has made no progress in {beat} for {clock.now() - beat.at:.0f} s. "
                    "Its stack follows. The ranks then name the rank that the others wait for.",
                    file=sys.stderr,
                )
                with suppress(OSError, ValueError):  # stderr without a file
                    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._exchange_snapshots(beat, ask=True)
            elif looks % round(_STORE_SECONDS / _LOOK_SECONDS) == 0:
                self._exchange_snapshots(beat)
            if overdue > _LAST_SECONDS:
                print(f"shardwright: rank {self._rank} is still in {beat} and ends.", file=sys.stderr, flush=True)
                os._exit(ExitCode.CRASH)

    def _exchange_snapshots(self, beat: Beat, ask: bool = False) -> None:
        """Writes to the store what this rank does, when a rank asks; the first rank that has written prints the report."""
        with suppress(Exception):  # the store may be gone with its rank; this rank has printed its own stacks
            if ask:
                self._store.set(_STUCK, "1")
            if self._exchanged or not self._store.check([_STUCK]):
                return
            self._exchanged = True
            own = RankSnapshot(
                rank=self._rank,
                world_size=self._world_size,
                doing=str(beat),
                position=beat.position,
                seconds=clock.now() - beat.at,
                stack=_own_stack(),
                issued=self._issued(),
                note=_note(),
            )
            self._store.set(f"{_STUCK}/{self._rank}", json.dumps(asdict(own)))
            self._stop.wait(2 * _STORE_SECONDS)
            keys = [f"{_STUCK}/{rank}" for rank in range(self._world_size)]
            found = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
            snapshots = [RankSnapshot(**{**values, "stack": tuple(values["stack"])}) for values in found]
            if snapshots[0].rank == self._rank:
                print("\n".join(describe(snapshots)), file=sys.stderr, flush=True)


def _own_stack() -> tuple[str, ...]:
    """The frames of this process's main thread, as `main_stack` has them."""
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    walked = traceback.walk_stack(innermost)
    return tuple(f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in walked)


def _is_stopped(process_id: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False

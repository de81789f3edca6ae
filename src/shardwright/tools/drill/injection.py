"""Fault injection at a phase of an update or a stage of a save, decided from outside by heartbeat and files.

The rank is stopped first (SIGSTOP). The fault is injected only where heartbeat or files still show the wanted point; else the
rank continues. So the training code has no hooks for the drill.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardwright.checkpoint.directory import LATEST, complete_checkpoints, update_of
from shardwright.checkpoint.index import TENSORS
from shardwright.checkpoint.manifest import MANIFEST
from shardwright.launch.heartbeat import Beat
from shardwright.measure import clock
from shardwright.tools.drill.target_run import POLL_SECONDS, TargetRun

SAVE_STAGES = ("before writing", "while writing", "before the rename", "before the link")
STOP_SECONDS = 0.5
"""How long a process may take to stop after SIGSTOP."""


def save_stage(output_dir: Path) -> str:
    """The stage of a save that the files in `output_dir` show; empty when no save is under way."""
    incomplete = next(output_dir.glob(".checkpoint-*.incomplete"), None)
    if incomplete is not None:
        if (incomplete / MANIFEST).exists():
            return SAVE_STAGES[2]
        with suppress(FileNotFoundError):
            return SAVE_STAGES[1] if any((incomplete / TENSORS).iterdir()) else SAVE_STAGES[0]
        return SAVE_STAGES[0]
    newest = max(map(update_of, complete_checkpoints(output_dir)), default=None)
    link = output_dir / LATEST
    linked = os.readlink(link) if link.is_symlink() else ""
    return SAVE_STAGES[3] if newest is not None and linked != f"checkpoint-{newest}" else ""


@dataclass(frozen=True)
class Fault:
    """What is done to the process of a rank: a signal, or a limit on the size of its files, as if the disk were full."""

    number: signal.Signals | None = None
    times: int = 1
    file_bytes: int = 0

    def inject(self, process_id: int) -> None:
        with suppress(ProcessLookupError):
            if self.number is not None:
                for _ in range(self.times):
                    os.kill(process_id, self.number)
            else:
                resource.prlimit(process_id, resource.RLIMIT_FSIZE, (self.file_bytes, resource.RLIM_INFINITY))


NONE, KILL = Fault(signal.SIGCONT), Fault(signal.SIGKILL)


def at_phase(target: TargetRun, rank: int, phase: str, update: int, fault: Fault) -> str | None:
    """Injects `fault` into `rank` in `phase` of `update` or a later one; returns where, None when the run ended before."""

    def point(beat: Beat) -> str:
        return str(beat) if beat.update >= update and beat.phase == phase and beat.first >= 0 else ""

    return _inject_at(target, rank, point, fault, POLL_SECONDS)


def at_save_stage(target: TargetRun, rank: int, stage: str, update: int, fault: Fault, tries: int = 3) -> str | None:
    """Injects `fault` into `rank` in this stage of a save at `update` or later; after `tries` missed saves, in any stage."""
    seen: list[int] = []

    def point(beat: Beat) -> str:
        found = save_stage(target.output_dir) if beat.first >= 0 and beat.update >= update else ""
        if found and beat.update not in seen:
            seen.append(beat.update)
        wanted = found == stage or (found and len(seen) > tries)
        return f"save of update {beat.update}, {found}" if wanted else ""

    return _inject_at(target, rank, point, fault, POLL_SECONDS / 4)


def _inject_at(target: TargetRun, rank: int, point: Callable[[Beat], str], fault: Fault, interval: float) -> str | None:
    """Injects `fault` once `point` describes where the rank is, and still does so while the rank is stopped."""
    start = target.starts - 1
    for _ in target.polls(f"the point at which to inject a fault into rank {rank}", interval):
        beat = target.beat(rank, start)
        if beat is not None and point(beat):
            _stop(beat.process_id)
            now = target.beat(rank, start)
            found = point(now) if now is not None else ""
            if found:
                fault.inject(beat.process_id)
            if not (found and fault.number == signal.SIGSTOP):
                NONE.inject(beat.process_id)
            if found:
                return found
        if not target.running or target.starts > start + 1:
            return None
    raise AssertionError


def _stop(process_id: int) -> None:
    """Sends SIGSTOP and returns when the process has stopped, so that its files no longer change."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(process_id, signal.SIGSTOP)
        process, end = psutil.Process(process_id), clock.now() + STOP_SECONDS
        while process.status() != psutil.STATUS_STOPPED and clock.now() < end:
            clock.sleep(POLL_SECONDS)

"""Moments at which a run is broken, found from outside: a phase by the rank's pulse, a stage of a save by its files.

The rank is frozen first; only when what it left says that this is the moment is it broken, else it goes on.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.directory import LATEST
from shardwright.checkpoint.index import TENSORS
from shardwright.checkpoint.manifest import MANIFEST
from shardwright.launch.heartbeat import Beat
from shardwright.tools.drill.session import POLL_SECONDS, Session, freeze, thaw

STAGES = ("before writing", "while writing", "before the rename", "before the link")


def stage_of_save(output_dir: Path) -> str:
    """Which stage of a save the files in `output_dir` show; empty when none goes on."""
    asides = list(output_dir.glob(".checkpoint-*.incomplete"))
    if asides:
        if (asides[0] / MANIFEST).exists():
            return STAGES[2]
        with suppress(FileNotFoundError):
            return STAGES[1] if any((asides[0] / TENSORS).iterdir()) else STAGES[0]
        return STAGES[0]
    updates = [int(p.name.split("-")[1]) for p in output_dir.glob("checkpoint-*") if (p / MANIFEST).exists()]
    link = output_dir / LATEST
    linked = os.readlink(link) if link.is_symlink() else ""
    return STAGES[3] if updates and linked != f"checkpoint-{max(updates)}" else ""


@dataclass(frozen=True)
class Break:
    """What is done to a rank: a signal, or a limit on the size of its files, as if the disk were full."""

    number: signal.Signals | None = None
    times: int = 1
    file_bytes: int = 0

    def __call__(self, process_id: int) -> None:
        with suppress(ProcessLookupError):
            if self.number is not None:
                for _ in range(self.times):
                    os.kill(process_id, self.number)
            else:
                resource.prlimit(process_id, resource.RLIMIT_FSIZE, (self.file_bytes, resource.RLIM_INFINITY))

    @property
    def leaves_it_stopped(self) -> bool:
        return self.number == signal.SIGSTOP


def at_phase(session: Session, rank: int, phase: str, update: int, broken: Break) -> str | None:
    """Breaks `rank` in `phase` of `update` or a later one; returns what was found, None when the run ended before."""

    def here(beat: Beat) -> str:
        return str(beat) if beat.update >= update and beat.phase == phase and beat.first >= 0 else ""

    return _when(session, rank, here, broken, POLL_SECONDS)


def at_stage(session: Session, rank: int, stage: str, update: int, broken: Break, tries: int = 3) -> str | None:
    """Breaks `rank` in this stage of a save at `update` or later; after `tries` saves that went by, in any stage."""
    seen: list[int] = []

    def here(beat: Beat) -> str:
        found = stage_of_save(session.output_dir) if beat.first >= 0 and beat.update >= update else ""
        if found and beat.update not in seen:
            seen.append(beat.update)
        wanted = found == stage or (found and len(seen) > tries)
        return f"save of update {beat.update}, {found}" if wanted else ""

    return _when(session, rank, here, broken, POLL_SECONDS / 4)


def _when(session: Session, rank: int, here: Callable[[Beat], str], broken: Break, interval: float) -> str | None:
    """Breaks `rank` once `here` says where it is, and still says so while it is frozen."""
    start = session.starts - 1
    for _ in session.polls(f"the moment to break rank {rank}", interval):
        beat = session.beat(rank, start)
        if beat is not None and here(beat):
            freeze(beat.process_id)
            now = session.beat(rank, start)
            found = here(now) if now is not None else ""
            if found:
                broken(beat.process_id)
            if not (found and broken.leaves_it_stopped):
                thaw(beat.process_id)
            if found:
                return found
        if not session.running or session.starts > start + 1:
            return None
    raise AssertionError

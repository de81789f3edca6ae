"""The faults of a drill, in the order in which one run meets them."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.checkpoint.index import TENSORS
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.errors import ExitCode
from shardwright.tools.drill.disk import fill
from shardwright.tools.drill.moments import STAGES, Break, at_phase, at_stage
from shardwright.tools.drill.session import Session

KILL = Break(signal.SIGKILL)
NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Fault:
    """A way to break a run. `strike(session, update)` waits for its moment, at `update` or later, and says where it struck.

    codes: exit codes of the launcher that are right; None stands for a start of all ranks anew. says: what the launcher
    must have written. beside: it strikes a run that saves beside training (checkpoint.async_save).
    """

    group: str
    name: str
    strike: Callable[[Session, int], str | None]
    codes: tuple[int | None, ...]
    says: str = ""
    beside: bool = False


def live_faults(ranks: int, groups: set[str], chance: random.Random) -> list[Fault]:
    """The faults of `groups` that strike a running run of `ranks` ranks; who is struck is drawn from `chance`.

    Those that strike a save beside training come last.
    """
    faults: list[Fault] = []

    def any_rank() -> int:
        return chance.randrange(ranks)

    def phase(fault: str, rank: int, name: str, broken: Break, codes: tuple[int | None, ...], says: str) -> None:
        group, _, what = fault.partition(": ")
        faults.append(Fault(group, what, lambda s, u: at_phase(s, rank, name, u, broken), codes, says))

    def stage(rank: int, name: str) -> None:
        what = f"SIGKILL of rank {rank}, {name}"
        faults.append(Fault("save", what, lambda s, u: at_stage(s, rank, name, u, KILL), (None,)))

    for name in ("forward_backward", "reduce", "step"):
        rank = any_rank()
        phase(
            f"kill: SIGKILL of rank {rank}",
            rank,
            name,
            KILL,
            (None,),
            f"rank {rank} of {ranks} was ended by SIGKILL",
        )
    rank, last = any_rank(), ranks - 1
    phase(f"kill: SIGSEGV in rank {rank}", rank, "forward_backward", Break(signal.SIGSEGV), (None,), "SIGSEGV")
    loading = any_rank()
    faults.append(
        Fault("kill", f"SIGKILL of rank {loading}, loading", lambda s, u: _kill_at_start(s, loading), (None,))
    )
    faults.append(Fault("kill", "SIGKILL of the launcher", _kill_launcher, (-signal.SIGKILL,)))
    for name in STAGES:
        stage(any_rank() if name == STAGES[1] else 0, name)
    saved = (int(ExitCode.STOPPED_AND_SAVED),)
    for number, name in (
        (signal.SIGTERM, "forward_backward"),
        (signal.SIGUSR1, "save"),
        (signal.SIGINT, "reduce"),
    ):
        rank = any_rank()
        phase(f"signal: {number.name} to rank {rank} alone", rank, name, Break(number), saved, "")
    phase(f"signal: SIGTERM twice to rank {last}", last, "step", Break(signal.SIGTERM, times=2), saved, "")
    faults.append(
        Fault("write", f"rank {last} cannot write", lambda s, u: _full_disk(s, last, u), (1, 0), "checkpoint")
    )
    stuck = f"rank {last} of {ranks} is stuck in"
    phase(f"hang: rank {last} stopped", last, "forward_backward", Break(signal.SIGSTOP), (None,), stuck)
    faults += _beside(any_rank(), any_rank(), saved)
    return [fault for fault in faults if fault.group in groups]


def _beside(one: int, other: int, saved: tuple[int | None, ...]) -> list[Fault]:
    """What strikes while a thread writes and training goes on."""

    def stage(what: str, rank: int, name: str, broken: Break, codes: tuple[int | None, ...]) -> Fault:
        return Fault(
            "async",
            f"{what} rank {rank}, async save {name}",
            lambda s, u: at_stage(s, rank, name, u, broken),
            codes,
            beside=True,
        )

    return [
        stage("SIGKILL of", one, STAGES[1], KILL, (None,)),
        stage("SIGKILL of", 0, STAGES[2], KILL, (None,)),
        stage("SIGTERM to", other, STAGES[1], Break(signal.SIGTERM), saved),
    ]


def disk_full() -> Fault:
    """The disk of a run that lies on a small one is full during a save; then there is room again."""
    return Fault("write", "disk full", _fill_disk, (1, 0), NO_SPACE)


def _kill_at_start(session: Session, rank: int) -> str | None:
    """Kills a rank that has said it is there and has not begun to train."""
    start = session.starts - 1
    for _ in session.polls(f"rank {rank} to load"):
        beat = session.beat(rank, start)
        if beat is not None:
            KILL(beat.process_id)
            return str(beat)
    raise AssertionError


def _kill_launcher(session: Session, update: int) -> str | None:
    found = at_phase(session, 0, "forward_backward", update, Break(signal.SIGCONT))
    if found is not None:
        session.kill_launcher()
    return found


def _fill_disk(session: Session, update: int) -> str | None:
    size = _part_bytes(session)
    start, found = session.starts - 1, None
    if size is not None:
        found = at_phase(session, 0, "forward_backward", update, Break(signal.SIGCONT))
    if size is None or found is None:
        return None
    ballast = fill(session.output_dir, size // 2)
    for _ in session.polls("the failed save"):
        if NO_SPACE in session.tail(20) or not session.running or session.starts > start + 1:
            break
    ballast.unlink()
    return f"{found}: {size // 2:,} bytes left"


def _part_bytes(session: Session) -> int | None:
    """The size of the smallest tensor file of a first checkpoint, which it waits for; None when the run ended before."""
    for _ in session.polls("a first checkpoint"):
        if (newest := find_checkpoint(session.output_dir, "auto")) is not None or not session.running:
            break
    if newest is None:
        return None
    sizes = [path.stat().st_size for path in (newest / TENSORS).iterdir()]
    return min(size for size in sizes if size > 4096)


def _full_disk(session: Session, rank: int, update: int) -> str | None:
    """Limits the size of the files that a rank may write to half of what its part of a checkpoint has."""
    size = _part_bytes(session)
    if size is None:
        return None
    start, found = (
        session.starts - 1,
        at_phase(session, rank, "forward_backward", update, Break(file_bytes=size // 2)),
    )
    if found is None:
        return None
    for _ in session.polls("the failed save"):
        if not session.running or session.starts > start + 1:
            break
    return f"{found}: no file over {size // 2:,} bytes"

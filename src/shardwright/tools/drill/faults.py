"""The trials of a drill that inject a fault into a running run, in the order in which one run goes through them."""

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
from shardwright.tools.drill.injection import KILL, NONE, SAVE_STAGES, Fault, at_phase, at_save_stage
from shardwright.tools.drill.target_run import TargetRun

NO_SPACE = os.strerror(errno.ENOSPC)
Codes = tuple[int | None, ...]
RESTARTED: Codes = (None,)
SAVED: Codes = (int(ExitCode.STOPPED_AND_SAVED),)


@dataclass(frozen=True)
class Trial:
    """A fault in a running run, and what the launcher must do about it."""

    group: str
    name: str
    inject: Callable[[TargetRun, int], str | None]
    """Waits for the point of injection, at the given update or later; returns where it was, None where the run had ended."""
    codes: Codes
    """Right exit codes of the launcher; None stands for a restart of all ranks."""
    says: str = ""
    """What the launcher must print."""
    async_save: bool = False
    """The run saves in the background (checkpoint.async_save)."""


def runtime_trials(ranks: int, groups: set[str], rng: random.Random) -> list[Trial]:
    """The trials of `groups` for a run of `ranks` ranks, those of background saves last; `rng` draws the ranks."""

    def any_rank() -> int:
        return rng.randrange(ranks)

    def phase(group: str, name: str, rank: int, when: str, fault: Fault, codes: Codes, says: str = "") -> Trial:
        return Trial(group, name, lambda t, u: at_phase(t, rank, when, u, fault), codes, says)

    def stage(group: str, name: str, rank: int, when: str, fault: Fault, codes: Codes = RESTARTED) -> Trial:
        inject = lambda t, u: at_save_stage(t, rank, when, u, fault)  # noqa: E731
        return Trial(group, name, inject, codes, async_save=group == "async")

    trials: list[Trial] = []
    for when in ("forward_backward", "reduce", "step"):
        rank = any_rank()
        says = f"rank {rank} of {ranks} was ended by SIGKILL"
        trials.append(phase("kill", f"SIGKILL of rank {rank}", rank, when, KILL, RESTARTED, says))
    rank, last = any_rank(), ranks - 1
    fault = Fault(signal.SIGSEGV)
    trials.append(phase("kill", f"SIGSEGV in rank {rank}", rank, "forward_backward", fault, RESTARTED, "SIGSEGV"))
    loading = any_rank()
    what = f"SIGKILL of rank {loading}, loading"
    trials.append(Trial("kill", what, lambda t, u: _kill_while_loading(t, loading), RESTARTED))
    trials.append(Trial("kill", "SIGKILL of the launcher", _kill_launcher, (-signal.SIGKILL,)))
    for when in SAVE_STAGES:
        rank = any_rank() if when == SAVE_STAGES[1] else 0
        trials.append(stage("save", f"SIGKILL of rank {rank}, {when}", rank, when, KILL))
    for number, when in (
        (signal.SIGTERM, "forward_backward"),
        (signal.SIGUSR1, "save"),
        (signal.SIGINT, "reduce"),
    ):
        rank = any_rank()
        trials.append(phase("signal", f"{number.name} to rank {rank} alone", rank, when, Fault(number), SAVED))
    fault = Fault(signal.SIGTERM, times=2)
    trials.append(phase("signal", f"SIGTERM twice to rank {last}", last, "step", fault, SAVED))
    trials.append(
        Trial("write", f"rank {last} cannot write", lambda t, u: _limit_files(t, last, u), (1, 0), "checkpoint")
    )
    stuck, fault = f"rank {last} of {ranks} is stuck in", Fault(signal.SIGSTOP)
    trials.append(phase("hang", f"rank {last} stopped", last, "forward_backward", fault, RESTARTED, stuck))
    one, other, writing, rename = any_rank(), any_rank(), SAVE_STAGES[1], SAVE_STAGES[2]
    trials += [
        stage("async", f"SIGKILL of rank {one}, async save {writing}", one, writing, KILL),
        stage("async", f"SIGKILL of rank 0, async save {rename}", 0, rename, KILL),
        stage("async", f"SIGTERM to rank {other}, async save {writing}", other, writing, Fault(signal.SIGTERM), SAVED),
    ]
    return [trial for trial in trials if trial.group in groups]


def full_disk_trial() -> Trial:
    """The small disk of a run is full during a save; later there is room again."""
    return Trial("write", "disk full", _fill_disk, (1, 0), NO_SPACE)


def _kill_while_loading(target: TargetRun, rank: int) -> str | None:
    """Kills a rank after its first beat and before its first update."""
    start = target.starts - 1
    for _ in target.polls(f"rank {rank} to load"):
        beat = target.beat(rank, start)
        if beat is not None:
            KILL.inject(beat.process_id)
            return str(beat)
    raise AssertionError


def _kill_launcher(target: TargetRun, update: int) -> str | None:
    found = at_phase(target, 0, "forward_backward", update, NONE)
    if found is not None:
        target.kill_launcher()
    return found


def _fill_disk(target: TargetRun, update: int) -> str | None:
    size = _part_bytes(target)
    start, found = target.starts - 1, None
    if size is not None:
        found = at_phase(target, 0, "forward_backward", update, NONE)
    if size is None or found is None:
        return None
    ballast = fill(target.output_dir, size // 2)
    for _ in target.polls("the failed save"):
        if NO_SPACE in target.tail(20) or not target.running or target.starts > start + 1:
            break
    ballast.unlink()
    return f"{found}: {size // 2:,} bytes left"


def _part_bytes(target: TargetRun) -> int | None:
    """The size of the smallest tensor file of the first checkpoint, once that is there; None where the run ended before."""
    for _ in target.polls("a first checkpoint"):
        if (newest := find_checkpoint(target.output_dir, "auto")) is not None or not target.running:
            break
    if newest is None:
        return None
    sizes = [path.stat().st_size for path in (newest / TENSORS).iterdir()]
    return min(size for size in sizes if size > 4096)


def _limit_files(target: TargetRun, rank: int, update: int) -> str | None:
    """Limits the size of the files that a rank may write to half of its part of a checkpoint."""
    size = _part_bytes(target)
    if size is None:
        return None
    start = target.starts - 1
    found = at_phase(target, rank, "forward_backward", update, Fault(file_bytes=size // 2))
    if found is None:
        return None
    for _ in target.polls("the failed save"):
        if not target.running or target.starts > start + 1:
            break
    return f"{found}: no file over {size // 2:,} bytes"

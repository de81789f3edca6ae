"""Watching ranks: who ended how, who failed first, who must be ended, and what the run's exit code is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import ExitCode
from shardwright.launch.blame import place_of
from shardwright.launch.hang import HangWatch, main_stack
from shardwright.launch.heartbeat import read_pulse
from shardwright.launch.rank import OUTCOME
from shardwright.measure import clock

TICK_SECONDS = 0.02
PEERS_SECONDS = 5.0
"""How long ranks may take to end by themselves once another has failed; they are then killed."""
TAIL_LINES = 25

_FINAL = frozenset(set(ExitCode) - {ExitCode.CRASH})
_AGREED = frozenset({ExitCode.CHECK_FAILED, ExitCode.NOTHING_FITS, ExitCode.STOPPED_AND_SAVED})
"""Codes that all ranks come to together: one that is still writing gets the grace period."""


@dataclass
class Rank:
    number: int
    world_size: int
    process: subprocess.Popen
    directory: Path
    code: int | None = None
    ended_at: float = 0.0
    killed: bool = False
    outcome: dict[str, Any] = field(default_factory=dict)

    def look(self) -> None:
        """Notices the end without reaping: a zombie's process group number cannot be taken by a stranger."""
        if self.code is not None:
            return
        seen = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        self.ended_at = clock.now()
        self.code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        with suppress(FileNotFoundError):
            self.outcome = json.loads((self.directory / OUTCOME).read_text(encoding="utf-8"))
        if self.code == -signal.SIGABRT and "code" in self.outcome:
            self.code = self.outcome["code"]  # aborted after it had reported that all was done
        if self.failed:
            self.kill_group()  # children hold copies of its sockets: peers would not notice its end

    @property
    def failed(self) -> bool:
        return self.code not in (None, ExitCode.DONE, ExitCode.STOPPED_AND_SAVED)

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sorts failures: first causes, then ranks that only lost a peer, then those that were killed for it."""
        return self.killed, bool(self.outcome.get("lost_peer")), self.outcome.get("at", self.ended_at)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Watch:
    """One start of all ranks, from the first to the last exit."""

    def __init__(
        self,
        ranks: list[Rank],
        requests: list[int],
        grace_seconds: float,
        hang_seconds: float | None = None,
    ) -> None:
        self.ranks, self.requests, self.grace_seconds = ranks, requests, grace_seconds
        self._hang = None if hang_seconds is None else HangWatch(ranks, hang_seconds)
        self._hung: list[str] = []
        self._stop_at: float | None = None
        self._sent = 0
        self._printed = 0

    def until_all_ended(self) -> int:
        """Waits, forwards requests and output, ends ranks that outlive their time; returns the exit code."""
        while True:
            for rank in self.ranks:
                rank.look()
            running = [rank for rank in self.ranks if rank.code is None]
            self._forward(running)  # before anything is printed: a terminal that is gone must not hold it up
            if not any(rank.failed for rank in self.ranks):
                self._print_stderr()
            if not running:
                return self._verdict()
            if self._hang and not self._hung and running:
                self._hung = self._hang_report()
            if self._hung or clock.now() >= self._deadline():
                for rank in running:
                    rank.killed = True
                    rank.kill_group()
            clock.sleep(TICK_SECONDS)

    def _hang_report(self) -> list[str]:
        """Looks for a rank that hangs: while all run, or when others have waited too long for it in a collective."""
        assert self._hang is not None
        failed = [rank for rank in self.ranks if rank.code is not None]
        if not failed:
            return self._hang.report()
        timed_out = all(rank.outcome.get("timed_out") for rank in failed)
        return self._hang.report(timed_out=True) if timed_out else []

    @property
    def worth_a_restart(self) -> bool:
        """Whether all ranks started anew may fare better: not after an error made for a person, which would come again."""
        first = min((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.order, default=None)
        if first is None or first.code in _FINAL:
            return False
        return bool(first.outcome.get("traceback")) or not first.outcome.get("message")

    @property
    def progressed(self) -> bool:
        """Whether a rank has done an update since this start."""
        beats = [read_pulse(rank.directory) for rank in self.ranks]
        return any(beat is not None and beat.update > beat.first >= 0 for beat in beats)

    def _deadline(self) -> float:
        times = [float("inf")]
        if self._stop_at is not None:
            interrupted_again = signal.SIGINT in self.requests[1:]
            times.append(self._stop_at + (0.0 if interrupted_again else self.grace_seconds))
        for rank in self.ranks:
            if rank.code in _AGREED:
                times.append(rank.ended_at + self.grace_seconds)
            elif rank.failed:
                times.append(rank.ended_at + PEERS_SECONDS)
        return min(times)

    def _forward(self, running: list[Rank]) -> None:
        """Asks the ranks to stop, once; they save and end by themselves."""
        if not running or not self.requests or self._stop_at is not None:
            return
        self._stop_at, number = clock.now(), self.requests[0]
        self._sent = number
        for rank in running:
            rank.send(self._sent)
        hint = " Press Ctrl-C again to end at once." if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        print(f"shardwright: {name}: stopping after this update and saving.{hint}", file=sys.stderr, flush=True)

    def _print_stderr(self) -> None:
        """Passes rank 0's stderr on; silent once a rank has failed, so that its peers' noise does not come first."""
        with (self.ranks[0].directory / "stderr.log").open("rb") as file:
            file.seek(self._printed)
            if new := file.read():
                self._printed += len(new)
                sys.stderr.write(new.decode(errors="replace"))
                sys.stderr.flush()

    def _verdict(self) -> int:
        failures = sorted((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.order)
        if not failures:
            stopped = any(rank.code == ExitCode.STOPPED_AND_SAVED for rank in self.ranks)
            return ExitCode.STOPPED_AND_SAVED if stopped else ExitCode.DONE
        first = failures[0]
        if self._hung:
            print("\n".join(self._hung), file=sys.stderr, flush=True)
            return ExitCode.CRASH
        if self.requests and (first.killed or first.code in (-self._sent, ExitCode.INTERRUPTED)):
            return self._verdict_of_stop(failures)
        _print_failure(first, failures[1:])
        return first.code if first.code in set(ExitCode) else ExitCode.CRASH

    def _verdict_of_stop(self, failures: list[Rank]) -> int:
        numbers = ", ".join(str(rank.number) for rank in sorted(failures, key=lambda rank: rank.number))
        if signal.SIGINT in self.requests[1:]:
            print(f"shardwright: interrupted; rank(s) {numbers} had not saved.", file=sys.stderr)
            return ExitCode.INTERRUPTED
        name = signal.Signals(self.requests[0]).name
        late = any(rank.killed for rank in failures)
        print(
            f"shardwright: rank(s) {numbers} had not saved "
            + (
                f"{self.grace_seconds:g} s after {name} (the grace period) and were killed."
                if late
                else f"when {name} came."
            )
            + " Earlier checkpoints are as they were.",
            file=sys.stderr,
        )
        return ExitCode.INTERRUPTED if self.requests[0] == signal.SIGINT else ExitCode.CRASH


def _print_failure(first: Rank, others: list[Rank]) -> None:
    """Says on stderr which rank failed first and why, then what became of the others."""
    outcome, name = first.outcome, f"rank {first.number} of {first.world_size}"
    if outcome and not outcome.get("message"):
        return  # it ended with a code on purpose, and has said why
    lines = []
    if outcome:
        lines.append(f"shardwright: {name}: {outcome['message']}")
        lines += outcome["traceback"].rstrip().splitlines()
    else:
        lines.append(f"shardwright: {name} {_end_of(first)}")
        lines += [f"  | {line}" for line in _tail(first.directory)]
    for rank in others:
        said = rank.outcome.get("message", "").splitlines()
        fate = "was killed" if rank.killed else ""
        if rank.outcome.get("lost_peer"):
            fate = f"lost its peer{_at(rank.outcome.get('place'))}"
        lines.append(f"then rank {rank.number}: {fate or (said[0] if said else _end_of(rank))}")
    lines.append(f"Output of the ranks: {first.directory.parent}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end_of(rank: Rank) -> str:
    assert rank.code is not None
    if rank.code >= 0:
        return f"ended with exit code {rank.code}"
    name = signal.Signals(-rank.code).name
    if rank.code == -signal.SIGKILL:
        return f"was ended by {name}. The kernel sends this signal when memory runs out"
    log = rank.directory / "stderr.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = re.search(r"^  what\(\): +(.*)", text, re.MULTILINE)  # of a native error that nothing caught
    return f"was ended by {name}{_at(place_of(main_stack(text)))}{f': {said[1]}' if said else ''}"


def _at(place: str | None) -> str:
    return f" at {place}" if place else ""


def _tail(directory: Path) -> list[str]:
    """The last lines that a rank wrote to stderr, or to stdout when there are none."""
    for name in ("stderr.log", "stdout.log"):
        path = directory / name
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines:
            return lines[-TAIL_LINES:]
    return []

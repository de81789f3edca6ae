"""Watches ranks: which rank failed first, which ranks must be ended, and what the exit code of the run is."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from shardwright.errors import ExitCode
from shardwright.launch.hang import HangDetector, main_stack
from shardwright.launch.hang_analysis import own_frame
from shardwright.launch.heartbeat import read_heartbeat
from shardwright.launch.processes import RankProcess
from shardwright.measure import clock

TICK_SECONDS = 0.02
PEERS_SECONDS = 5.0
"""How long ranks may take to end by themselves once another has failed; they are then killed."""
TAIL_LINES = 25

_FINAL = frozenset(set(ExitCode) - {ExitCode.CRASH})
_AGREED = frozenset({ExitCode.CHECK_FAILED, ExitCode.NOTHING_FITS, ExitCode.STOPPED_AND_SAVED})
"""Codes that all ranks return together: a rank that is still writing gets the grace period."""


class Watch:
    """One start of all ranks, until the last of them has ended."""

    def __init__(
        self,
        ranks: list[RankProcess],
        requests: list[int],
        grace_seconds: float,
        hang_seconds: float | None = None,
    ) -> None:
        self.ranks, self.requests, self.grace_seconds = ranks, requests, grace_seconds
        self._hang = None if hang_seconds is None else HangDetector(ranks, hang_seconds)
        self._hung: list[str] = []
        self._stop_at: float | None = None
        self._sent = 0
        self._printed = 0

    def until_all_ended(self) -> int:
        """Forwards signals and output, ends ranks that exceed their time, waits for all; returns the exit code."""
        while True:
            for rank in self.ranks:
                rank.poll()
            running = [rank for rank in self.ranks if rank.code is None]
            self._forward_signal(
                running
            )  # before anything is printed: a terminal that is gone must not delay the signal
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
        """Lines about a rank that hangs: found while all run, or when other ranks have timed out in a collective."""
        assert self._hang is not None
        failed = [rank for rank in self.ranks if rank.code is not None]
        if not failed:
            return self._hang.report()
        timed_out = all(rank.outcome.get("timed_out") for rank in failed)
        return self._hang.report(timed_out=True) if timed_out else []

    @property
    def restart_may_help(self) -> bool:
        """Whether to start the ranks again after a crash.

        A Shardwright error (a message without a traceback) describes a condition that a restart meets again, such as a spike
        or a disk that cannot be written: no restart helps.
        """
        first = min((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.order, default=None)
        if first is None or first.code in _FINAL:
            return False
        return bool(first.outcome.get("traceback")) or not first.outcome.get("message")

    @property
    def progressed(self) -> bool:
        """Whether a rank has done an update since this start."""
        beats = [read_heartbeat(rank.directory) for rank in self.ranks]
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

    def _forward_signal(self, running: list[RankProcess]) -> None:
        """Forwards the first stop signal to the ranks, once; they save and end by themselves."""
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
        """Passes rank 0's stderr on; silent once a rank has failed, so that the cause comes before the errors of its peers."""
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

    def _verdict_of_stop(self, failures: list[RankProcess]) -> int:
        numbers = ", ".join(str(rank.number) for rank in sorted(failures, key=lambda rank: rank.number))
        if signal.SIGINT in self.requests[1:]:
            print(f"shardwright: interrupted; rank(s) {numbers} had not saved.", file=sys.stderr)
            return ExitCode.INTERRUPTED
        name = signal.Signals(self.requests[0]).name
        late = any(rank.killed for rank in failures)
        when = (
            f"{self.grace_seconds:g} s after {name} (the grace period) and were killed" if late else f"when {name} came"
        )
        unsaved = f"shardwright: rank(s) {numbers} had not saved {when}. Earlier checkpoints are unchanged."
        print(unsaved, file=sys.stderr)
        return ExitCode.INTERRUPTED if self.requests[0] == signal.SIGINT else ExitCode.CRASH


def _print_failure(first: RankProcess, others: list[RankProcess]) -> None:
    """Prints on stderr which rank failed first and why, then how the others ended."""
    outcome, name = first.outcome, f"rank {first.number} of {first.world_size}"
    if outcome and not outcome.get("message"):
        return  # the rank chose its exit code and has printed the reason
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


def _end_of(rank: RankProcess) -> str:
    assert rank.code is not None
    if rank.code >= 0:
        return f"ended with exit code {rank.code}"
    name = signal.Signals(-rank.code).name
    if rank.code == -signal.SIGKILL:
        return f"was ended by {name}. The kernel sends this signal when memory runs out"
    log = rank.directory / "stderr.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = re.search(r"^  what\(\): +(.*)", text, re.MULTILINE)  # of a native error that nothing caught
    return f"was ended by {name}{_at(own_frame(main_stack(text)))}{f': {said[1]}' if said else ''}"


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

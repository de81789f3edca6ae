"""Starts ranks on this machine, watches them and ends them all: the only module that spawns.

A rank is `python -m MODULE ARGUMENTS` with torchrun's variables, in a session of its own, so that a terminal's Ctrl-C
reaches this process alone and a rank's children can be ended with it. Why this is not torch's elastic agent:
docs/decisions/0002-own-supervisor.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardwright.errors import ConfigError, ExitCode, ShardwrightError
from shardwright.measure import clock
from shardwright.parallel.process_group import (
    MALLOC_MMAP,
    MALLOC_TRIM,
    STARTED_HERE,
    STORE_FD,
    share_of_cores,
    started_by,
)

TICK_SECONDS = 0.02
PEERS_SECONDS = 5.0
"""How long ranks may take to end by themselves once another has failed; they are then killed."""
TAIL_LINES = 25
OUTCOME = "outcome.json"

_AGREED = frozenset({ExitCode.CHECK_FAILED, ExitCode.NOTHING_FITS, ExitCode.STOPPED_AND_SAVED})
"""Codes that all ranks come to together: one that is still writing gets the grace period."""
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")

# Ends the ranks when this process is killed. It reads the ranks' process groups from a pipe that closes with us.
_GUARD = """
import os, sys
groups = []
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""


def inside_a_launcher() -> bool:
    """Whether this process is already a rank (of torchrun, Slurm or `run_workers`) and must not spawn any."""
    return started_by() != "single"


# The ranks' side


def worker_main(function: Callable[[], int]) -> int:
    """The exit code of `function()`; what it raises is reported for the launcher to print, and becomes a code too.

    A `ShardwrightError` is one message and its own code; anything else is a traceback and 1.
    """
    message, trace, lost_peer = "", "", False
    try:
        return int(function())
    except ShardwrightError as error:
        code, message = int(error.exit_code), str(error)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        message = error.code if isinstance(error.code, str) else ""
    except BaseException as error:  # torch's CheckpointException is no Exception
        code, message, trace = int(ExitCode.CRASH), f"{type(error).__name__}: {error}", traceback.format_exc()
        lost_peer = _is_lost_peer(error)
    _report_outcome({"code": code, "message": message, "traceback": trace, "lost_peer": lost_peer})
    return code


def finish(code: int) -> NoReturn:
    """Ends this rank at once with `code`, after everything is written.

    Interpreter teardown is skipped: with torch's threads alive it raises SIGABRT now and then, after all is done.
    """
    if STARTED_HERE in os.environ and not (Path(os.environ[STARTED_HERE]) / OUTCOME).exists():
        _report_outcome({"code": code})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone."""
    while error is not None:
        named = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
        if named or any(mark in str(error) for mark in _LOST_PEER):
            return True
        error = error.__cause__
    return False


def _report_outcome(outcome: dict[str, Any]) -> None:
    """Leaves the outcome where the launcher looks; without our launcher, on stderr and where torchrun looks."""
    if directory := os.environ.get(STARTED_HERE):
        path = Path(directory) / OUTCOME
        path.with_suffix(".part").write_text(json.dumps({**outcome, "at": clock.now()}), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return
    text = outcome.get("traceback") or outcome.get("message")
    if not text:
        return
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    print(f"shardwright: rank {rank}: {text}", file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        seconds = int(datetime.fromisoformat(clock.date()).timestamp())
        extra = {"py_callstack": text, "timestamp": str(seconds)}
        error = {"message": {"message": outcome["message"], "extraInfo": extra}}
        Path(file).write_text(json.dumps(error), encoding="utf-8")


# The launcher's side


def run_workers(
    module: str,
    arguments: list[str],
    *,
    nproc_per_node: int,
    log_dir: Path,
    device: str = "cpu",
    threads: int | None = None,
    max_restarts: int = 0,
    grace_seconds: float = 30.0,
) -> int:
    """Runs `python -m module arguments` on `nproc_per_node` local ranks; returns the exit code of the run.

    log_dir: output of the ranks goes to a new directory in it; rank 0 also writes to this process's stdout and stderr.
    threads: CPU threads a rank; None leaves `OMP_NUM_THREADS` as the user set it, or shares the cores.
    max_restarts: how often all ranks are started anew after a crash.
    grace_seconds: how long ranks may take to save after SIGTERM, SIGUSR1 or Ctrl-C; they are then killed.

    Codes: 0 when every rank returned 0; 75 when ranks stopped and saved; the code of the rank that failed first, which is
    reported on stderr, when it is one of `ExitCode`, else 1; 130 after a second Ctrl-C. No process of the run is left.
    Call it in the main thread.
    """
    if nproc_per_node < 1:
        raise ConfigError(f"nproc_per_node = {nproc_per_node} is not positive.")
    environment = rank_environment(os.environ, nproc_per_node, device, threads)
    with _requests() as requests, _guard() as guard:
        for attempt in range(max_restarts + 1):
            with _started(
                module, arguments, nproc_per_node, _new_directory(log_dir), environment, guard
            ) as ranks:
                watch = _Watch(ranks, requests, grace_seconds)
                code = watch.until_all_ended()
            left = max_restarts - attempt
            if code != ExitCode.CRASH or requests or not left:
                break
            print(f"shardwright: starting all ranks again ({left} restarts left).", file=sys.stderr)
    return code


def rank_environment(
    inherited: Mapping[str, str], local_ranks: int, device: str, threads: int | None
) -> dict[str, str]:
    """The variables that all ranks get, from those of this process."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    share = str(threads or kept.get("OMP_NUM_THREADS") or share_of_cores(local_ranks))
    defaults |= {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share}
    if device == "cpu" and sys.platform == "linux" and MALLOC_MMAP not in kept:
        # Large freed blocks stay with the process; see process_group._keep_freed_blocks.
        defaults |= {MALLOC_MMAP: str(2**32), MALLOC_TRIM: str(2**34)}
    forced = {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share} if threads else {}
    return defaults | kept | forced


@dataclass
class _Rank:
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


class _Watch:
    """One start of all ranks, from the first to the last exit."""

    def __init__(self, ranks: list[_Rank], requests: list[int], grace_seconds: float) -> None:
        self.ranks, self.requests, self.grace_seconds = ranks, requests, grace_seconds
        self._handled = 0
        self._stop_at: float | None = None
        self._printed = 0

    def until_all_ended(self) -> int:
        """Waits, forwards requests and output, ends ranks that outlive their time; returns the exit code."""
        while True:
            for rank in self.ranks:
                rank.look()
            running = [rank for rank in self.ranks if rank.code is None]
            if not any(rank.failed for rank in self.ranks):
                self._print_stderr()
            if not running:
                return self._verdict()
            self._forward(running)
            if clock.now() >= self._deadline():
                for rank in running:
                    rank.killed = True
                    rank.kill_group()
            clock.sleep(TICK_SECONDS)

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

    def _forward(self, running: list[_Rank]) -> None:
        """Asks the ranks to stop, once; they save and end by themselves."""
        if not self.requests or self._stop_at is not None:
            return
        self._stop_at, number = clock.now(), self.requests[0]
        hint = " Press Ctrl-C again to end at once." if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        print(
            f"shardwright: {name}: stopping after this update and saving.{hint}", file=sys.stderr, flush=True
        )
        for rank in running:
            rank.send(signal.SIGTERM if number == signal.SIGHUP else number)

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
        if self.requests and (first.killed or first.code in (-self.requests[0], ExitCode.INTERRUPTED)):
            return self._verdict_of_stop(failures)
        _print_failure(first, failures[1:])
        return first.code if first.code in set(ExitCode) else ExitCode.CRASH

    def _verdict_of_stop(self, failures: list[_Rank]) -> int:
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


def _print_failure(first: _Rank, others: list[_Rank]) -> None:
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
        fate = "was killed" if rank.killed else "lost its peer" if rank.outcome.get("lost_peer") else ""
        lines.append(f"then rank {rank.number}: {fate or (said[0] if said else _end_of(rank))}")
    lines.append(f"Output of the ranks: {first.directory.parent}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end_of(rank: _Rank) -> str:
    assert rank.code is not None
    if rank.code >= 0:
        return f"ended with exit code {rank.code}"
    hint = ". The kernel sends it when memory runs out" if rank.code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-rank.code).name}{hint}"


def _tail(directory: Path) -> list[str]:
    """The last lines that a rank wrote to stderr, or to stdout when there are none."""
    for name in ("stderr.log", "stdout.log"):
        path = directory / name
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines:
            return lines[-TAIL_LINES:]
    return []


def _new_directory(log_dir: Path) -> Path:
    """A new numbered directory, so that a start never overwrites another's logs, of now or of before."""
    log_dir.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (log_dir / str(number)).mkdir()
            return log_dir / str(number)
        except FileExistsError:
            number += 1


@contextmanager
def _requests() -> Iterator[list[int]]:
    """Signals that ask to stop, in the order they come, while the context lasts."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _guard() -> Iterator[subprocess.Popen]:
    """The process that ends the ranks if this one is killed; it waits for lines with their process groups."""
    command = [sys.executable, "-I", "-S", "-c", _GUARD]
    nothing = subprocess.DEVNULL
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, text=True, start_new_session=True
    )
    try:
        yield guard
    finally:
        guard.communicate("done\n")


@contextmanager
def _started(
    module: str,
    arguments: list[str],
    count: int,
    directory: Path,
    environment: dict[str, str],
    guard: subprocess.Popen,
) -> Iterator[list[_Rank]]:
    """`count` ranks, of which nothing is left after the context."""
    ranks: list[_Rank] = []
    assert guard.stdin is not None
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(512)
            port = listening.getsockname()[1]
            for number in range(count):
                variables = _rank_variables(number, count, port, directory)
                held: tuple[int, ...] = ()
                if number == 0:
                    held = (listening.fileno(),)
                    variables[STORE_FD] = str(listening.fileno())
                process = _popen(
                    [module, *arguments], environment | variables, Path(variables[STARTED_HERE]), held
                )
                ranks.append(_Rank(number, count, process, Path(variables[STARTED_HERE])))
                guard.stdin.write(f"{process.pid}\n")
                guard.stdin.flush()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill_group()
            rank.process.wait()


def _rank_variables(rank: int, count: int, port: int, directory: Path) -> dict[str, str]:
    """torchrun's variables, so that any program that torchrun can start runs here too, and the rank's directory."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STARTED_HERE: str((directory / f"rank_{rank}").absolute()),
    }


def _popen(
    command: list[str], environment: dict[str, str], directory: Path, held: tuple[int, ...]
) -> subprocess.Popen:
    """One rank; rank 0, which holds the store's socket, writes to our stdout."""
    directory.mkdir()
    with (directory / "stderr.log").open("wb") as stderr, (directory / "stdout.log").open("wb") as stdout:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if held else stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=held,
        )

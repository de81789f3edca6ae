"""Starting ranks on this machine, and the guarantee that none is left."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from shardwright.backends.facts import backend_facts
from shardwright.errors import ConfigError, ExitCode
from shardwright.launch.output import without_waiting_for_readers
from shardwright.launch.watch import Rank, Watch
from shardwright.mesh.cluster_environment import (
    JOB,
    RESTARTS,
    STARTED_HERE,
    STORE_FD,
    job_of,
    stop_signals,
)
from shardwright.mesh.host_resources import local_resources, share_of_cores

# Ends the ranks when this process is killed. It reads the ranks' process groups from a pipe that closes with us.
_GUARD = """
import os, sys
groups = set()
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""


def run_workers(
    module: str,
    arguments: list[str],
    *,
    nproc_per_node: int,
    log_dir: Path,
    device: str = "cpu",
    threads: int | None = None,
    max_restarts: int = 0,
    fewer: Sequence[int] = (),
    grace_seconds: float = 30.0,
    hang_seconds: float | None = None,
    hold_signals: bool = False,
) -> int:
    """Runs `python -m module arguments` on `nproc_per_node` local ranks; returns the exit code of the run.

    log_dir: output of the ranks goes to a new directory in it; rank 0 also writes to this process's stdout and stderr.
    threads: CPU threads a rank; None leaves `OMP_NUM_THREADS` as the user set it, or shares the cores.
    max_restarts: how often all ranks are started anew after a crash; not after an error made for a person.
    fewer: numbers of ranks, falling, to go on with when a start has failed before its first update.
    grace_seconds: how long ranks may take to save after SIGTERM, SIGUSR1 or Ctrl-C; they are then killed.
    hang_seconds: how long a phase of a rank may last (see pulse.py); the run is then ended, and the rank named.
    hold_signals: ranks start with requests to stop held back, until they ask for them (`train.signals.StopFlag`).

    Codes: 0 when every rank returned 0; 75 when ranks stopped and saved; the code of the rank that failed first, which is
    reported on stderr, when it is one of `ExitCode`, else 1; 130 after a second Ctrl-C. No process of the run is left.
    Call it in the main thread.
    """
    if nproc_per_node < 1:
        raise ConfigError(f"nproc_per_node = {nproc_per_node} is not positive.")
    counts, job = [nproc_per_node, *fewer], job_of(os.environ).name or f"launcher {secrets.token_hex(4)}"
    with without_waiting_for_readers(), _requests() as requests, _guard() as guard:
        for attempt in range(max_restarts + 1):
            environment = rank_environment(os.environ, counts[0], device, threads)
            environment |= {RESTARTS: str(attempt), JOB: job}
            with _started(
                module, arguments, counts[0], _new_directory(log_dir), environment, guard, hold_signals
            ) as ranks:
                watch = Watch(ranks, requests, grace_seconds, hang_seconds)
                code = watch.until_all_ended()
            left = max_restarts - attempt
            if code != ExitCode.CRASH or requests or not left or not watch.worth_a_restart:
                break
            if len(counts) > 1 and not watch.progressed:
                del counts[0]
                print(
                    f"shardwright: the ranks failed before their first update: going on with {counts[0]}.",
                    file=sys.stderr,
                )
            print(f"shardwright: starting all ranks again ({left - 1} restarts left).", file=sys.stderr)
    return code


def rank_environment(
    inherited: Mapping[str, str], local_ranks: int, device: str, threads: int | None
) -> dict[str, str]:
    """The variables that all ranks get, from those of this process."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    # a profiler's own notes, which some builds of torch print at each start and stop
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "KINETO_LOG_LEVEL": "99"}
    resources = local_resources(inherited)
    share = str(threads or kept.get("OMP_NUM_THREADS") or share_of_cores(resources, [resources] * local_ranks))
    defaults |= {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share}
    defaults |= backend_facts(device).rank_environment(kept)
    forced = {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share} if threads else {}
    return defaults | kept | forced


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

    before = {number: signal.signal(number, receive) for number in stop_signals()}
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
    hold_signals: bool,
) -> Iterator[list[Rank]]:
    """`count` ranks, of which nothing is left after the context."""
    ranks: list[Rank] = []
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
                with _held_back(hold_signals):
                    process = _popen([module, *arguments], environment | variables, Path(variables[STARTED_HERE]), held)
                ranks.append(Rank(number, count, process, Path(variables[STARTED_HERE])))
                guard.stdin.write(f"{process.pid}\n")
                guard.stdin.flush()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill_group()
            guard.stdin.write(f"{-rank.process.pid}\n")  # once reaped, the number may become a stranger's
            guard.stdin.flush()
            rank.process.wait()


@contextmanager
def _held_back(hold: bool) -> Iterator[None]:
    """Children made in here start with requests to stop blocked, and find them pending when they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals() if hold else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def _popen(command: list[str], environment: dict[str, str], directory: Path, held: tuple[int, ...]) -> subprocess.Popen:
    """One rank; rank 0, which holds the store's socket, writes to our stdout."""
    directory.mkdir()
    with ExitStack() as files:
        stderr = files.enter_context((directory / "stderr.log").open("wb"))
        stdout = None if held else files.enter_context((directory / "stdout.log").open("wb"))
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=held,
        )

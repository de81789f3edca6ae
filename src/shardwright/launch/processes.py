"""Processes of ranks on this machine: started, signalled, and ended even where this process is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError, ExitCode
from shardwright.launch.rank import OUTCOME
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE, STORE_FD, stop_signals

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


@dataclass
class RankProcess:
    """A rank that this launcher has started."""

    number: int
    world_size: int
    process: subprocess.Popen
    directory: Path
    code: int | None = None
    ended_at: float = 0.0
    killed: bool = False
    outcome: dict[str, Any] = field(default_factory=dict)

    def poll(self) -> None:
        """Notices the end without reaping: the number of a zombie's process group is not given to another process."""
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
            self.code = self.outcome["code"]  # aborted after it had reported its result
        if self.failed:
            self.kill_group()  # its children hold copies of its sockets, so peers would not notice its end

    @property
    def failed(self) -> bool:
        return self.code not in (None, ExitCode.DONE, ExitCode.STOPPED_AND_SAVED)

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sorts failures: causes, then ranks that only lost a peer, then ranks that this launcher killed."""
        return self.killed, bool(self.outcome.get("lost_peer")), self.outcome.get("at", self.ended_at)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def guard_process() -> Iterator[subprocess.Popen]:
    """A process that ends the ranks if this process is killed; it reads the numbers of their process groups from its stdin."""
    command, nothing = [sys.executable, "-I", "-S", "-c", _GUARD], subprocess.DEVNULL
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, text=True, start_new_session=True
    )
    try:
        yield guard
    finally:
        guard.communicate("done\n")


@contextmanager
def started_ranks(
    module: str,
    arguments: list[str],
    count: int,
    directory: Path,
    environment: dict[str, str],
    guard: subprocess.Popen,
    hold_signals: bool,
) -> Iterator[list[RankProcess]]:
    """`count` ranks; no process of them is left after the context."""
    ranks: list[RankProcess] = []
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
                ranks.append(RankProcess(number, count, process, Path(variables[STARTED_HERE])))
                guard.stdin.write(f"{process.pid}\n")
                guard.stdin.flush()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill_group()
            guard.stdin.write(f"{-rank.process.pid}\n")  # once reaped, the number may be given to another process
            guard.stdin.flush()
            rank.process.wait()


@contextmanager
def _held_back(hold: bool) -> Iterator[None]:
    """Children started in this context begin with stop signals blocked; a signal that came is pending when they unblock."""
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
    """Starts one rank. Rank 0, which holds the store's socket, writes to our stdout."""
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


def output_of(module: str, arguments: list[str], purpose: str) -> str:
    """What `python -m module arguments` prints. Raises `ConfigError` with `purpose` and its last line when it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ConfigError(f"{purpose} failed: {lines[-1]}")
    return done.stdout

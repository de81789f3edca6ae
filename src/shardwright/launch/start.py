"""Runs ranks on this machine, and starts them again where a restart may help."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shardwright.backends.facts import backend_facts
from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError, ExitCode
from shardwright.launch.output import bounded_writes
from shardwright.launch.processes import guard_process, started_ranks
from shardwright.launch.watch import Watch
from shardwright.mesh.cluster_environment import (
    JOB,
    RESTARTS,
    job_of,
    stop_signals,
)
from shardwright.mesh.host_resources import local_resources, share_of_cores


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
    max_restarts: how often all ranks are started again after a crash; see `Watch.restart_may_help`.
    fewer: smaller numbers of ranks, falling: the next one is used when a start has failed before its first update.
    grace_seconds: how long ranks may take to save after SIGTERM, SIGUSR1 or Ctrl-C; they are then killed.
    hang_seconds: how long a phase of a rank may last (see heartbeat.py); the run is then ended, and the rank named.
    hold_signals: ranks start with stop signals blocked, until they unblock them (`train.signals.StopFlag`).

    Codes: 0 when every rank returned 0; 75 when ranks stopped and saved; the code of the rank that failed first, which is
    reported on stderr, when it is one of `ExitCode`, else 1; 130 after a second Ctrl-C. No process of the run is left.
    Call it in the main thread.
    """
    if nproc_per_node < 1:
        raise ConfigError(f"nproc_per_node = {nproc_per_node} is not positive.")
    counts, job = [nproc_per_node, *fewer], job_of(os.environ).name or f"launcher {secrets.token_hex(4)}"
    with bounded_writes(), _stop_requests() as requests, guard_process() as guard:
        for attempt in range(max_restarts + 1):
            environment = rank_environment(os.environ, counts[0], device, threads)
            environment |= {RESTARTS: str(attempt), JOB: job}
            with started_ranks(
                module, arguments, counts[0], _new_directory(log_dir), environment, guard, hold_signals
            ) as ranks:
                watch = Watch(ranks, requests, grace_seconds, hang_seconds)
                code = watch.until_all_ended()
            left = max_restarts - attempt
            if code != ExitCode.CRASH or requests or not left or not watch.restart_may_help:
                break
            if len(counts) > 1 and not watch.progressed:
                del counts[0]
                print(
                    f"shardwright: the ranks failed before their first update: the next start uses {counts[0]}.",
                    file=sys.stderr,
                )
            print(f"shardwright: starting all ranks again ({left - 1} restarts left).", file=sys.stderr)
    return code


def run_training_ranks(
    run: RunFile, run_json: str, counts: Sequence[int], device: str, log_dir: Path, max_restarts: int
) -> int:
    """`run_workers` for training. run_json: path of the resolved run file. counts: numbers of ranks to try, falling."""
    hardware = run.hardware
    return run_workers(
        "shardwright.train.worker",
        [run_json],
        nproc_per_node=counts[0],
        fewer=counts[1:],
        log_dir=log_dir,
        device=device,
        threads=hardware.threads_per_rank,
        max_restarts=max_restarts,
        grace_seconds=hardware.grace_seconds,
        hang_seconds=hardware.timeout_seconds,
        hold_signals=True,
    )


def rank_environment(
    inherited: Mapping[str, str], local_ranks: int, device: str, threads: int | None
) -> dict[str, str]:
    """The variables that all ranks get, from those of this process."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    # silences notes of torch's profiler, which some builds print at each start and stop
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "KINETO_LOG_LEVEL": "99"}
    resources = local_resources(inherited)
    share = str(threads or kept.get("OMP_NUM_THREADS") or share_of_cores(resources, [resources] * local_ranks))
    defaults |= {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share}
    defaults |= backend_facts(device).rank_environment(kept)
    forced = {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share} if threads else {}
    return defaults | kept | forced


def _new_directory(log_dir: Path) -> Path:
    """A new numbered directory: no start overwrites the logs of another."""
    log_dir.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (log_dir / str(number)).mkdir()
            return log_dir / str(number)
        except FileExistsError:
            number += 1


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """The stop signals that this process has received, in their order, while the context lasts."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""From a run file to ranks that train: checks and preparation before any process starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.config.output_paths import check_writable_directory
from shardwright.console import say
from shardwright.errors import ConfigError
from shardwright.launch import finish, inside_a_launcher, owned, run_training_ranks, worker_main
from shardwright.layout.legality import check_device, check_run
from shardwright.mesh.process_group import device_kind
from shardwright.train.preflight import prepare_run
from shardwright.train.worker import run_rank

RUN_FILE = "config.yaml"


def start_training(loaded: Loaded, nproc_per_node: int, least: int | None = None, max_restarts: int = 0) -> int:
    """Trains as `loaded` says and returns the exit code: starts ranks here, or is one under torchrun or Slurm.

    least: the smallest number of ranks to use when `nproc_per_node` ranks fail at their start; None: no fewer.
    max_restarts: how often ranks that failed are started again, from the newest good checkpoint.
    """
    if inside_a_launcher():
        finish(worker_main(lambda: run_rank(loaded, alone=True)))
    console = Console()
    counts = possible_counts(loaded, nproc_per_node, least or nproc_per_node, console)
    device = device_kind(loaded.run.hardware.device, counts[0])
    check_device(loaded.run, device)
    output_dir = Path(loaded.run.checkpoint.output_dir)
    check_writable_directory(output_dir, "checkpoint.output_dir")
    with owned(output_dir, "train", lambda text: say(console, text)):
        prepare_run(loaded, console, exported=True)
        return _start_ranks(loaded, counts, device, max_restarts, output_dir / "logs")


def _start_ranks(loaded: Loaded, counts: list[int], device: str, max_restarts: int, logs: Path) -> int:
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=logs, prefix="run-", suffix=".json") as run_json:
        run_json.write(loaded.to_json())  # beside the logs, so that a killed launcher leaves no file elsewhere
        run_json.flush()
        return run_training_ranks(loaded.run, run_json.name, counts, device, logs, max_restarts)


def possible_counts(loaded: Loaded, most: int, least: int, console: Console) -> list[int]:
    """The numbers of ranks from `most` down to `least` on which the objective divides; a line says why others are left out.

    Raises `ConfigError` where there is none, or where `most` is the only one asked for and does not divide.
    """
    found, refused = [], None
    for count in range(most, least - 1, -1):
        try:
            check_run(loaded, count)
        except ConfigError as error:
            refused = refused or error
            if least < most:
                say(console, f"Not on {count} ranks: {error.what}")
        else:
            found.append(count)
    if refused is not None and not found:
        raise refused
    return found

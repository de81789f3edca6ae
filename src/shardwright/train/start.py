"""From a checked run file to ranks that train: what is refused or prepared before any process starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from shardwright.checkpoint.store import find
from shardwright.config.load import Loaded
from shardwright.data.prepare import Prepared, prepare
from shardwright.data.updates import make_order
from shardwright.errors import ConfigError
from shardwright.launch import finish, inside_a_launcher, run_workers, worker_main
from shardwright.layout.legality import check_device, check_run, notices
from shardwright.measure.record import check_sinks
from shardwright.models.build import build_model
from shardwright.models.materialise import check_weights, weight_notices
from shardwright.parallel.apply import DTYPES, check_model
from shardwright.parallel.process_group import device_kind
from shardwright.train.exported import export_lines
from shardwright.train.objective import own_loss
from shardwright.train.optimizer import check_optimizer, learning_rate_factor
from shardwright.train.worker import run_rank

RUN_FILE = "config.yaml"


def start_training(
    loaded: Loaded, nproc_per_node: int, least: int | None = None, max_restarts: int = 0
) -> int:
    """Trains as `loaded` says and returns the exit code: starts ranks here, or is one under torchrun or Slurm.

    least: the smallest number of ranks to go on with when `nproc_per_node` fail at their start; None: no fewer.
    max_restarts: how often ranks that failed are started anew, from the newest good checkpoint.
    """
    if inside_a_launcher():
        finish(worker_main(lambda: run_rank(loaded, alone=True)))
    console = Console()
    counts = possible_counts(loaded, nproc_per_node, least or nproc_per_node, console)
    device = device_kind(loaded.run.hardware.device, counts[0])
    check_device(loaded.run, device)
    for notice in notices(loaded.run):
        console.print(notice, highlight=False, soft_wrap=True)
    prepare_run(loaded, console, exported=True)
    logs = Path(loaded.run.checkpoint.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=logs, prefix="run-", suffix=".json") as handed:
        handed.write(loaded.to_json())  # beside the logs: a launcher that is killed leaves nothing elsewhere
        handed.flush()
        return run_workers(
            "shardwright.train.worker",
            [handed.name],
            nproc_per_node=counts[0],
            fewer=counts[1:],
            log_dir=logs,
            device=device,
            threads=loaded.run.hardware.threads_per_rank,
            max_restarts=max_restarts,
            grace_seconds=loaded.run.hardware.grace_seconds,
            hang_seconds=loaded.run.hardware.timeout_seconds,
            hold_signals=True,
        )


def possible_counts(loaded: Loaded, most: int, least: int, console: Console) -> list[int]:
    """The numbers of ranks from `most` down to `least` on which the objective divides; the others are said, with the reason.

    Raises `ConfigError` where there is none, or where `most` is the only one asked for and does not divide.
    """
    found, refused = [], None
    for count in range(most, least - 1, -1):
        try:
            check_run(loaded, count)
        except ConfigError as error:
            refused = refused or error
            if least < most:
                console.print(f"Not on {count} ranks: {error.what}", highlight=False, soft_wrap=True)
        else:
            found.append(count)
    if refused is not None and not found:
        raise refused
    return found


def prepare_run(loaded: Loaded, console: Console, exported: bool = False) -> Prepared:
    """Refuses what would fail in a rank, and tokenises once for all of them; returns the training rows.

    exported: the run ends with the export that it asks for, which is checked too.
    """
    run = loaded.run
    model = build_model(run.model, DTYPES[run.precision.master_dtype])
    check_weights(model, run.model)
    check_model(model, run)
    check_optimizer(run.training)
    own_loss(run.training.loss)
    find(Path(run.checkpoint.output_dir), run.checkpoint.resume)
    check_sinks(run.logging.report_to)
    learning_rate_factor(run.training, run.training.max_steps or 1)
    train = prepare(run, "train")
    for prepared in (train, prepare(run, "validation")):
        if prepared is not None:
            for line in (prepared.summary(), *prepared.notices):
                console.print(line, highlight=False, soft_wrap=True)
    if train is None:
        raise ConfigError("data.train names no file.")
    for line in (*weight_notices(model, run.model), *(export_lines(run, model, train) if exported else ())):
        console.print(line, highlight=False, soft_wrap=True)
    order = make_order(run, train)
    if order.dropped:
        console.print(
            f"data.drop_last: {order.dropped} of {order.positions + order.dropped:,} rows are left out, the part-filled "
            "last update.",
            highlight=False,
            soft_wrap=True,
        )
    return train

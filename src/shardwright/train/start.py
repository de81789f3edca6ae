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
from shardwright.parallel.apply import DTYPES, check_model
from shardwright.parallel.process_group import device_kind
from shardwright.train.optimizer import check_optimizer, learning_rate_factor
from shardwright.train.worker import run_rank

RUN_FILE = "config.yaml"


def start_training(loaded: Loaded, nproc_per_node: int) -> int:
    """Trains as `loaded` says and returns the exit code: starts ranks here, or is one under torchrun or Slurm."""
    if inside_a_launcher():
        finish(worker_main(lambda: run_rank(loaded)))
    console = Console()
    check_run(loaded, nproc_per_node)
    device = device_kind(loaded.run.hardware.device, nproc_per_node)
    check_device(loaded.run, device)
    for notice in notices(loaded.run):
        console.print(notice, highlight=False, soft_wrap=True)
    prepare_run(loaded, console)
    output_dir = Path(loaded.run.checkpoint.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as directory:
        handed = Path(directory) / "run.json"
        handed.write_text(loaded.to_json(), encoding="utf-8")
        return run_workers(
            "shardwright.train.worker",
            [str(handed)],
            nproc_per_node=nproc_per_node,
            log_dir=output_dir / "logs",
            device=device,
            threads=loaded.run.hardware.threads_per_rank,
        )


def prepare_run(loaded: Loaded, console: Console) -> Prepared:
    """Refuses what would fail in a rank, and tokenises once for all of them; returns the training rows."""
    run = loaded.run
    model = build_model(run.model, DTYPES[run.precision.master_dtype])
    check_model(model, run)
    check_optimizer(run.training)
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
    order = make_order(run, train)
    if order.dropped:
        console.print(
            f"data.drop_last: {order.dropped} of {order.positions + order.dropped:,} rows are left out, the part-filled "
            "last update.",
            highlight=False,
            soft_wrap=True,
        )
    return train

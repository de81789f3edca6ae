"""Checks, preparations and notices before the first update, however the ranks were started."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from shardwright.checkpoint.manifest import read_config, read_manifest
from shardwright.checkpoint.resume import find_checkpoint, read_choice, resume_setting
from shardwright.checkpoint.settings import changes, refuse_unaccepted
from shardwright.config.load import Loaded
from shardwright.config.output_paths import check_writable_directory
from shardwright.config.rates import check_length
from shardwright.config.schema import RunFile
from shardwright.console import say
from shardwright.data.prepare import Prepared, make_order, prepare
from shardwright.errors import ConfigError, DamagedCheckpointError, ShardwrightError
from shardwright.launch import Heartbeat, LongWork, current_job
from shardwright.layout.legality import notices
from shardwright.loss.objective import own_loss
from shardwright.measure.metrics_log import check_trackers
from shardwright.mesh.cluster_environment import RankInfo
from shardwright.mesh.object_collectives import gather_objects
from shardwright.models.build import build_model
from shardwright.models.materialise import check_weights, weight_notices
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import check_model
from shardwright.torch_private import second_store
from shardwright.train.exported import export_lines
from shardwright.train.optimizer import check_optimizer, learning_rate_factor
from shardwright.train.positions import check_positions
from shardwright.train.rows_done import SavedPosition, resume_rows


def check_programs(run: RunFile) -> None:
    """Raises `ConfigError` for an optimizer, loss or schedule that does not exist or does not take its arguments."""
    check_optimizer(run.training)
    own_loss(run.training.loss)
    learning_rate_factor(run.training, run.training.max_steps or 1)


def prepare_run(loaded: Loaded, console: Console, exported: bool = False) -> Prepared:
    """Raises what would fail in a rank, and tokenises once for all ranks; returns the training rows.

    exported: whether the run will export its model, so that the export is checked too.
    """
    run = loaded.run
    for notice in notices(run):
        say(console, notice)
    check_writable_directory(Path(run.checkpoint.output_dir), "checkpoint.output_dir")
    check_programs(run)
    model = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
    check_weights(model, run.model)
    check_model(model, run)
    saved = _saved_position(loaded)
    check_trackers(run.logging.report_to)
    train = prepare(run, "train")
    splits = [prepared for prepared in (train, prepare(run, "validation")) if prepared is not None]
    for prepared in splits:
        for line in (prepared.summary(), *prepared.notices):
            say(console, line)
    if train is None:
        raise ConfigError("data.train names no file.")
    lines = [*weight_notices(model, run.model), *(export_lines(run, model, train) if exported else ())]
    order = make_order(run, train)
    if saved is not None and not run.data.streaming:
        resume_rows(order, saved, run, train.fingerprint)
    check_length(run.training, order.total_updates)
    lines += check_positions(model, run, [prepared.table for prepared in splits])
    if order.dropped:
        lines.append(
            f"data.drop_last: {order.dropped} of {order.segment.end + order.dropped:,} rows are left out: those of the "
            "part-filled last update."
        )
    for line in lines:
        say(console, line)
    return train


def _saved_position(loaded: Loaded) -> SavedPosition | None:
    """Where the checkpoint that the run will resume from stands; None where only the ranks together can find that out.

    Raises `CheckpointError` where `checkpoint.resume` names one that is not there, or where settings of the objective have
    changed that `checkpoint.accept_changes` does not name.
    """
    run = loaded.run
    if run.checkpoint.storage == "per_host":
        return None
    job, output_dir = current_job(), Path(run.checkpoint.output_dir)
    setting = resume_setting(run.checkpoint.resume, read_choice(output_dir), job.name if job.again else "")
    path = find_checkpoint(output_dir, setting)
    if path is None:
        return None
    try:
        manifest, config = read_manifest(path), read_config(path)
    except DamagedCheckpointError:  # the ranks name it and take the one before
        return None
    refuse_unaccepted(str(path), changes(config, loaded), run.checkpoint.accept_changes)
    return SavedPosition.of(manifest, config)


def prepare_run_in_ranks(loaded: Loaded, place: RankInfo, console: Console, heartbeat: Heartbeat) -> None:
    """`prepare_run` for ranks that torchrun or Slurm has started: the first rank of each host does it. Collective.

    Tokenising may take longer than a collective may: the other ranks wait in the store. An error of one rank is raised on all
    ranks.
    """
    refused: list[ShardwrightError] = []

    def prepare_here() -> None:
        try:
            prepare_run(loaded, console, exported=True)
        except ShardwrightError as error:
            refused.append(error)

    preparing = [rank for rank, local_rank in enumerate(gather_objects(place.local_rank)) if local_rank == 0]
    seconds = loaded.run.hardware.timeout_seconds
    LongWork(place, preparing, "prepares the run", seconds, second_store, heartbeat).run(prepare_here)
    for found in gather_objects(refused):
        for error in found:
            raise error

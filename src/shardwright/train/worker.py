"""One rank of a training run: `python -m shardwright.train.worker RUN.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.console import say
from shardwright.errors import ConfigError
from shardwright.launch import Heartbeat, Watchdog, answer_hang_reports, current_job, finish, worker_main
from shardwright.launch.lock import PATIENCE_SECONDS, lock_of, owned, read_owner
from shardwright.layout.legality import check_device, check_run
from shardwright.measure import clock
from shardwright.measure.environment import device_facts, versions
from shardwright.measure.flight_recorder import count_transfers, issued
from shardwright.mesh.cluster_environment import RankInfo
from shardwright.mesh.object_collectives import broadcast_object, gather_objects
from shardwright.mesh.process_group import Connection, connect
from shardwright.models.build import quiet_transformers
from shardwright.planner.answer import layout_name
from shardwright.planner.problem import layout_of
from shardwright.torch_private import second_store
from shardwright.train.exhausted import explaining_exhaustion
from shardwright.train.exported import export_arguments, export_directory, export_model
from shardwright.train.loop import Trainer
from shardwright.train.preflight import prepare_run_in_ranks
from shardwright.train.run_data import open_data
from shardwright.train.signals import StopFlag
from shardwright.train.update import UpdateEngine

WATCHDOG_SECONDS = 5
"""How much longer than a phase a collective may take, so that the hang report comes before the collective's time-out."""


def run_rank(loaded: Loaded, alone: bool = False) -> int:
    """Trains as one rank of the group that the environment names; returns the exit code.

    alone: torchrun or Slurm has started the ranks, so no launcher of ours has checked and described the run.
    """
    run, hardware = loaded.run, loaded.run.hardware
    quiet_transformers()
    stop, heartbeat = StopFlag(), Heartbeat.of_this_rank()
    count_transfers()
    answer_hang_reports(issued)
    timeout = hardware.timeout_seconds + WATCHDOG_SECONDS
    with (
        connect(
            hardware.device, timeout, hardware.threads_per_rank, lambda: stop.requested, hardware.numa_binding
        ) as connection,
        _own_directory(loaded, connection.rank_info),
    ):
        place = connection.rank_info
        watch = Watchdog(heartbeat, place.rank, place.world_size, hardware.timeout_seconds, second_store, issued)
        axes = check_run(loaded, connection.rank_info.world_size)
        check_device(run, connection.device.type)
        console = Console(quiet=place.rank != 0)
        if alone:
            prepare_run_in_ranks(loaded, place, console, heartbeat)
        data = open_data(run, axes, place.rank)
        exported = export_arguments(run) if place.rank == 0 and export_directory(run) else {}
        with explaining_exhaustion(loaded, axes, place.rank, connection.device, heartbeat) as watched:
            engine = watched.engine = UpdateEngine(run, axes, connection.device, data.updates)
            trainer = Trainer(loaded, engine, data, console, heartbeat)
            if place.rank == 0:
                _describe(loaded, engine, connection, console)
            code = trainer.train(stop, current_job())
        if code == 0 and (directory := export_model(run, engine.module, exported)) is not None:
            say(console, f"Wrote {directory} (Hugging Face format).")
        trainer.checkpoints.refuse_unsaved()
        watch.close()
    return code


@contextmanager
def _own_directory(loaded: Loaded, place: RankInfo) -> Iterator[None]:
    """Holds the lock of `output_dir`: our launcher holds it for its ranks, else rank 0 does. Collective.

    Where hosts may have disks of their own, the first rank of each host holds the lock of the directory that it sees.
    """
    run = loaded.run
    directory, shared = Path(run.checkpoint.output_dir), run.checkpoint.storage == "shared"

    def hold() -> ConfigError | None:
        try:
            patience = min(PATIENCE_SECONDS, run.hardware.timeout_seconds / 2)
            held.enter_context(owned(directory, "train", print, patience))
        except ConfigError as error:
            return error
        return None

    with ExitStack() as held:
        if place.started_by != "shardwright":
            refused = gather_objects(hold() if place.rank == 0 else None)
            owner = broadcast_object(read_owner(lock_of(directory, "train")))
            if not shared and not any(refused):
                other = place.local_rank == 0 and read_owner(lock_of(directory, "train")) != owner
                refused = gather_objects(hold() if other else None)
            for error in refused:
                if error is not None:
                    raise error
        yield


def _describe(loaded: Loaded, engine: UpdateEngine, connection: Connection, console: Console) -> None:
    """Prints what runs; saves the resolved run file with the origin of every value, and the environment."""
    output_dir = Path(loaded.run.checkpoint.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "config.yaml").write_text(loaded.to_yaml(origins=True), encoding="utf-8")
    environment = {
        "date": clock.date(),
        **versions(),
        **connection.configuration(),
        **device_facts(connection.device),
        "layout": layout_name(layout_of(loaded.run, engine.axes)),
        "parameters": engine.parameters,
        "loss_chunk_tokens": engine.loss_chunks.tokens,
    }
    (output_dir / "environment.json").write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")
    for notice in connection.notices:
        say(console, notice)
    precision = loaded.run.precision
    name = type(engine.module).__name__.removeprefix("FSDP")
    say(
        console,
        f"{name}: {engine.parameters:,} parameters, {loaded.run.parallelism.data_parallel} on {engine.axes}, "
        f"{connection.device} with {connection.threads} threads a rank, compute {precision.param_dtype}, "
        f"stored {precision.master_dtype}, reduced {precision.reduce_dtype}, "
        f"{engine.loss_chunks.describe()}; {loaded.run.training.global_batch_size} rows an update.",
    )
    if connection.device.type == "cuda" and (why := engine.waits_because()):
        say(console, f"Before each optimizer step the host waits for the GPU to know the loss: {why}.")


def main() -> int:
    return run_rank(Loaded.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    finish(worker_main(main))

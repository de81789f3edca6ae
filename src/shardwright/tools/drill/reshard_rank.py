"""A rank that reads one checkpoint in several layouts: `python -m shardwright.tools.drill.reshard_rank JOBS.json`.

In each layout the rank saves what it has read, writes down the rows that it will train on, and trains to the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.errors import ExitCode
from shardwright.launch import finish, worker_main
from shardwright.layout.legality import check_run
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.train.loop import Trainer
from shardwright.train.run_data import open_data
from shardwright.train.signals import StopFlag
from shardwright.train.update import UpdateEngine


def main() -> int:
    jobs = [Loaded.from_json(text) for text in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
    quiet_transformers()
    hardware = jobs[0].run.hardware
    with (
        StopFlag() as stop,
        connect(
            hardware.device, hardware.timeout_seconds, hardware.threads_per_rank, numa_binding=hardware.numa_binding
        ) as joined,
    ):
        rank, size = joined.rank_info.rank, joined.rank_info.world_size
        for loaded in jobs:
            axes = check_run(loaded, size)
            data = open_data(loaded.run, axes, rank)
            engine = UpdateEngine(loaded.run, axes, joined.device, data.updates)
            trainer = Trainer(loaded, engine, data, Console(quiet=True))
            trainer.resume()
            trainer.save()
            first = trainer.at.update
            rows = [
                [row for microbatch in data.loader.update(update).microbatches for row in microbatch.row_ids]
                for update in range(first, data.updates)
            ]
            text = json.dumps([axes.data_rank(rank), rows])
            (trainer.output_dir / f"rows-{rank}.json").write_text(text, encoding="utf-8")
            if (code := trainer.train(stop)) != ExitCode.DONE:
                return code
            engine.close()
    return 0


if __name__ == "__main__":
    finish(worker_main(main))

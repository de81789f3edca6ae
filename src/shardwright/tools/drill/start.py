"""The launcher of a run that will be broken, in a process of its own, called with RUN.json RANKS RESTARTS.

It does what `train` does after its checks, which the drill has made once, and does not load torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwright.config.load import Loaded
from shardwright.launch import owned, run_workers


def main() -> int:
    path, ranks, restarts = sys.argv[1:]
    run = Loaded.from_json(Path(path).read_text(encoding="utf-8")).run
    output_dir = Path(run.checkpoint.output_dir)
    with owned(output_dir, "train", print):
        return run_workers(
            "shardwright.train.worker",
            [path],
            nproc_per_node=int(ranks),
            log_dir=output_dir / "logs",
            device=run.hardware.device,
            threads=run.hardware.threads_per_rank,
            max_restarts=int(restarts),
            grace_seconds=run.hardware.grace_seconds,
            hang_seconds=run.hardware.timeout_seconds,
            hold_signals=True,
        )


if __name__ == "__main__":
    sys.exit(main())

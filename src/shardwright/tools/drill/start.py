"""The launcher of a run into which faults are injected, in a process of its own: arguments RUN.json RANKS RESTARTS.

The drill has made the checks of `train` once, so this launcher makes none and does not load torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwright.config.load import Loaded
from shardwright.launch import owned, run_training_ranks


def main() -> int:
    path, ranks, restarts = sys.argv[1:]
    run = Loaded.from_json(Path(path).read_text(encoding="utf-8")).run
    output_dir = Path(run.checkpoint.output_dir)
    with owned(output_dir, "train", print):
        return run_training_ranks(run, path, [int(ranks)], run.hardware.device, output_dir / "logs", int(restarts))


if __name__ == "__main__":
    sys.exit(main())

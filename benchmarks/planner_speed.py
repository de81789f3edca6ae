"""Prints how fast the planner is: layouts per second, and the wall time of whole commands in fresh processes.

    python benchmarks/planner_speed.py

`considered` is every legal layout of the space; `timed` those that were not ruled out by a bound and asked
one by one. CPU seconds are what the work takes on one core; wall time also depends on what else the machine
does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from shardwright.plan.space import cells, kinds_of, shells, variants
from shardwright.plan.verb import Request, make_search

CASES = (
    ("llama-3-8b", 8, 8192, 64),
    ("llama-3-70b", 64, 4096, 512),
    ("llama-3.1-8b", 64, 131072, 64),
    ("llama-3.1-405b", 16384, 8192, 2048),
    ("llama-3.1-405b", 100000, 8192, 20000),
)
COMMAND = (
    "from shardwright.plan.verb import Request, run_plan; import sys; "
    "run_plan(Request(model=sys.argv[1], devices=int(sys.argv[2]), device='h100-sxm-80gb', "
    "max_length=int(sys.argv[3]), "
    "global_batch_size=int(sys.argv[4])), write=lambda line: None); assert 'torch' not in sys.modules"
)


def one_by_one(seconds: float = 1.0) -> float:
    """Layouts per CPU second when each is timed and its peak asked for, without any bound."""
    search, _ = make_search(
        Request(model="llama-3.1-405b", devices=16384, max_length=8192, global_batch_size=2048)
    )
    done, start = 0, time.process_time()
    legal, _ = shells(search.job, search.devices)
    for shell in reversed(legal):
        for cell in cells(search.job, shell):
            stages = search.stage_blocks(cell)
            for kind in kinds_of(cell):
                for layout in variants(cell, kind):
                    search.clock.step(layout, stages)
                    search.needs(layout)
                    done += 1
            if time.process_time() - start > seconds:
                return done / (time.process_time() - start)
    return done / (time.process_time() - start)


def main() -> None:
    print(
        f"{'model':<16}{'devices':>8}{'considered':>12}{'timed':>8}"
        f"{'search CPU s':>14}{'layouts/s':>12}{'command wall s':>16}"
    )
    for model, devices, length, batch in CASES:
        search, _ = make_search(
            Request(model=model, devices=devices, max_length=length, global_batch_size=batch)
        )
        start = time.process_time()
        found = search.run()
        cpu = time.process_time() - start
        walls = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", COMMAND, model, str(devices), str(length), str(batch)],
                check=True,
                cwd=Path(__file__).parent.parent,
            )
            walls.append(time.perf_counter() - start)
        print(
            f"{model:<16}{devices:>8,}{found.considered:>12,}{found.timed:>8,}"
            f"{cpu:>14.2f}{found.considered / cpu:>12,.0f}{min(walls):>16.2f}"
        )
    print(f"one by one, no bounds: {one_by_one():,.0f} layouts per CPU second (time and peak of each)")


if __name__ == "__main__":
    main()

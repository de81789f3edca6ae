"""Prints how fast the planner is: layouts per second, and the wall time of whole commands in fresh processes.

    python benchmarks/planner_speed.py

`considered` is every legal layout of the space; `asked` those whose memory was asked for, because no bound
ruled them out. The command is the one that a user types, interpreter and imports included. CPU seconds are
what the work takes on one core; wall time also depends on what else the machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from shardwright.planner.space import kinds_of, layout_groups, mesh_shapes, variants
from shardwright.planner.verb import Request, make_search

CASES = (
    ("llama-3-8b", 8, 8192, 64),
    ("llama-3-70b", 64, 4096, 512),
    ("llama-3.1-8b", 64, 131072, 64),
    ("llama-3.1-405b", 16384, 8192, 2048),
    ("llama-3.1-405b", 100000, 8192, 20000),
)


def one_by_one(seconds: float = 1.0) -> float:
    """Layouts per CPU second when each is timed and its peak asked for, without any bound."""
    search, _ = make_search(Request(model="llama-3.1-405b", devices=16384, max_length=8192, global_batch_size=2048))
    done, start = 0, time.process_time()
    legal, _ = mesh_shapes(search.problem, search.devices)
    for mesh_shape in reversed(legal):
        for layout_group in layout_groups(search.problem, mesh_shape):
            stages = search.stage_blocks(layout_group)
            for kind in kinds_of(layout_group):
                for layout in variants(layout_group, kind):
                    search.clock.step(layout, stages)
                    search.needs(layout)
                    done += 1
            if time.process_time() - start > seconds:
                return done / (time.process_time() - start)
    return done / (time.process_time() - start)


def yardstick() -> float:
    """CPU seconds of ten million additions in a Python loop: how fast this machine is at the moment."""
    start, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - start


def command(model: str, devices: int, length: int, batch: int, times: int = 7) -> tuple[list[float], list[float]]:
    """(wall, CPU) seconds of the whole command in fresh processes, sorted."""
    arguments = ["--model", model, "--devices", str(devices), "--device", "h100-sxm-80gb"]
    arguments += ["--max-length", str(length), "--global-batch-size", str(batch)]
    # As installed packages run: with the bytecode of an earlier start.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    walls, cpus = [], []
    for _ in range(times):
        before, start = getrusage(RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "shardwright", "plan", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
            env=environment,
        )
        walls.append(time.perf_counter() - start)
        after = getrusage(RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return sorted(walls), sorted(cpus)


def main() -> None:
    print(f"Ten million additions in a Python loop take {yardstick():.2f} CPU seconds now.")
    print(
        f"{'model':<16}{'devices':>8}{'considered':>12}{'asked':>8}{'search CPU s':>14}{'layouts/s':>12}"
        f"{'command: wall best, median':>28}{'CPU best, median':>20}"
    )
    for model, devices, length, batch in CASES:
        search, _ = make_search(Request(model=model, devices=devices, max_length=length, global_batch_size=batch))
        start = time.process_time()
        found = search.run()
        cpu = time.process_time() - start
        walls, cpus = command(model, devices, length, batch)
        middle = len(walls) // 2
        print(
            f"{model:<16}{devices:>8,}{found.considered:>12,}{found.timed:>8,}{cpu:>14.2f}"
            f"{found.considered / cpu:>12,.0f}{walls[0]:>20.2f}{walls[middle]:>8.2f}{cpus[0]:>12.2f}{cpus[middle]:>8.2f}"
        )
    print(f"one by one, no bounds: {one_by_one():,.0f} layouts per CPU second (time and peak of each)")


if __name__ == "__main__":
    main()

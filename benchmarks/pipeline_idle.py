"""Idle time of pipeline ranks, measured and predicted, by schedule: python benchmarks/pipeline_idle.py [--schedules 1f1b,zbv]

Gloo ranks with one thread each, a Llama of 8 equal blocks with a small head, float32. Busy is the wall time inside forwards
and backwards of stages; idle is the rest of the schedule, as a share of ranks x time, median over n updates. Beside it:
(p - 1) / (m + p - 1), which holds for gpipe and 1f1b, and the action lists of layout/pipeline_schedules.py played with the
measured times of each action. More ranks than cores share them, and then idle time is lent to the other ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import scaffold

ROWS, LENGTH, VOCABULARY = 2, 128, 512
MODEL = scaffold.llama(
    LENGTH,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
)
KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def worker(task: dict[str, Any]) -> None:
    """One rank: seconds of the schedule and of each kind of action on each stage, update by update."""
    scaffold.rank_of_task(task)
    import torch.distributed as dist

    from shardwright.backends.backend import choose_backend
    from shardwright.parallel.pipeline import schedule_runner

    ranks = task["ranks"]
    spent: dict[tuple[int, str], list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, letter: str) -> None:
        original = getattr(owner, name)

        def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(stage, *args, **kwargs)
            kind = "I" if letter == "B" and kwargs.get("full_backward") is False else letter
            index = stage.stage.index if owner is schedule_runner.StageRunner else stage.stage_index
            spent[index, kind].append(time.perf_counter() - start)
            return result

        setattr(owner, name, call)

    if choose_backend("cpu").pipeline_runtime(task["schedule"]) is not None:
        timed(schedule_runner.StageRunner, "compute_forward", "F")
        timed(schedule_runner.StageRunner, "compute_backward", "B")
    else:
        for name, letter in KINDS.items():
            timed(schedule_runner.TorchStage, name, letter)
    settings = {"data_parallel": "ddp", "pp_size": ranks, "pp_schedule": task["schedule"]}
    engine = scaffold.make_engine(
        task["model"],
        LENGTH,
        ROWS * task["microbatches"],
        ROWS,
        **{f"parallelism__{key}": value for key, value in settings.items()},
    )
    kept = []
    for number in range(task["warmup"] + task["n"]):
        spent.clear()
        batch = scaffold.update_batch(engine, number, VOCABULARY)
        dist.barrier()
        start = time.perf_counter()
        engine.forward_backward(batch)
        dist.barrier()
        wall = time.perf_counter() - start
        engine.zero_grad()
        actions = {f"{stage} {kind}": values for (stage, kind), values in spent.items()}
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, (wall, sum(map(sum, spent.values())), actions))
        kept.append(everyone)
    scaffold.finish(task, kept[task["warmup"] :])


def played_idle(schedule: str, ranks: int, microbatches: int, measured: Any) -> float:
    """Idle share of the action lists with the median measured time of each action of each stage."""
    from shardwright.layout.pipeline_schedules import actions, chunks_of, stage_rank
    from shardwright.planner.pipeline_simulator import StageSeconds, play

    chunks = chunks_of(schedule)  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = defaultdict(list)
    for update in measured:
        for _, _, kinds in update:
            for key, values in kinds.items():
                seconds[key] += values
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    times = [
        StageSeconds(
            middle[f"{stage} F"],
            middle.get(f"{stage} I", middle.get(f"{stage} B", 0.0)),
            middle.get(f"{stage} W", 0.0),
        )
        for stage in range(ranks * chunks)
    ]
    lists = actions(schedule, ranks, chunks, microbatches)  # type: ignore[arg-type]
    result = play(lists, lambda stage: stage_rank(schedule, ranks, stage), times)  # type: ignore[arg-type]
    return 1 - sum(result.busy) / (ranks * result.total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved_1f1b,zero_bubble,zbv")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", default="2,4,8")
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
        return
    p = arguments.ranks
    print(f"{p} gloo ranks, 8 blocks, {ROWS} rows of {LENGTH} a microbatch, n={arguments.n}, medians")
    print("| schedule | microbatches | update, s | idle, measured | (p-1)/(m+p-1) | lists played |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for schedule in arguments.schedules.split(","):
            for m in map(int, arguments.microbatches.split(",")):
                measured = scaffold.start(
                    __file__,
                    {
                        "schedule": schedule,
                        "model": directory,
                        "microbatches": m,
                        "n": arguments.n,
                        "warmup": arguments.warmup,
                    },
                    p,
                )
                walls = [max(wall for wall, _, _ in update) for update in measured]
                idle = [1 - sum(busy for _, busy, _ in update) / (p * wall) for update, wall in zip(measured, walls)]
                row = {
                    "schedule": schedule,
                    "ranks": p,
                    "microbatches": m,
                    "n": arguments.n,
                    "seconds": statistics.median(walls),
                    "idle": statistics.median(idle),
                    "formula": (p - 1) / (m + p - 1),
                    "played": played_idle(schedule, p, m, measured),
                }
                print(
                    f"| {schedule} | {m} | {row['seconds']:.3f} | {row['idle']:.3f} | {row['formula']:.3f} "
                    f"| {row['played']:.3f} |",
                    flush=True,
                )
                if arguments.record:
                    scaffold.record("pipeline_idle", row)


if __name__ == "__main__":
    main()

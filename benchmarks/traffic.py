"""What ranks send, predicted and recorded: python benchmarks/traffic.py [--layouts zero3+tp2,...] [--bf16] [--rank 3]

Four gloo ranks run three updates of a small model under each layout; the third is recorded from the collectives (the first
verifies, and then ddp's ranks agree on an order of gradients). Calls and bytes of every rank are compared with
`planner/traffic.py`; the table shows one rank. Ends with 1 when anything differs on any rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scaffold import HERE, finish, rank_of_task, start, update_batch

RANKS, LENGTH, ROWS = 4, 32, 8
LAYOUTS = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hsdp2",
    "ddp+tp2",
    "zero3+tp2",
    "ddp+pp2",
    "ddp+pp2:zbv",
    "zero3+pp2:interleaved_1f1b",
    "ddp+pp2+tp2",
    "zero3+cp2",
    "ddp+cp4:ring",
    "ddp+cp2+tp2",
    "ddp+cp2+pp2",
)
MODEL = HERE.parent / "examples" / "tiny"


def worker(task: dict[str, Any]) -> None:
    """One rank: every layout, one after the other."""
    from dataclasses import asdict

    import torch
    import torch.distributed as dist

    from shardwright.arch.config_json import shape_from_config
    from shardwright.config import load_run_file
    from shardwright.layout.legality import check_run
    from shardwright.layout.names import with_layout
    from shardwright.measure.communication import CommunicationRecorder, compare_traffic
    from shardwright.mesh.device_mesh import axis_of_groups
    from shardwright.planner.problem import layout_of, problem_of
    from shardwright.planner.traffic import ShardCoordinates, traffic
    from shardwright.train.update import UpdateEngine

    rank_of_task(task)
    values = {
        "model.model_name_or_path": task["model"],
        "model.init": "random",
        "data.train": ["unused"],
        "data.max_length": LENGTH,
        "training.max_steps": 3,
        "training.global_batch_size": ROWS,
    }
    values |= {"precision.param_dtype": "bf16"} if task["bf16"] else {}
    vocabulary = json.loads((Path(task["model"]) / "config.json").read_text())["vocab_size"]
    found: dict[str, list[Any]] = {}
    for name in task["layouts"]:
        loaded = with_layout(load_run_file(None, values), name)
        run, axes = loaded.run, check_run(loaded, task["ranks"])
        engine = UpdateEngine(run, axes, torch.device("cpu"), 3)
        recorder = CommunicationRecorder(axis_of_groups(engine.mesh))
        for number in range(2):
            engine.forward_backward(update_batch(engine, number, vocabulary))
            engine.step()
        with recorder:
            engine.forward_backward(update_batch(engine, 2, vocabulary))
        at, ddp = axes.coordinates(engine.rank), run.parallelism.data_parallel == "ddp"
        place = ShardCoordinates(at["tp"], 0 if ddp else at["dp_shard"] * axes.cp + at["cp"])
        problem, layout = problem_of(run, shape_from_config(task["model"])), layout_of(run, axes)
        rows = compare_traffic(traffic(problem, layout, at["pp"], place=place), recorder.traffic(), buckets=ddp)
        own = [{**asdict(row), "equal": row.equal} for row in rows]
        gathered: list[Any] = [None] * task["ranks"]
        dist.all_gather_object(gathered, own)
        found[name] = gathered
    finish(task, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--model", default=str(MODEL), help="a Hugging Face directory")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, reduce in float32")
    parser.add_argument("--rank", type=int, default=0, help="the rank that the table shows")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
    layouts = arguments.layouts.split(",")
    task = {"layouts": layouts, "model": arguments.model, "bf16": arguments.bf16}
    found = start(__file__, task, RANKS)
    print(f"{RANKS} ranks, {ROWS} rows of {LENGTH} tokens an update; what rank {arguments.rank} sends")
    print("| layout | axis | collective | calls, predicted | recorded | bytes, predicted | recorded | all ranks |")
    print("|---|---|---|---|---|---|---|---|")
    different = 0
    for layout in layouts:
        ranks = found[layout]
        different += sum(not row["equal"] for rows in ranks for row in rows)
        for row in ranks[arguments.rank]:
            calls = f"{row['predicted_calls']:g}" if row["calls_count"] else "buckets"
            key = (row["axis"], row["collective"])
            same = all(r["equal"] for rows in ranks for r in rows if (r["axis"], r["collective"]) == key)
            print(
                f"| {layout} | {row['axis']} | {row['collective']} | {calls} | {row['recorded_calls']:g} "
                f"| {row['predicted_bytes']:,.0f} | {row['recorded_bytes']:,.0f} | {'equal' if same else 'DIFFERENT'} |"
            )
    if different:
        raise SystemExit(f"{different} rows of all ranks differ")


if __name__ == "__main__":
    main()

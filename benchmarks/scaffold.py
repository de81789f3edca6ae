"""What benchmarks share: ranks of a script, batches, one update of the product, loops that take turns, ratios, records.

A script with ranks calls `start`, which runs it again on N gloo ranks with `--task`; there `rank_of_task` joins the group and
`finish` hands a result back and ends the rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
Update = Callable[[int], float]


def start(
    script: str,
    task: dict[str, Any],
    ranks: int,
    environment: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> Any:
    """What rank 0 of `script --task ...` hands back. Raises `SystemExit` when a rank fails."""
    with tempfile.TemporaryDirectory() as scratch:
        task = {**task, "ranks": ranks, "store": f"{scratch}/store", "result": f"{scratch}/result.json"}
        command = [sys.executable, script, "--task", json.dumps(task)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                command, env={**os.environ, **KEEP_FREED, **threads, **(environment or {}), "RANK": str(rank)}
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=timeout) for process in processes]
            if any(codes):
                raise SystemExit("a rank failed")
        finally:
            for process in processes:
                process.kill()
        return json.loads(Path(task["result"]).read_text())


def rank_of_task(task: dict[str, Any]) -> int:
    """Joins the group of this task with one thread; this rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=task["ranks"])
    return rank


def finish(task: dict[str, Any], result: Any) -> NoReturn:
    """Hands rank 0's `result` back and ends this rank."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(task["result"]).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def llama(length: int, **sizes: Any) -> dict[str, Any]:
    """The config.json of a Llama."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "max_position_embeddings": length,
        **sizes,
    }


def random_rows(number: int, rows: int, length: int, vocabulary: int) -> tuple[Any, Any]:
    """Token ids [B, T] and shifted labels, the same on every rank."""
    import torch

    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(number))
    return ids, torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], dim=1)


def load_run(directory: str, length: int, global_rows: int, rows: int, **more: Any) -> Any:
    """The run file for the model in `directory`; `__` in a key stands for the dot."""
    from shardwright.config import load_run_file

    values = {
        "model.model_name_or_path": directory,
        "model.init": "random",
        "data.train": ["unused"],
        "data.max_length": length,
        "training.max_steps": 1000,
        "training.global_batch_size": global_rows,
        "training.per_device_train_batch_size": rows,
        "training.lr_scheduler_type": "constant",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return load_run_file(None, values)


def make_engine(directory: str, length: int, global_rows: int, rows: int, device: str = "cpu", **more: Any) -> Any:
    """The product's engine for `load_run` of the same arguments."""
    import torch
    import torch.distributed as dist

    from shardwright.layout.legality import check_run
    from shardwright.train.update import UpdateEngine

    loaded = load_run(directory, length, global_rows, rows, **more)
    return UpdateEngine(loaded.run, check_run(loaded, dist.get_world_size()), torch.device(device), 1000)


def update_batch(engine: Any, number: int, vocabulary: int) -> Any:
    """Update `number` of random rows: this data rank's microbatches."""
    from shardwright.data.loader import Microbatch, UpdateBatch

    t, length = engine.run.training, engine.run.data.max_length
    rows, ranks = t.per_device_train_batch_size, engine.axes.data_ranks
    count = t.global_batch_size // rows
    made = []
    for k in range(engine.axes.data_rank(engine.rank), count, ranks):
        ids, labels = random_rows(number * count + k, rows, length, vocabulary)
        made.append(Microbatch(k, ids, labels, tuple(range(rows))))
    slots = t.global_batch_size * length
    return UpdateBatch(number, tuple(made), t.global_batch_size * (length - 1), slots, slots, ())


def ours(engine: Any, vocabulary: int) -> Update:
    """One update of the product; returns the loss."""

    def update(number: int) -> float:
        engine.forward_backward(update_batch(engine, number, vocabulary))
        return engine.step().loss

    return update


def take_turns(updates: Mapping[str, Update], n: int, warmup: int) -> dict[str, dict[str, Any]]:
    """Of every loop: `seconds` of each update, `cpu` seconds of all ranks in it, and the `loss` of the first one.

    Loops take turns, so that load on the machine meets all alike; CPU seconds are what is left to compare under heavy load.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu": []} for name in updates}
    for number in range(warmup + n):
        for name in list(updates)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            loss = updates[name](number)
            used = time.process_time() - used
            dist.barrier()
            wall = time.perf_counter() - begun
            cpu = torch.tensor([used])
            dist.all_reduce(cpu)
            found[name].setdefault("loss", loss)
            if number >= warmup:
                found[name]["seconds"].append(wall)
                found[name]["cpu"].append(cpu.item())
    return found


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Speed of `mine` relative to `theirs`: the median over neighbouring updates, which the same load has met."""
    return statistics.median(b / a for a, b in zip(mine, theirs))


def spread(values: list[float]) -> str:
    """Half the distance between the quartiles, in per cent of the median."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"±{100 * (high - low) / 2 / statistics.median(values):.0f}%"


def record(benchmark: str, row: Mapping[str, Any]) -> None:
    """Appends a line to results.jsonl."""
    with (HERE / "results.jsonl").open("a") as file:
        file.write(json.dumps({"benchmark": benchmark, **row}) + "\n")

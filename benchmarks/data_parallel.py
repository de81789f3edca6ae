"""Our layouts beside a bare torch loop of the same layout: python benchmarks/data_parallel.py [--layouts ddp,zero3]

Two gloo ranks, a Llama of about 35M parameters in float32. Step times: both loops live in the same processes and take
turns, update by update, so that load on the machine meets both. Peak memory: each loop alone in fresh processes, host
memory above what imports and process groups take, with an allocator setting that returns freed blocks at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RANKS, ROWS, LENGTH, VOCABULARY = 2, 4, 256, 8192
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
}


def ours(directory: str, layout: str, microbatches: int) -> Callable[[int], float]:
    """One update of the product under `layout`; returns the loss."""
    import torch
    import torch.distributed as dist

    from shardwright.config import load_run_file
    from shardwright.data.loader import Microbatch, UpdateBatch
    from shardwright.layout.legality import check_run
    from shardwright.train.update import Engine

    values = {
        "model.model_name_or_path": directory,
        "model.init": "random",
        "data.train": ["unused"],
        "data.max_length": LENGTH,
        "training.max_steps": 1000,
        "training.global_batch_size": ROWS * RANKS * microbatches,
        "training.per_device_train_batch_size": ROWS,
        "training.lr_scheduler_type": "constant",
        "parallelism.data_parallel": layout,
    }
    loaded = load_run_file(None, values)
    axes = check_run(loaded, dist.get_world_size())
    engine = Engine(loaded.run, axes, torch.device("cpu"), 1000)

    def update(number: int) -> float:
        made = []
        for k in range(microbatches):
            ids, labels = rows(number * microbatches + k)
            made.append(Microbatch(k * RANKS + dist.get_rank(), ids, labels, tuple(range(ROWS))))
        targets = RANKS * microbatches * ROWS * (LENGTH - 1)
        slots = RANKS * microbatches * ROWS * LENGTH
        engine.forward_backward(UpdateBatch(number, tuple(made), targets, slots, slots, ()))
        return engine.step().loss

    return update


def bare(directory: str, layout: str, microbatches: int) -> Callable[[int], float]:
    """The loop a careful user writes with torch alone for the same layout."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    runner: Any = model
    if layout == "ddp":
        runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=layout == "zero3")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(runner.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    targets = microbatches * ROWS * (LENGTH - 1)

    def update(number: int) -> float:
        total = torch.zeros(())
        for k in range(microbatches):
            ids, labels = rows(number * microbatches + k)
            last = k == microbatches - 1
            if layout == "ddp":
                runner.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last or layout != "zero1")
                model.set_reshard_after_backward(last or layout == "zero3")
            logits = runner(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(runner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        dist.all_reduce(total)
        return total.item() / RANKS

    return update


def rows(number: int) -> tuple[Any, Any]:
    """Random rows and shifted labels of this rank; equal for both loops."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(number * 1009 + dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    return ids, labels


def peak_rss_bytes() -> int:
    """Peak of this process's anonymous memory since `clear_refs`, from the kernel."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def worker(task: dict[str, Any]) -> None:
    """One rank: times both loops in turn, or takes the memory of one."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=RANKS)
    result: dict[str, Any] = {}
    loops = {"ours": ours, "bare": bare}
    if task["what"] == "time":
        updates = {
            name: loop(task["model"], task["layout"], task["microbatches"]) for name, loop in loops.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(task["warmup"] + task["n"]):
            names = list(loops) if number % 2 else list(loops)[::-1]
            for name in names:
                dist.barrier()
                start = time.perf_counter()
                updates[name](number)
                dist.barrier()
                if number >= task["warmup"]:
                    seconds[name].append(time.perf_counter() - start)
        result = {"seconds": seconds}
    else:
        import shardwright.train.update  # noqa: F401  both sides import the same, so the base is the same

        torch.ones(512, 512, requires_grad=True).sum().backward()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        base = peak_rss_bytes()
        update = loops[task["what"]](task["model"], task["layout"], task["microbatches"])
        for number in range(3):
            update(number)
        peak = torch.tensor([float(peak_rss_bytes() - base)])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        result = {"bytes": peak.item()}
    if rank == 0:
        Path(task["result"]).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run(directory: str, layout: str, what: str, microbatches: int, n: int, warmup: int) -> dict[str, Any]:
    """Starts the ranks of one task and returns rank 0's result."""
    with tempfile.TemporaryDirectory() as scratch:
        task = {
            "what": what,
            "layout": layout,
            "model": directory,
            "microbatches": microbatches,
            "n": n,
            "warmup": warmup,
            "store": f"{scratch}/store",
            "result": f"{scratch}/result.json",
        }
        keep = {"MALLOC_MMAP_THRESHOLD_": "65536"} if what != "time" else {}
        if what == "time":
            keep = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
        ranks = []
        for rank in range(RANKS):
            environment = {
                **os.environ,
                **keep,
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
            command = [sys.executable, str(HERE), "--task", json.dumps(task)]
            ranks.append(subprocess.Popen(command, env=environment))
        codes = [process.wait(timeout=900) for process in ranks]
        if any(codes):
            raise SystemExit(f"{layout} {what}: a rank failed")
        return json.loads(Path(task["result"]).read_text())


def spread(values: list[float]) -> str:
    """Half the distance between the quartiles, in per cent of the median."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"±{100 * (high - low) / 2 / statistics.median(values):.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default="ddp,zero1,zero2,zero3")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("-n", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
        return
    print(
        f"{RANKS} gloo ranks, {ROWS} rows of {LENGTH} a rank, {arguments.microbatches} microbatch(es), n={arguments.n}"
    )
    print(
        "| layout | ours, s/update | bare torch | tokens/s ratio | peak memory, ours | bare torch | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for layout in arguments.layouts.split(","):
            settings = (arguments.microbatches, arguments.n, arguments.warmup)
            seconds = run(directory, layout, "time", *settings)["seconds"]
            mine, theirs = (statistics.median(seconds[name]) for name in ("ours", "bare"))
            # pairs of neighbouring updates: what disturbs one disturbs the other
            ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["bare"]))
            row = {
                "layout": layout,
                "ours_seconds": mine,
                "bare_seconds": theirs,
                "ratio": ratio,
                "n": arguments.n,
            }
            memory = ["n/a"] * 3
            if not arguments.no_memory:
                peaks = {name: run(directory, layout, name, *settings)["bytes"] for name in ("ours", "bare")}
                memory = [f"{peaks['ours'] / 1e6:.0f} MB", f"{peaks['bare'] / 1e6:.0f} MB"]
                memory.append(f"{peaks['ours'] / peaks['bare']:.3f}")
                row |= {"ours_bytes": peaks["ours"], "bare_bytes": peaks["bare"]}
            print(
                f"| {layout} | {mine:.3f} {spread(seconds['ours'])} | {theirs:.3f} {spread(seconds['bare'])} "
                f"| {ratio:.3f} | {' | '.join(memory)} |",
                flush=True,
            )
            if arguments.record:
                with (HERE.parent / "results.jsonl").open("a") as file:
                    file.write(json.dumps({"benchmark": "data_parallel", **row}) + "\n")


if __name__ == "__main__":
    main()

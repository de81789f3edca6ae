"""Our layouts beside a bare torch loop of the same layout: python benchmarks/data_parallel.py [--layouts ddp,zero3]

Two gloo ranks, a Llama of about 35M parameters in float32 (or bf16). Step times: both loops live in the same processes and take
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
from pathlib import Path
from typing import Any

from loops import LENGTH, MODEL, ROWS, Job, bare, ours

HERE = Path(__file__).resolve()
RANKS = 2


def peak_rss_bytes() -> int:
    """Peak of this process's anonymous memory since `clear_refs`, from the kernel."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def worker(task: dict[str, Any]) -> None:
    """One rank: times both loops in turn, or takes the memory of one."""
    import torch
    import torch.distributed as dist

    from shardwright.mesh.shard_geometry import full_tensor

    rank = int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=RANKS)
    result: dict[str, Any] = {}
    job = Job(task["model"], task["layout"], task["microbatches"], task["bf16"], settings=task["settings"])
    kind = "ddp" if job.layout == "ddp" else "fully_shard"
    if task["what"] == "time":
        first, engine = ours(job)
        start = {name: full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
        updates = {"ours": first, "bare": bare(job, kind, start)}
        seconds: dict[str, list[float]] = {name: [] for name in updates}
        for number in range(task["warmup"] + task["n"]):
            names = list(updates) if number % 2 else list(updates)[::-1]
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
        update = ours(job)[0] if task["what"] == "ours" else bare(job, kind)
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


def run(
    directory: str,
    layout: str,
    what: str,
    microbatches: int,
    n: int,
    warmup: int,
    bf16: bool,
    settings: list[str],
) -> dict[str, Any]:
    """Starts the ranks of one task and returns rank 0's result."""
    with tempfile.TemporaryDirectory() as scratch:
        task = {
            "what": what,
            "layout": layout,
            "model": directory,
            "microbatches": microbatches,
            "n": n,
            "warmup": warmup,
            "bf16": bf16,
            "settings": settings,
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
    parser.add_argument("--bf16", action="store_true", help="compute and reduce in bf16 (bare ddp: autocast)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the run file, for ours")
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
    print("| layout | ours, s/update | bare torch | tokens/s ratio | peak memory, ours | bare torch | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for layout in arguments.layouts.split(","):
            settings = (arguments.microbatches, arguments.n, arguments.warmup, arguments.bf16)
            settings += (arguments.set,)
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
                "bf16": arguments.bf16,
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

"""Saving and resuming against plain torch.distributed.checkpoint: python benchmarks/checkpoint.py [--gigabytes 1] [--record]

Two gloo ranks, a Llama in float32 under zero3 with AdamW moments, one thread a rank. Every kind is measured once in each of n
rounds, in an order that turns, after one round that is not counted; a time is the slowest rank's. Files are in the page
cache when they are read, so that the disk, equal for all, hides nothing.

- `save`: ours at once, with checksums and fsync; DCP's `save` of the same tensors, with fsync.
- `async_save`: the time that training is held up: the call, the wait before the optimizer step, and the polls between
  updates. DCP's `async_save`: the call. Beside it, what an update takes with and without a save beside it.
- `resume`: `restore` into a fresh optimizer; reading the files of the checkpoint and checksumming them, each rank its own,
  into memory that is there, and into memory of which two thirds are asked for first, as the moments are in a process that
  resumes (the system then has to find and clear the pages); DCP's `load`, without checksums, into moments that are there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
HERE = Path(__file__).resolve().parent
KINDS = ("save", "dcp save", "async", "dcp async", "update", "read", "read fresh", "resume", "dcp load")


def slowest(seconds: float) -> float:
    """The largest of all ranks' times."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


class Bench:
    """The engine, and one method a kind; each returns seconds."""

    def __init__(self, directory: Path, model: str, gigabytes: float) -> None:
        import torch
        import torch.distributed as dist
        from tests.gloo.engine import batches_for, make_engine, run_file

        from shardwright.checkpoint.directory import Retention
        from shardwright.checkpoint.saver import Saver

        width, block = 1024, 4 * 1024**2 + 3 * 1024 * 2816
        layers = max(1, round((gigabytes * 1e9 / 12 - 2 * 8192 * width) / block))
        config = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 2816,
            "vocab_size": 8192,
        }
        config |= {
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "tie_word_embeddings": False,
        }
        wide = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
        loaded = run_file(model, model__config_overrides=config, training__global_batch_size=2, **wide)
        self.engine, self.rank = make_engine(loaded), dist.get_rank()
        self.batch = lambda: batches_for(self.engine, 0, rows=2, length=16)
        self.directory, self.torch, self.dist = directory, torch, dist
        self.saver = Saver(directory / "ours", Retention(1))
        self.beside = Saver(directory / "ours", Retention(1), background=True)
        self.number, self.beside_updates = 0, []
        self.update()

    def state(self) -> dict[str, Any]:
        from shardwright.checkpoint.restore import current_state

        return current_state(self.engine.module, self.engine.optimizer, self.engine.params)

    def manifest(self) -> Any:
        from shardwright.checkpoint.manifest import Manifest

        self.number += 1
        return Manifest(self.number, 0, "", "", 2, "", "")

    def timed(self, work: Callable[[], object]) -> float:
        self.dist.barrier()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def update(self) -> float:
        batch = self.batch()

        def work() -> None:
            self.engine.forward_backward(batch)
            self.engine.step()

        return self.timed(work)

    def save(self) -> float:
        def work() -> None:
            self.saver.save(self.state(), self.manifest(), "")
            self.saver.finish()

        return self.timed(work)

    def dcp_save(self) -> float:
        from torch.distributed.checkpoint import save

        shutil.rmtree(self.directory / "dcp", ignore_errors=True)
        return self.timed(lambda: save(self.state(), checkpoint_id=self.directory / "dcp"))

    def async_(self) -> float:
        state, batch = self.state(), self.batch()
        held = self.timed(lambda: self.beside.save(state, self.manifest(), ""))
        start = time.perf_counter()
        self.engine.forward_backward(batch)
        middle = time.perf_counter()
        self.beside.before_step()
        waited = time.perf_counter() - middle
        self.engine.step()
        self.beside_updates.append(slowest(time.perf_counter() - start))
        while self.beside.pending:
            held += self.timed(self.beside.poll)
            if self.beside.pending:
                self.update()
        return held + waited

    def dcp_async(self) -> float:
        from torch.distributed.checkpoint import async_save

        state = self.state()
        shutil.rmtree(self.directory / "dcp async", ignore_errors=True)
        futures: list[Any] = []
        held = self.timed(lambda: futures.append(async_save(state, checkpoint_id=self.directory / "dcp async")))
        futures[0].result()
        return held

    def newest(self) -> Path:
        from shardwright.checkpoint.resume import find_checkpoint

        path = find_checkpoint(self.directory / "ours", "auto")
        assert path is not None
        return path

    def read(self) -> float:
        """Reads this rank's own file into memory that is there and checksums it, piece by piece."""
        return self._read(0.0)

    def read_fresh(self) -> float:
        return self._read(2 / 3)

    def _read(self, fresh: float) -> float:
        import xxhash

        path = self.newest() / "tensors" / f"rank-{self.rank:05d}.safetensors"
        piece, size = 4 * 2**20, path.stat().st_size
        held = round(size * (1 - fresh)) // piece * piece if fresh else size
        there = memoryview(self.torch.ones(held, dtype=self.torch.uint8).numpy())
        ctypes.CDLL(None).malloc_trim(0)

        def work() -> None:
            new = memoryview(self.torch.empty(size - held, dtype=self.torch.uint8).numpy())
            with path.open("rb") as file:
                for begin in range(0, size, piece):
                    part = there[begin : begin + piece] if begin < held else new[begin - held :][:piece]
                    os.preadv(file.fileno(), [part], begin)
                    xxhash.xxh3_64_hexdigest(part)

        return self.timed(work)

    def resume(self) -> float:
        from shardwright.checkpoint.restore import restore

        engine, path = self.engine, self.newest()
        engine.optimizer.state.clear()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, as if it had never been there
        return self.timed(lambda: restore(path, engine.module, engine.optimizer, engine.params))

    def dcp_load(self) -> float:
        from torch.distributed.checkpoint import load

        return self.timed(lambda: load(self.state(), checkpoint_id=self.directory / "dcp"))


def measure(directory: Path, model: str, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Seconds of each kind in each round, on one rank."""
    bench = Bench(directory, model, gigabytes)
    methods = {"async": "async_"} | {kind: kind.replace(" ", "_") for kind in KINDS if kind != "async"}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        turn = number % len(KINDS) if number else 0
        for kind in KINDS[turn:] + KINDS[:turn]:
            seconds = slowest(getattr(bench, methods[kind])())
            if number:
                found[kind].append(seconds)
    bytes_ = sum(path.stat().st_size for path in bench.newest().rglob("rank-*"))
    beside = bench.beside_updates[1:]
    return {"seconds": found, "beside": beside, "bytes": bytes_, "staging": bench.beside.staging_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    from tests.gloo.engine import LLAMA
    from tests.gloo.ranks import run_ranks

    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        place = Path(directory)
        found = run_ranks(measure, 2, place, LLAMA, arguments.gigabytes, arguments.rounds, timeout=1500.0)[0]
    seconds, n = found["seconds"], arguments.rounds
    print(
        f"{found['bytes'] / 1e9:.2f} GB of weights and optimizer state, 2 ranks, n = {n}; median (least to most) in seconds"
    )
    for kind, values in {**seconds, "update beside a save": found["beside"]}.items():
        print(f"{kind:<22}{statistics.median(values):8.3f}  ({min(values):.3f} to {max(values):.3f})")
    ratios = {}
    for name, (a, b) in {
        "async held up / save": ("async", "save"),
        "dcp async held up / dcp save": ("dcp async", "dcp save"),
        "async held up / dcp async held up": ("async", "dcp async"),
        "save / dcp save": ("save", "dcp save"),
        "resume / reading and checksumming": ("resume", "read fresh"),
        "resume / reading to memory there": ("resume", "read"),
        "resume / dcp load": ("resume", "dcp load"),
    }.items():
        rounds = sorted(x / y for x, y in zip(seconds[a], seconds[b]))
        ratios[name] = statistics.median(rounds)
        print(f"{name:<36}{ratios[name]:6.3f}  ({rounds[0]:.3f} to {rounds[-1]:.3f})")
    print(f"staging copy: {found['staging'] / 1e6:.0f} MB a rank")
    if arguments.record:
        line = {"benchmark": "checkpoint", "bytes": found["bytes"], "n": n, **ratios}
        with (HERE / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

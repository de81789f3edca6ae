"""Prints how long it takes to pack a million documents, how full the rows are, and what TRL's packing takes beside it.

    python benchmarks/packing.py [--documents 1000000] [--runs 3] [--no-peer] [--record]

Documents have log-normal lengths of mean about 645, clipped at 4,096, and random token ids. Ours is the plan
(`Table.make`, written to disk) and one pass of the loader over every row. The peer is
`trl.pack_dataset(strategy="bfd")` on the same documents in an Arrow file: it copies the tokens into packed rows,
and no pass over its rows is counted. Each is timed in fresh processes of one thread on one core, in turn. Memory is
the growth of the process's peak resident size over the size before the call, files mapped included. CPU time is
printed beside wall time, for machines that do other work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

LENGTH, MEAN, SIGMA, VOCABULARY = 4096, 645, 1.0, 32_000
HERE = Path(__file__).resolve().parent


def write_documents(path: Path, count: int, arrow: bool) -> None:
    """The documents as a directory of ours, and as an Arrow file where the peer reads one."""
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count))
    lengths = np.clip(drawn.astype(np.int64), 2, LENGTH)
    ends = np.cumsum(lengths)
    path.mkdir()
    np.save(path / "documents.npy", np.stack([ends, 0 * ends, np.arange(count)], axis=1))
    meta = {"dtype": "uint16", "tokens": int(ends[-1]), "tokens_digest": "random", "files": ["random"]}
    (path / "meta.json").write_text(json.dumps(meta))
    writer: Any = None
    with open(path / "tokens.bin", "wb") as out:
        for first in range(0, count, 10_000):
            sizes = lengths[first : first + 10_000]
            ids = rng.integers(0, VOCABULARY, int(sizes.sum()), np.uint16)
            ids.tofile(out)
            if arrow:
                import pyarrow as pa

                offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
                lists = pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32)))
                batch = pa.record_batch([lists], names=["input_ids"])
                writer = writer or pa.ipc.new_stream(str(path / "documents.arrow"), batch.schema)
                writer.write_batch(batch)
    if writer is not None:
        writer.close()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def pack_ours(path: Path) -> dict[str, float]:
    """Plan and pass in this process."""
    from shardwright.data.documents import Documents
    from shardwright.data.loader import Loader
    from shardwright.data.order import RowOrder
    from shardwright.data.packing import RowRules
    from shardwright.data.table import Table

    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    table = Table.make(Documents.open(path), RowRules(LENGTH, "split", "bfd", seed=42))
    plan, plan_cpu = time.perf_counter() - start, time.process_time() - cpu
    grown = peak_bytes() - before
    order = RowOrder(len(table), global_batch_size=16, num_train_epochs=1)
    loader = Loader(table, order, data_rank=0, data_ranks=1, microbatch_rows=4, pad_id=0)
    slots = tokens = 0
    for batch in loader:
        slots, tokens = slots + batch.slots, tokens + batch.real_tokens
    return {
        "plan_seconds": plan,
        "plan_cpu_seconds": plan_cpu,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "rows": len(table),
        "full": tokens / (len(table) * LENGTH),
        "plan_bytes": grown,
    }


def pack_peer(path: Path) -> dict[str, float]:
    """TRL's packing in this process."""
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import pack_dataset

    disable_caching()
    disable_progress_bars()
    documents = Dataset.from_file(str(path / "documents.arrow"))
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    packed = pack_dataset(documents, LENGTH, "bfd")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    grown = peak_bytes() - before
    tokens = sum(map(sum, packed.with_format(None)["seq_lengths"]))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rows": len(packed),
        "full": tokens / (len(packed) * LENGTH),
        "plan_bytes": grown,
    }


def in_process(kind: str, path: Path) -> dict[str, float]:
    """The result of `kind` in a fresh process of one thread on one core."""
    core = max(os.sched_getaffinity(0))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, str(path)],
        env=os.environ | threads,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        kind, path = options.child
        print(json.dumps((pack_ours if kind == "ours" else pack_peer)(Path(path))))
        return
    peer = not options.no_peer and importlib.util.find_spec("trl") is not None
    if not peer:
        reason = "--no-peer" if options.no_peer else "trl is not installed (pip install --no-deps trl accelerate)"
        print(f"No peer: {reason}.")
    found: dict[str, list[dict[str, float]]] = {"ours": [], **({"trl": []} if peer else {})}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "documents"
        write_documents(path, options.documents, peer)
        for run in range(options.runs):
            for kind, results in found.items():
                for old in path.glob("rows-*"):
                    old.rename(Path(directory) / f"{run}-{old.name}")
                results.append(in_process(kind, path))
    for kind, results in found.items():
        show(kind, results)
        if options.record:
            middle = {key: median(result[key] for result in results) for key in results[0]}
            line = {"benchmark": "packing", "kind": kind, "documents": options.documents, "n": len(results)}
            with open(HERE / "results.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line | middle) + "\n")
    if peer:
        for key, clock in (("seconds", "wall"), ("cpu_seconds", "CPU")):
            ratios = [t[key] / o[key] for o, t in zip(found["ours"], found["trl"])]
            spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
            print(f"trl / ours, {clock} time: {median(ratios):.1f} (n = {len(ratios)}, {spread})")


def show(kind: str, results: list[dict[str, float]]) -> None:
    def text(key: str) -> str:
        values = [result[key] for result in results]
        return f"{median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"

    plan = "packing "
    if kind == "ours":
        plan = f"plan {text('plan_seconds')}, of CPU {text('plan_cpu_seconds')}; plan and pass "
    print(
        f"{kind}: {results[0]['rows']:,.0f} rows, {results[0]['full']:.3%} full, {plan}{text('seconds')}, of CPU "
        f"{text('cpu_seconds')}; memory of "
        f"{'the plan' if kind == 'ours' else 'packing'} {max(r['plan_bytes'] for r in results) / 1e6:,.0f} MB"
    )


if __name__ == "__main__":
    main()

"""What measuring costs an update of `train`: python benchmarks/measuring.py [--blocks 10] [--record]

Two gloo ranks with one thread each, a small Llama, float32. Blocks of updates with and without what `train` records and prints
of them take turns in the same processes; beside the two medians, the seconds of recording alone, on rank 0.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import scaffold

LENGTH, VOCABULARY, BLOCK = 128, 2048, 8
MODEL = scaffold.llama(
    LENGTH,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
)


def worker(task: dict[str, Any]) -> None:
    """One rank: seconds of updates without and with recording, and of recording alone."""
    rank = scaffold.rank_of_task(task)
    from rich.console import Console

    from shardwright.train.log import Log
    from shardwright.train.metrics import Metrics

    engine = scaffold.make_engine(task["model"], LENGTH, 16, 8, parallelism__data_parallel="ddp")
    metrics = Metrics(engine, lambda update: 0.0)
    output = Path(task["model"]) / f"out-{rank}"
    log = Log(metrics, Console(file=io.StringIO()), output, [], 0, 10**6)
    seconds: dict[str, list[float]] = {"off": [], "on": [], "recording": []}
    for number in range(2 * BLOCK * (task["blocks"] + 1)):
        recorded, batch = number // BLOCK % 2 == 1, scaffold.update_batch(engine, number, VOCABULARY)
        start = time.perf_counter()
        engine.forward_backward(batch)
        result = engine.step()
        taken = time.perf_counter() - start
        if recorded:
            metrics.add(taken, 0.0, batch)
            log.update(result, batch, 0)
            seconds["recording"].append(time.perf_counter() - start - taken)
        seconds["on" if recorded else "off"].append(time.perf_counter() - start)
    log.close()
    scaffold.finish(task, {name: values[BLOCK:] for name, values in seconds.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        worker(json.loads(arguments.task))
        return
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        found = scaffold.start(__file__, {"model": directory, "blocks": arguments.blocks}, 2)
    middle = {name: statistics.median(values) for name, values in found.items()}
    share, n = middle["recording"] / middle["off"], len(found["off"])
    print(f"2 gloo ranks, n={n} each, medians")
    for name, values in found.items():
        print(f"{name:<9} {1e3 * middle[name]:8.3f} ms  {scaffold.spread(values)}")
    print(f"recording takes {share:.2%} of an update; on / off {1 / scaffold.ratio(found['on'], found['off']):.4f}")
    if arguments.record:
        scaffold.record("measuring", {"n": n, **middle, "share": share})


if __name__ == "__main__":
    main()

"""Predicted and measured step times of ours over links: python benchmarks/step_prediction.py [--rates 1gbit,100mbit]

Two hosts as in `two_hosts.py` (root and iproute2), one rank with one thread each. On each link the ranks measure what
`shardwright doctor` measures, train a Llama of about 35M parameters in every layout, update by update in turn, and measure
again: the speed of a shared machine drifts, so the mean of both is taken. What the planner says with these constants stands
beside the median of the updates; so do its parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loops import LENGTH, MODEL, VOCABULARY
from scaffold import finish, load_run, make_engine, ours, record, spread, take_turns

ROWS = 8
"""Rows of an update."""
DDP = {"parallelism__data_parallel": "ddp"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": DDP,
    "zero1": {"parallelism__data_parallel": "zero1"},
    "zero2": {"parallelism__data_parallel": "zero2"},
    "zero3": {"parallelism__data_parallel": "zero3"},
    "zero1 x 4": {"parallelism__data_parallel": "zero1", "rows": 1},
    "zero3 x 2": {"parallelism__data_parallel": "zero3", "rows": 2},
    "zero2 bf16": {
        "parallelism__data_parallel": "zero2",
        "precision__param_dtype": "bf16",
        "precision__reduce_dtype": "bf16",
    },
    "zero3 recompute": {
        "parallelism__data_parallel": "zero3",
        "memory__activation_checkpointing": "full",
    },
    "tp2": {**DDP, "parallelism__tp_size": 2},
    "pp2": {**DDP, "parallelism__pp_size": 2, "rows": 2},
    "cp2": {**DDP, "parallelism__cp_size": 2},
}


def settings(name: str, directory: str) -> dict[str, Any]:
    """What `load_run` and `make_engine` are given for a layout."""
    chosen = {"rows": 4, **LAYOUTS[name]}
    return {"directory": directory, "length": LENGTH, "global_rows": ROWS, **chosen}


def rank(task: dict[str, Any]) -> None:
    """Measures what the doctor measures, then every layout."""
    from shardwright.mesh.process_group import connect
    from shardwright.tools.doctor.rank import measured

    with connect("cpu", 600, 1) as connection:
        found: dict[str, Any] = {"doctor": asdict(measured(connection))}
        engines = {name: make_engine(**settings(name, task["directory"])) for name in task["layouts"]}
        updates = {name: ours(engine, VOCABULARY) for name, engine in engines.items()}
        found["turns"] = take_turns(updates, task["n"], 1)
        found["doctor after"] = asdict(measured(connection))
        found["chunked"] = {name: bool(engine.loss_chunks.tokens) for name, engine in engines.items()}
        finish(task, found)


def mean(one: Any, other: Any) -> Any:
    """Of all fractional numbers in two equal structures."""
    if isinstance(one, dict):
        return {key: mean(value, other[key]) for key, value in one.items()}
    if isinstance(one, list):
        return [mean(a, b) for a, b in zip(one, other)]
    return (one + other) / 2 if isinstance(one, float) else one


def predictions(found: dict[str, Any], directory: str, layouts: list[str]) -> dict[str, Any]:
    """layout -> `Planned`, with the constants that the ranks measured."""
    from pydantic import TypeAdapter

    from shardwright.layout.legality import check_run
    from shardwright.tools.doctor.fit import Measured
    from shardwright.tools.doctor.hardware_file import fitted, hardware, to_yaml
    from shardwright.train.planned import plan_of, shape_of

    measured = TypeAdapter(Measured).validate_python(mean(found["doctor"], found["doctor after"]))
    file = Path(directory) / "hardware.yaml"
    file.write_text(to_yaml(hardware(measured, fitted(measured), "now")))
    made = {}
    for name in layouts:
        loaded = load_run(**settings(name, directory))
        shape = shape_of(loaded.run)
        assert shape is not None
        chunked = found["chunked"][name]
        made[name] = plan_of(loaded.run, check_run(loaded, 2), shape, chunked, "cpu", str(file))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10gbit,1gbit,100mbit")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("-n", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="a directory for what the ranks measured, to predict again from")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results.jsonl")
    arguments = parser.parse_args()
    from two_hosts import missing, run, two_hosts

    if reason := missing():
        print(f"Not measured: {reason}.")
        return
    layouts = arguments.layouts.split(",")
    print("| rate | layout | measured, s | predicted, s | predicted / measured - 1 | of the prediction, s |")
    print("|---|---|---|---|---|---|", flush=True)
    errors: list[float] = []
    for number, rate in enumerate(arguments.rates.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(MODEL))
            kept = arguments.keep / f"{rate}.json" if arguments.keep else None
            if kept is not None and kept.exists():
                found = json.loads(kept.read_text())
            else:
                task = {"directory": directory, "layouts": layouts, "n": arguments.n}
                with two_hosts(rate) as hosts:
                    found = run(hosts, task, 1, 29611 + number, Path(__file__))
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(found))
            for name, planned in predictions(found, directory, layouts).items():
                seconds = found["turns"][name]["seconds"]
                step = statistics.median(seconds)
                errors.append(planned.seconds / step - 1)
                parts = ", ".join(f"{part} {value:.2f}" for part, value in planned.parts.items())
                print(
                    f"| {rate} | {name} | {step:.2f} {spread(seconds)} | {planned.seconds:.2f} | {errors[-1]:+.1%} | {parts} |",
                    flush=True,
                )
                if arguments.record:
                    row = {"rate": rate, "layout": name, "measured": step, "predicted": planned.seconds}
                    record("step_prediction", {**row, "n": len(seconds)})
    size = sorted(abs(error) for error in errors)
    within = sum(error <= 0.2 for error in size)
    print(f"{within} of {len(size)} within 20%, median {statistics.median(size):.1%}, worst {size[-1]:.1%}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]))
    else:
        main()

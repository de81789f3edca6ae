"""One rank of the tests of late decisions: the same updates decided on the host and on the device, on pretend GPUs.

Prints {case: what was found} as JSON on rank 0.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from tests.gloo.engine import LLAMA, batches_for, run_file, whole_moments, whole_weights
from tests.pretend_cuda.sweep import losses_of
from torch import Tensor

from shardwright.config.load import Loaded
from shardwright.errors import NonFiniteError
from shardwright.layout.legality import check_run
from shardwright.mesh.object_collectives import broadcast_object
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.train import update as engine_module
from shardwright.train.update import UpdateEngine

UPDATES, BAD = 5, 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"training__optimizer": "sgd", "training__optimizer_kwargs": {"momentum": 0.9}},
    "muon": {"training__optimizer": "muon"},
    "own loss": {"training__loss": "tests.own_losses:smoothed"},
    "float32": {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")},
    "tp": {"parallelism__tp_size": 2},
}
MEASURED = ("perf/", "mem/", "comm/", "data/wait")
"""Names of metrics that differ from run to run."""
State = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]


def make(loaded: Loaded, device: torch.device, on_host: bool) -> UpdateEngine:
    axes = check_run(loaded, torch.distributed.get_world_size())
    engine = UpdateEngine(loaded.run, axes, device, UPDATES)
    if on_host:
        engine._waits = "a test asks for it"

    def poison(module: Any, inputs: Any, output: Any) -> None:
        if engine.rank == 1 and engine.batch is not None and engine.batch.update == BAD:
            output.logits = output.logits * float("inf")

    engine.module.register_forward_hook(poison)
    return engine


def state(engine: UpdateEngine) -> State:
    return whole_weights(engine), whole_moments(engine)


def same(one: State, other: State) -> bool:
    """Whether all bits are equal."""
    (weights, moments), (more_weights, more_moments) = one, other
    return (
        moments.keys() == more_moments.keys()
        and all(torch.equal(weights[name], value) for name, value in more_weights.items())
        and all(torch.equal(moments[name][key], v) for name, own in more_moments.items() for key, v in own.items())
    )


def skipped(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Update `BAD` is not finite and is skipped, by the host and by the device."""
    kind = {} if "parallelism__tp_size" in options else {"parallelism__data_parallel": "zero3"}
    loaded = run_file(LLAMA, training__on_non_finite="skip", **kind, **options)
    found = {}
    for where, on_host in (("host", True), ("device", False)):
        engine, pending, states = make(loaded, device, on_host), [], []
        for update in range(UPDATES):
            engine.forward_backward(batches_for(engine, update))
            pending.append(engine.launch_step(stop=engine.rank == 0 and update == 2))
            states.append(state(engine))
        found[where] = ([each.known for each in pending], [each.result() for each in pending], states)
        engine.close()
    (_, results, states), (known, late, late_states) = found["host"], found["device"]
    return {
        "known": known,
        "skipped": [result.skipped for result in late],
        "stop": [result.stop for result in late],
        "results": repr(results) == repr(late),  # NaN is not equal to itself
        "states": [same(one, other) for one, other in zip(states, late_states)],
        "unchanged": same(late_states[BAD], late_states[BAD - 1]),
        "goes on": not same(late_states[BAD + 1], late_states[BAD]),
    }


def stopped(device: torch.device) -> dict[str, Any]:
    """Update `BAD` is not finite, and its result is read after the update that follows was launched."""
    engine, pending, states = make(run_file(LLAMA, parallelism__data_parallel="zero3"), device, False), [], []
    for update in range(UPDATES):
        engine.forward_backward(batches_for(engine, update))
        pending.append(engine.launch_step())
        states.append(state(engine))
    message = ""
    try:
        pending[BAD].result()
    except NonFiniteError as error:
        message = str(error)
    engine.forward_backward(batches_for(engine, BAD - 1))
    again = engine.step()
    unchanged = [same(each, states[BAD - 1]) for each in states[BAD:]]
    return {
        "message": message,
        "unchanged": unchanged,
        "again": not again.skipped and not same(state(engine), states[-1]),
    }


def logged(case: dict[str, Any], device: torch.device, directory: str, on_host: bool) -> list[Any]:
    """What `train` writes of each update, without times and memory."""
    asked = patch.object(engine_module, "why_the_host_waits", lambda *_: "a test asks for it")
    with asked if on_host else nullcontext():
        losses_of(case, device, directory, torch.distributed.get_world_size())
    if torch.distributed.get_rank():
        return []
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def main() -> None:
    quiet_transformers()
    with connect("cuda") as connection, TemporaryDirectory() as own:
        directory, device = broadcast_object(own), connection.device
        found: dict[str, Any] = {name: skipped(options, device) for name, options in OPTIMIZERS.items()}
        found["stop"] = stopped(device)
        for name, case in {"plain": {}, "evaluated": {"evaluate": 2}, "saved": {"save": 2, "beside": True}}.items():
            runs = [logged(case, device, f"{directory}/{name}-{on_host}", on_host) for on_host in (True, False)]
            found[name] = {
                "equal": runs[0] == runs[1],
                "entries": len(runs[1]),
                "losses": [e.get("train/loss") for e in runs[1]],
            }
        if connection.rank_info.rank == 0:
            print(f"DECISIONS {json.dumps(found)}")
        torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(main())

"""One rank that trains on its GPU while torch forbids the host to wait, started by torchrun."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tests.gloo.engine import LLAMA, batches_for, run_file

from shardwright.layout.legality import check_run
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.train.update import UpdateEngine

FP32 = {f"precision__{name}_dtype": "fp32" for name in ("reduce", "master")}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"parallelism__data_parallel": "zero3", "memory__activation_checkpointing": "full"},
    "loss in chunks": {"memory__loss_chunk_tokens": 16, "parallelism__data_parallel": "zero3"},
    "muon": {"training__optimizer": "muon"},
    "sgd": {"training__optimizer": "sgd", "training__optimizer_kwargs": {"momentum": 0.9}},
}
UPDATES = 5


def losses(options: dict[str, Any], device: torch.device, forbidden: bool) -> list[float]:
    """forbidden: from the third update on, an operator that waits for the GPU is an error; else the host decides."""
    loaded = run_file(LLAMA, **{"precision__param_dtype": "bf16", **FP32, **options})
    engine = UpdateEngine(loaded.run, check_run(loaded, 1), device, UPDATES)
    if not forbidden:
        engine._waits = "a test asks for it"
    pending = []
    for update in range(UPDATES):
        batch = engine.inputs.ready(batches_for(engine, update))
        torch.cuda.set_sync_debug_mode("error" if forbidden and update > 1 else "default")
        engine.forward_backward(batch)
        pending.append(engine.launch_step())
        torch.cuda.set_sync_debug_mode("default")
    found = [each.result().loss for each in pending]
    engine.close()
    return found


def main() -> None:
    quiet_transformers()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with connect("cuda") as connection:
        for name, options in CASES.items():
            late, at_once = (losses(options, connection.device, forbidden) for forbidden in (True, False))
            assert late == at_once, (name, late, at_once)
            print(f"{name}: equal")


if __name__ == "__main__":
    sys.exit(main())

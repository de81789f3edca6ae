"""One rank of the sweep: the same configurations on pretend GPUs and on the CPU, one after the other in one process group.

Prints {configuration: {device: losses}} as JSON on rank 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from rich.console import Console
from tests.places import EXAMPLES

from shardwright.config.load import load_run_file
from shardwright.layout.legality import check_run
from shardwright.mesh.object_collectives import broadcast_object
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.train.loop import Trainer
from shardwright.train.run_data import open_data
from shardwright.train.signals import StopFlag
from shardwright.train.update import UpdateEngine, UpdateResult

UPDATES = 3
KEYS = {
    "layout": "parallelism.data_parallel",
    "tp": "parallelism.tp_size",
    "cp": "parallelism.cp_size",
    "pp": "parallelism.pp_size",
    "ring": "parallelism.cp_attention",
    "param": "precision.param_dtype",
    "reduce": "precision.reduce_dtype",
    "batching": "data.batching",
    "recompute": "memory.activation_checkpointing",
    "chunk": "memory.loss_chunk_tokens",
    "offload": "memory.cpu_offload",
    "rows": "training.per_device_train_batch_size",
    "optimizer": "training.optimizer",
    "evaluate": "training.eval_steps",
    "save": "checkpoint.save_steps",
    "beside": "checkpoint.async_save",
    "profile": "logging.profile_steps",
}
CASES: dict[str, dict[str, Any]] = {
    "zero3, bf16, packed": {"layout": "zero3", "param": "bf16", "batching": "pack"},
    "ddp, bf16, packed, selective recompute": {"param": "bf16", "batching": "pack", "recompute": "selective"},
    "zero3, bf16, loss in chunks": {"layout": "zero3", "param": "bf16", "chunk": 64, "rows": 2},
    "zero3, offload": {"layout": "zero3", "offload": "params"},
    "zero2, offload, muon": {"layout": "zero2", "offload": "params", "optimizer": "muon"},
    "zero3, saved beside training": {"layout": "zero3", "save": 1, "beside": True},
    "ddp, saved beside training": {"save": 1, "beside": True},
    "ddp, profiled": {"profile": 1},
    "cp2, bf16": {"cp": 2, "param": "bf16"},
    "cp2 ring, bf16, packed": {"cp": 2, "ring": "ring", "param": "bf16", "batching": "pack"},
    "zero3 + tp2, bf16, full recompute": {"layout": "zero3", "tp": 2, "param": "bf16", "recompute": "full"},
    "ddp, reduced in bf16": {"reduce": "bf16"},
    "zero2, muon": {"layout": "zero2", "optimizer": "muon"},
    "pp2, bf16": {"pp": 2, "param": "bf16"},
    "zero3, evaluated": {"layout": "zero3", "evaluate": 1},
    "pp2, evaluated": {"pp": 2, "evaluate": 1},
    "zero1, bucketed": {"layout": "zero1", "batching": "bucket"},
}
"""What differs from `examples/tiny.yaml` with ddp in float32."""


def losses_of(case: dict[str, Any], device: torch.device, output_dir: str, world_size: int) -> list[float]:
    """Losses of `UPDATES` updates; of the evaluations, too."""
    overrides = {KEYS[key]: value for key, value in ({"layout": "ddp"} | case).items()}
    if device.type == "cpu":
        overrides.pop(KEYS["offload"], None)
    if "evaluate" in case:
        overrides["data.validation"] = [str(EXAMPLES / "tiny/data.jsonl")]
    overrides |= {"training.max_steps": UPDATES, "checkpoint.output_dir": output_dir, "checkpoint.export_hf": "none"}
    loaded = load_run_file(EXAMPLES / "tiny.yaml", overrides | {"hardware.device": device.type})
    axes = check_run(loaded, world_size)
    data = open_data(loaded.run, axes, torch.distributed.get_rank())
    engine = UpdateEngine(loaded.run, axes, device, data.updates)
    found: list[float] = []

    def keep(result: UpdateResult) -> UpdateResult:
        found.append(result.loss)
        return result

    engine.hooks.on_result = keep
    trainer = Trainer(loaded, engine, data, Console(quiet=True))
    trainer.train(StopFlag())
    return [*found, *([trainer.at.eval_loss] if trainer.at.eval_loss is not None else [])]


def main() -> None:
    quiet_transformers()
    losses: dict[str, dict[str, list[float]]] = {}
    with connect("cuda") as connection, tempfile.TemporaryDirectory() as own:
        directory, ranks = broadcast_object(own), connection.rank_info.world_size
        for number, (name, case) in enumerate(CASES.items()):
            place = f"{directory}/{number}"
            losses[name] = {
                device.type: losses_of(case, device, f"{place}-{device.type}", ranks)
                for device in (connection.device, torch.device("cpu"))
            }
        if connection.rank_info.rank == 0:
            print(f"SWEEP {json.dumps(losses)}")
        torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(main())

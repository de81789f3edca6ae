"""One rank of the sweep: the same configurations on pretend GPUs and on the CPU, one after the other in one process group.

Prints [{configuration: {device: losses}}, {configuration: what the host waits for in an update}] as JSON on rank 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from tests.places import EXAMPLES

from shardwright.config.load import load_run_file
from shardwright.data.loader import UpdateBatch
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
    "zero3": {"layout": "zero3"},
    "ddp + tp2": {"tp": 2},
}
"""What differs from `examples/tiny.yaml` with ddp in float32."""
WAITS = ("wait", "late", "pageable")
"""Kinds of notes for which the host waits."""


def losses_of(
    case: dict[str, Any], device: torch.device, output_dir: str, world_size: int, begun: Callable[[int], object] = abs
) -> list[float]:
    """Losses of `UPDATES` updates; of the evaluations, too. begun: told the number of each update that begins."""
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

    def note(batch: UpdateBatch) -> UpdateBatch:
        begun(batch.update)
        return batch

    engine.hooks.on_result, engine.hooks.on_batch = keep, note
    trainer = Trainer(loaded, engine, data, Console(quiet=True))
    trainer.train(StopFlag())
    return [*found, *([trainer.at.eval_loss] if trainer.at.eval_loss is not None else [])]


def waits_of(
    case: dict[str, Any], device: torch.device, output_dir: str, world_size: int
) -> tuple[list[float], list[str]]:
    """(losses, what the host waits for in the update after the first, with stacks)."""
    from tests.pretend_cuda import installed  # imported before torch, in ranks alone

    installed.notes.clear()
    with installed.logging():
        losses = losses_of(
            case, device, output_dir, world_size, lambda update: installed.notes.append(("update", str(update), ""))
        )
    starts = {what: at for at, (kind, what, _) in enumerate(installed.notes) if kind == "update"}
    noted = installed.notes[starts["1"] : starts["2"]]
    return losses, [f"{kind}: {what}\n    {stack}" for kind, what, stack in noted if kind in WAITS]


def main() -> None:
    quiet_transformers()
    losses: dict[str, dict[str, list[float]]] = {}
    waits: dict[str, list[str]] = {}
    with connect("cuda") as connection, tempfile.TemporaryDirectory() as own:
        directory, ranks = broadcast_object(own), connection.rank_info.world_size
        for number, (name, case) in enumerate(CASES.items()):
            place = f"{directory}/{number}"
            found, waits[name] = waits_of(case, connection.device, f"{place}-cuda", ranks)
            losses[name] = {"cuda": found, "cpu": losses_of(case, torch.device("cpu"), f"{place}-cpu", ranks)}
        if connection.rank_info.rank == 0:
            print(f"SWEEP {json.dumps([losses, waits])}")
        torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(main())

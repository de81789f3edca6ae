"""One rank of the runs with shards on the host: started once, for each run an engine of its own in one process group.

Prints on rank 0, as JSON, what `test_offload.py` reads.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open
from tests.places import EXAMPLES
from tests.pretend_cuda import installed

from shardwright.config.load import load_run_file
from shardwright.layout.legality import check_run
from shardwright.mesh.object_collectives import gather_objects
from shardwright.mesh.process_group import connect
from shardwright.mesh.shard_geometry import local_tensor
from shardwright.models.build import quiet_transformers
from shardwright.train.exported import export_model
from shardwright.train.loop import Trainer
from shardwright.train.run_data import open_data
from shardwright.train.signals import StopFlag
from shardwright.train.update import UpdateEngine, UpdateResult

UPDATES = 4
OFFLOAD = {"memory.cpu_offload": "params"}
ZERO3 = {"parallelism.data_parallel": "zero3"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"parallelism.data_parallel": "zero1"},
    "zero2": {"parallelism.data_parallel": "zero2"},
    "zero3 + tp2": ZERO3 | {"parallelism.tp_size": 2},
    "pp2 + zero3": ZERO3 | {"parallelism.pp_size": 2},
    "hsdp2": ZERO3 | {"parallelism.dp_replicate_size": 2},
}
"""More layouts with shards on the host, beside zero3."""


class Run:
    """A run of `UPDATES` updates in `directory`, from the checkpoint that is there, else from the beginning.

    losses: by update. places: of parameters, buffers and optimizer states, (device, pinned).
    """

    def __init__(self, directory: Path, world_size: int, overrides: dict[str, Any]) -> None:
        fixed = {
            "training.max_steps": UPDATES, "checkpoint.save_steps": 1, "checkpoint.output_dir": str(directory),
            "hardware.device": "cuda", "checkpoint.export_hf": "none",
        }  # fmt: skip
        loaded = load_run_file(EXAMPLES / "tiny.yaml", fixed | overrides)
        axes = check_run(loaded, world_size)
        data = open_data(loaded.run, axes, torch.distributed.get_rank())
        engine = UpdateEngine(loaded.run, axes, torch.device("cuda", torch.cuda.current_device()), data.updates)
        self.losses: dict[int, float] = {}

        def keep(result: UpdateResult) -> UpdateResult:
            self.losses[result.update] = result.loss
            return result

        engine.hooks.on_result = keep
        trainer = Trainer(loaded, engine, data, Console(quiet=True))
        with StopFlag() as stop:
            assert trainer.train(stop) == 0
        export_model(loaded.run, engine.module, {})
        self.eval_loss = trainer.at.eval_loss
        self.places = {kind: sorted(set(places)) for kind, places in _places(engine)}
        engine.close()


def _places(engine: UpdateEngine) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    for kind, tensors in (
        ("parameters", list(engine.module.parameters())),
        ("buffers", list(engine.module.buffers())),
        ("optimizer", [value for value in states if isinstance(value, torch.Tensor) and value.dim()]),
    ):
        locals_ = [local_tensor(tensor.detach()) for tensor in tensors]
        yield kind, [(local.device.type, local.device.type == "cpu" and local.is_pinned()) for local in locals_]


def _bytes(checkpoint: Path) -> bytes:
    rank = torch.distributed.get_rank()
    return (checkpoint / f"tensors/rank-{rank:05d}.safetensors").read_bytes()


def _continued(source: Path, update: int, directory: Path) -> Path:
    """`directory` with the checkpoint of `update` alone."""
    if torch.distributed.get_rank() == 0:
        shutil.copytree(source / f"checkpoint-{update}", directory / f"checkpoint-{update}")
    torch.distributed.barrier()
    return directory


def _exported(directory: Path) -> dict[str, float]:
    """Sum of each exported tensor."""
    sums: dict[str, float] = {}
    for path in sorted((directory / "model").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            sums |= {key: file.get_tensor(key).double().sum().item() for key in file.keys()}  # noqa: SIM118
    return sums


def main() -> None:
    quiet_transformers()
    out = Path(sys.argv[1])
    more = {
        "data.validation": [str(EXAMPLES / "tiny/data.jsonl")],
        "training.eval_steps": UPDATES,
        "checkpoint.export_hf": "final",
    }
    with connect("cuda") as connection:
        size = connection.rank_info.world_size

        def run(name: str, *overrides: dict[str, Any]) -> Run:
            return Run(out / name, size, {key: value for given in overrides for key, value in given.items()})

        on_gpu = run("on GPU", ZERO3, more)
        on_host = run("on host", ZERO3, OFFLOAD, more)
        _continued(out / "on host", 2, out / "resumed")
        resumed = run("resumed", ZERO3, OFFLOAD)
        _continued(out / "on host", 2, out / "to GPU")
        to_gpu = run("to GPU", ZERO3)
        _continued(out / "to GPU", 3, out / "back")
        back = run("back", ZERO3, OFFLOAD)
        _continued(out / "on host", UPDATES, out / "exported")
        run("exported", ZERO3, more)
        layouts = {name: list(run(name, layout, OFFLOAD).losses.values()) for name, layout in LAYOUTS.items()}
        same = _bytes(out / "resumed/checkpoint-4") == _bytes(out / "on host/checkpoint-4")
        found = {
            "losses": {
                "on GPU": on_gpu.losses, "on host": on_host.losses, "resumed": resumed.losses, "to GPU": to_gpu.losses,
                "back": back.losses,
            },
            "layouts": layouts,
            "evaluations": [on_gpu.eval_loss, on_host.eval_loss],
            "exports": [_exported(out / name) for name in ("on host", "exported")],
            "places": on_host.places,
            "resumed bitwise": gather_objects(same),
            "devices": gather_objects(str(connection.device)),
            "communicators": sorted(set(installed.made)),
        }  # fmt: skip
        if connection.rank_info.rank == 0:
            print(f"OFFLOADED {json.dumps(found)}")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()

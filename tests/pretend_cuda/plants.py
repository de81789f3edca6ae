"""Plants missing waits, and asks what finds them: late collectives and ordered streams of pretend GPUs, or gloo.

`python -m tests.pretend_cuda.plants` prints the table. Each plant has ranks of its own, which may hang: a verdict is `equal`,
or says what was found.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from tests.pretend_cuda.running import pretend_ranks
from tests.pretend_cuda.sweep import losses_of
from torch.distributed.pipelining import schedules

from shardwright.checkpoint import saver
from shardwright.errors import ShardwrightError
from shardwright.mesh.object_collectives import broadcast_object
from shardwright.mesh.process_group import connect
from shardwright.models.build import quiet_transformers
from shardwright.parallel.context import attention
from shardwright.parallel.ddp import DDP
from shardwright.train.update import UpdateEngine


class _NeverWaits:
    """A collective whose `wait` was forgotten."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> bool:
        return True


@contextmanager
def _waits_forgotten(all_of_them: bool) -> Iterator[None]:
    send = DDP._send

    def planted(self: Any, bucket: torch.Tensor) -> None:
        if not all_of_them:  # the last bucket of the update replaces those before it
            self._pending[:] = [(getattr(work, "_work", work), *rest) for work, *rest in self._pending]
        send(self, bucket)
        work, *rest = self._pending[-1]
        self._pending[-1] = (_NeverWaits(work), *rest)

    with patch.object(DDP, "_send", planted):
        yield


@contextmanager
def _changed_on_the_way() -> Iterator[None]:
    send = DDP._send

    def planted(self: Any, bucket: torch.Tensor) -> None:
        send(self, bucket)
        bucket.mul_(1.0)

    with patch.object(DDP, "_send", planted):
        yield


@contextmanager
def _keys_used_early() -> Iterator[None]:
    with patch.object(attention._RingShift, "wait", lambda self: self._received):
        yield


@contextmanager
def _sums_used_early() -> Iterator[None]:
    from shardwright.backends import tp_collectives

    collectives = tp_collectives.collectives

    class Unwaited:
        wait_tensor = staticmethod(lambda tensor: tensor)

        def __getattr__(self, name: str) -> Any:
            return getattr(collectives, name)

    with patch.object(tp_collectives, "collectives", Unwaited()):
        yield


@contextmanager
def _inputs_used_early() -> Iterator[None]:
    """In torch's own pipeline runtime, and in the runtime for gloo."""
    from shardwright.backends.gloo import pipeline_runtime

    class Planted:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

        def irecv(self, *arguments: Any, **options: Any) -> Any:
            return _NeverWaits(torch.distributed.irecv(*arguments, **options))

    with (
        patch.object(schedules, "_wait_batch_p2p", lambda work: None),
        patch.object(pipeline_runtime, "dist", Planted()),
    ):
        yield


@contextmanager
def _staging_not_waited_for() -> Iterator[None]:
    with patch.object(torch.cuda.Stream, "synchronize", lambda self: None):
        yield


@contextmanager
def _step_during_staging() -> Iterator[None]:
    """The step does not wait, and the copy is slow enough to notice."""
    stepped, copy, step = threading.Event(), saver._copy_to_host, UpdateEngine.step

    def slow_copy(*arguments: Any) -> None:
        stepped.clear()
        stepped.wait(2)  # no step follows the last save
        copy(*arguments)

    def noted_step(self: Any, stop: bool = False) -> Any:
        result = step(self, stop)
        stepped.set()
        return result

    with (
        patch.object(saver.Saver, "before_step", lambda self: None),
        patch.object(saver, "_copy_to_host", slow_copy),
        patch.object(UpdateEngine, "step", noted_step),
    ):
        yield


@dataclass(frozen=True)
class Plant:
    """A fault, and the configuration that meets it. on_cpu: whether it has a meaning there."""

    fault: Callable[[], Any]
    case: dict[str, Any] = field(default_factory=dict)
    on_cpu: bool = True


PLANTS = {
    "ddp: no wait for the all-reduces": Plant(lambda: _waits_forgotten(True)),
    "ddp: waits for all but the last": Plant(lambda: _waits_forgotten(False)),
    "ddp: gradient changed while it travels": Plant(_changed_on_the_way),
    "ring: keys used before they came": Plant(_keys_used_early, {"cp": 2, "ring": "ring"}),
    "tp: sums used before they came": Plant(_sums_used_early, {"tp": 2}),
    "pp: inputs used before they came": Plant(_inputs_used_early, {"pp": 2}),
    "checkpoint: written before the copy ended": Plant(_staging_not_waited_for, {"save": 1, "beside": True}, False),
    "checkpoint: the step does not wait for the copy": Plant(_step_during_staging, {"save": 1, "beside": True}, False),
}


def saved_values(output_dir: str) -> dict[str, float]:
    """The sum of each tensor of the newest checkpoint, as this rank wrote it."""
    newest = max(Path(output_dir).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    found = {}
    for path in sorted((newest / "tensors").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in list(file.keys()):
                found[key] = file.get_tensor(key).double().sum().item()
    return found


def run_case(case: dict[str, Any], device: torch.device, output_dir: str) -> tuple[str, list[float], dict[str, float]]:
    """(error, losses, what was saved)."""
    from tests.pretend_cuda import installed  # imported before torch, in ranks alone

    before = len(installed.breaches)
    try:
        losses = losses_of(case, device, output_dir, torch.distributed.get_world_size())
    except (ShardwrightError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", [], {}
    told = installed.breaches[before:]
    return (told[0][:110] if told else ""), losses, saved_values(output_dir)


def verdict(found: tuple[str, list[float], dict[str, float]], right: tuple[str, list[float], dict[str, float]]) -> str:
    error, losses, saved = found
    if error:
        return error
    if any(math.isnan(value) for value in (*losses, *saved.values())):
        return "NaN"
    return "equal" if (losses, saved) == right[1:] else "other values"


def rank_main(name: str, kind: str) -> None:
    """One rank, with the plant `name` in training on `kind`, `cuda` or `cpu`."""
    quiet_transformers()
    plant = PLANTS[name]
    with connect("cuda") as connection, tempfile.TemporaryDirectory() as own:
        directory = broadcast_object(own)
        device = connection.device if kind == "cuda" else torch.device("cpu")
        right = run_case(plant.case, device, f"{directory}/right")
        assert not right[0], right[0]
        with plant.fault():
            said = verdict(run_case(plant.case, device, f"{directory}/planted"), right)
        os.write(1, f"\nVERDICT {said}\n".encode())  # in one piece: both ranks write to one pipe
        os._exit(0)  # the other rank may have another opinion, and wait


def plant_verdict(name: str, kind: str, timeout: float) -> str:
    """What two ranks say of the plant `name`: the first thing found, else `equal`."""
    try:
        ran = pretend_ranks("tests.pretend_cuda.plants", name, kind, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "hangs"
    said = [line.partition("VERDICT ")[2] for line in ran.output.splitlines() if "VERDICT " in line]
    return next((text for text in said if text != "equal"), "equal") if said else f"ends with {ran.code}"


def main() -> None:
    for name, plant in PLANTS.items():
        kinds = ("cpu", "cuda") if plant.on_cpu else ("cuda",)
        found = {kind: plant_verdict(name, kind, 90) for kind in kinds}
        print(f"{name:48s} gloo: {found.get('cpu', 'n/a'):12s} late nccl: {found['cuda']}", flush=True)


if __name__ == "__main__":
    rank_main(*sys.argv[1:]) if len(sys.argv) > 1 else main()

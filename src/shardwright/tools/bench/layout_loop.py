"""The training loop of one layout: updates for memory and traffic, updates that are timed, updates that are traced."""

from __future__ import annotations

import io
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from shardwright.config.load import Loaded
from shardwright.data.loader import UpdateBatch
from shardwright.layout.legality import check_run
from shardwright.measure import clock
from shardwright.measure.communication import CommunicationRecorder, compare_traffic
from shardwright.measure.live_memory import LiveMemory
from shardwright.measure.profile import TraceTimes, profiled
from shardwright.mesh.device_mesh import all_groups, axis_of_groups
from shardwright.train.decision import PendingResult, UpdateResult
from shardwright.train.log import Log
from shardwright.train.metrics import Metrics
from shardwright.train.planned import Planned, plan_of, shape_of, traffic_of
from shardwright.train.run_data import open_data
from shardwright.train.update import UpdateEngine
from shardwright.train.utilisation import Utilisation, make_utilisation

MEMORY_UPDATES = 2
"""Optimizer states appear in the first update, so the second one is measured."""
PROFILED_UPDATES = 2
RECORDED_UPDATES = 10
"""Updates after which the cost of recording is timed."""


@dataclass
class CountedBatches:
    """The batches of a loop's updates, in order, with their counts."""

    batches: list[UpdateBatch] = field(default_factory=list)

    def figures(self) -> dict[str, list[int]]:
        """Counts of each update over all data ranks."""
        return {
            "targets": [batch.target_tokens for batch in self.batches],
            "real": [batch.real_tokens for batch in self.batches],
            "slots": [batch.slots for batch in self.batches],
        }

    def flops(self, utilisation: Utilisation | None) -> list[tuple[float, float]]:
        """This rank's (FLOPs of forward and backward, of recomputation) of each update; empty where no peak is known."""
        return [] if utilisation is None else [utilisation.flops(batch) for batch in self.batches]


class LayoutLoop:
    """A layout with its engine and its rows. Collective throughout."""

    def __init__(self, name: str, loaded: Loaded, device: torch.device, hardware: str | None) -> None:
        self.name, self.run, self.device = name, loaded.run, device
        self.axes = check_run(loaded, dist.get_world_size())
        data, self.counted = open_data(self.run, self.axes, dist.get_rank()), CountedBatches()
        self.shape, started = shape_of(self.run), clock.now()
        vocabulary = self.shape.vocab if self.shape else 0
        self.memory = LiveMemory(vocabulary // self.axes.tp if self.axes.tp > 1 else vocabulary, device.type)
        with self.memory:
            self.engine = UpdateEngine(self.run, self.axes, device, data.updates)
        self.memory.label("parameters", self.engine.module.parameters())
        self.memory.label("parameters", (local.tensor for local in self.engine.params))
        self.build_seconds = clock.now() - started
        self._batches = data.updates_from(0, device, self.engine.inputs.ready)
        self._pending: PendingResult | None = None
        self.batch: UpdateBatch | None = None
        self._groups = all_groups(self.engine.mesh)
        self.utilisation = make_utilisation(self.run, self.axes, device, hardware)
        self.planned: Planned | None = None
        if self.shape is not None:
            chunked = bool(self.engine.loss_chunks.tokens)
            self.planned = plan_of(self.run, self.axes, self.shape, chunked, device.type, hardware)

    @property
    def result(self) -> UpdateResult | None:
        """Of the last update, which it waits for."""
        return None if self._pending is None else self._pending.result()

    @property
    def loss(self) -> float | None:
        """Of the last update."""
        return None if self.result is None else self.result.loss

    def about(self) -> dict[str, Any]:
        """Entries of `bench.json` beside the measurements."""
        planned = asdict(self.planned) if self.planned is not None else None
        return {"axes": asdict(self.axes), "build_seconds": self.build_seconds, "planned": planned}

    def update(self) -> float:
        """Does one update; returns the seconds that it waited for data."""
        start = clock.now()
        self.batch = batch = next(self._batches)
        waited = clock.now() - start
        self.counted.batches.append(batch)
        self.engine.forward_backward(batch)
        before, self._pending = self._pending, self.engine.launch_step()
        if before is not None:
            before.result()  # as `train` does, which waits for the update before
        return waited

    def measure_memory(self) -> dict[str, Any]:
        """Runs the first updates; the memory of this rank's tensors in the last one, by phase and by category."""
        engine, memory = self.engine, self.memory
        engine.hooks.on_phase = lambda phase: memory.enter("update")
        with memory:
            for _ in range(MEMORY_UPDATES):
                batch = next(self._batches)
                memory.clear()
                memory.enter("forward")
                engine.forward_backward(batch)
                memory.label("gradients", (gradient for _, gradient in engine.gradients()))
                engine.step()
                memory.label("optimizer states", self._optimizer_states())
        engine.hooks.on_phase = lambda phase: None
        return {**asdict(memory.peak()), "by_phase": memory.peak_by_phase, "samples": memory.samples}

    def _optimizer_states(self) -> list[Tensor]:
        states = self.engine.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def measure_traffic(self) -> list[dict[str, Any]]:
        """Runs one update; the traffic of this rank, recorded and planned. Empty where the planner knows no traffic."""
        batch, recorder = next(self._batches), CommunicationRecorder(axis_of_groups(self.engine.mesh))
        with recorder:
            self.engine.forward_backward(batch)
        self.engine.step()
        if self.shape is None or self.run.data.batching != "pad":
            planned: tuple[Any, ...] = ()
        else:
            planned = traffic_of(self.run, self.axes, self.shape, dist.get_rank())
        ddp = self.run.parallelism.data_parallel == "ddp"
        rows = compare_traffic(planned, recorder.traffic(), buckets=ddp)
        return [{**asdict(row), "equal": row.equal if planned else None} for row in rows]

    def measure_communication(self, directory: Path | None) -> TraceTimes:
        """Runs some updates under torch's profiler; times of this rank, per update. directory: where the trace stays."""
        path = None
        if directory is not None:
            path = directory / f"{self.name.replace(':', '-')}-rank{dist.get_rank()}.json"
        dist.barrier()
        with profiled(self.device, self._groups, PROFILED_UPDATES, path) as found:
            for _ in range(PROFILED_UPDATES):
                self.update()
        return found[0]

    def measuring_seconds(self) -> list[float]:
        """Seconds of rank 0 in which `train` would have recorded and printed each of some updates. Collective.

        Each recording follows a real update, so that caches are as cold as in training. Ranks meet first, so that no rank's
        time includes a wait for a slower rank.
        """
        metrics, seconds = Metrics(self.engine, lambda update: 0.0), []
        with tempfile.TemporaryDirectory() as directory:
            log = Log(metrics, Console(file=io.StringIO()), Path(directory), [], 0, self.engine.updates)
            for _ in range(RECORDED_UPDATES):
                before = clock.now()
                waited = self.update()
                taken = clock.now() - before
                assert self.result is not None and self.batch is not None
                dist.barrier()
                start = clock.now()
                metrics.add(taken, waited, self.batch)
                log.update(self.result, self.batch, 0)
                seconds.append(clock.now() - start)
            log.close()
        return seconds

"""The planner's predictions for a run: memory over one update, the pipeline simulated, traffic and time; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from shardwright.arch.model_shape import Inventory
from shardwright.arch.parameters import matrix_weights
from shardwright.arch.shape import Shape
from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.layout.axes import resolve_axes
from shardwright.layout.import_path import is_import_path
from shardwright.layout.pipeline_schedules import Action, actions, head_blocks, legality, stage_rank
from shardwright.layout.traffic import Traffic
from shardwright.planner.answer import layout_name
from shardwright.planner.device import Device
from shardwright.planner.estimate import Estimate, estimate
from shardwright.planner.memory_timeline import Moment
from shardwright.planner.pipeline_simulator import Played, Span, StageSeconds, play
from shardwright.planner.problem import layout_of, problem_of, shape_of_run
from shardwright.planner.step_time import Clock, StepTime
from shardwright.tools.report.read import RunDirectory

SECONDS = "planned seconds"
DRAWN_ACTIONS = 800
"""Longer schedules are drawn with fewer microbatches."""


@dataclass(frozen=True)
class Schedule:
    """A simulated pipeline schedule."""

    spans: tuple[Span, ...]
    played: Played
    ranks: int
    microbatches: int
    """Fewer than the run's where the run has too many to draw."""
    unit: str
    """Of the times."""

    @property
    def idle(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        return 1 - sum(self.played.busy) / (self.ranks * self.played.total)


@dataclass(frozen=True)
class Forecast:
    """The planner's predictions for one run."""

    layout: str
    peak_bytes: float
    pipeline_rank: int
    """The fullest rank; the moments are of this rank."""
    moments: tuple[Moment, ...]
    traffic: tuple[Traffic, ...]
    schedule: Schedule | None
    time: StepTime | None
    """None where the device is not known."""
    no_time: str
    """Why there is no time."""


def shape_of(run: RunFile, inventory: Inventory | None) -> Shape:
    """The planner's shape of the run's model. Raises `ConfigError` where the model cannot be read."""
    name = run.model.model_name_or_path
    if not (is_import_path(name) or Path(name).exists()):
        raise ConfigError(
            f"the model `{name}` is not found in this directory.", "", "Run report where the run was started."
        )
    return shape_of_run(run, inventory)


def forecast(directory: RunDirectory, device: Device | None, inventory: Inventory | None = None) -> Forecast | str:
    """The planner's predictions for the run of `directory`, or the reason why there are none."""
    run, world_size = directory.run, directory.environment.get("world_size")
    if run is None:
        return directory.missing.get("config.yaml", "there is no config.yaml")
    if not isinstance(world_size, int):
        return "environment.json does not say the number of ranks"
    try:
        axes = resolve_axes(run.parallelism, world_size)
        # only a GPU run records the memory of its device
        kind = "cuda" if "device_memory_bytes" in directory.environment else "cpu"
        problem = problem_of(run, shape_of(run, inventory), kind, device)
        if directory.environment.get("loss_chunk_tokens"):
            problem = replace(problem, loss="chunked")
        return _forecast(estimate(problem, layout_of(run, axes, kind)))
    except ShardwrightError as error:
        return str(error)


def _forecast(found: Estimate) -> Forecast:
    peak, ranks, time = found.peak, range(found.layout.axes.pp), found.time
    return Forecast(
        layout_name(found.layout),
        peak.allocated,
        peak.pipeline_rank,
        tuple(found.timeline(peak.pipeline_rank)),
        max(map(found.traffic, ranks), key=lambda parts: sum(part.sent_bytes for part in parts)),
        _schedule(found) if len(ranks) > 1 else None,
        time,
        "" if time else "the device's speed is not known: give --device",
    )


def _schedule(found: Estimate) -> Schedule:
    """The run's pipeline played; without a device in units of a block's forward, each half of the backward taking as long."""
    problem, layout, stages = found.problem, found.layout, found.stage_blocks
    kind, pp, chunks = layout.schedule or "1f1b", layout.axes.pp, layout.chunks
    count = whole = layout.microbatches(problem)
    limit = max(pp, DRAWN_ACTIONS // (pp * chunks * 2))
    while count > limit:
        fewer = max(pp, ceil(count / 2 / pp) * pp)
        if fewer >= count or legality(kind, pp, chunks, fewer):
            count = whole
            break
        count = fewer
    if problem.device:
        times = Clock(problem).stage_seconds(layout, stages)
    else:
        head = head_blocks(*matrix_weights(problem.shape))
        weights = [blocks + head * (stage == len(stages) - 1) for stage, blocks in enumerate(stages)]
        times = [StageSeconds(weight, weight, weight) for weight in weights]
    spans: list[Span] = []
    played = play(actions(kind, pp, chunks, count), lambda stage: stage_rank(kind, pp, stage), times, seen=spans)
    return Schedule(tuple(spans), played, pp, count, SECONDS if problem.device else "forwards of one block")


def played_lists(lists: Sequence[Sequence[Action]]) -> Schedule:
    """Recorded action lists played with stages that are all alike: a forward counts 1, a backward 2."""
    owner = {action.stage: rank for rank, own in enumerate(lists) for action in own}
    times = [StageSeconds(1.0, 1.0, 1.0)] * len(owner)
    spans: list[Span] = []
    played = play(lists, owner.__getitem__, times, seen=spans)
    count = 1 + max(action.microbatch for own in lists for action in own)
    return Schedule(tuple(spans), played, len(lists), count, "forwards of one stage")


def device_of(environment: Mapping[str, Any]) -> Device | None:
    """The catalogue's entry for the device of a run's environment; None for the CPU and for unknown devices."""
    name, memory = environment.get("device_name"), environment.get("device_memory_bytes")
    if environment.get("device") != "cuda" or not name or not memory:
        return None
    from shardwright.train.utilisation import device_of as named  # loads torch

    return named(str(name), int(memory))

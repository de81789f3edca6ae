"""What the planner says of a run: memory over one update, the pipeline played, traffic and time; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from shardwright.arch.model_shape import Inventory, built_by, shape_of_model
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
from shardwright.planner.job import Job, Layout
from shardwright.planner.memory_timeline import Moment, peak, timeline
from shardwright.planner.of_run import job_of, layout_of
from shardwright.planner.own_software import own_software
from shardwright.planner.pipeline_simulator import Played, Span, StageSeconds, play
from shardwright.planner.program import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.planner.rank_bytes import stages_of
from shardwright.planner.step_time import Clock, StepTime
from shardwright.planner.traffic import traffic
from shardwright.tools.report.read import Directory

SECONDS = "planned seconds"
DRAWN_ACTIONS = 800
"""Longer schedules are drawn with fewer microbatches."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule as it was played. unit: of the times, `s` or what counts 1.

    microbatches: how many were played; fewer than the run's where there are too many to draw.
    """

    spans: tuple[Span, ...]
    played: Played
    ranks: int
    microbatches: int
    unit: str

    @property
    def idle(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        return 1 - sum(self.played.busy) / (self.ranks * self.played.total)


@dataclass(frozen=True)
class Forecast:
    """What the planner says of one run. pipeline_rank: the fullest one, whose moments these are.

    time: None where the device is not known, for the reason `no_time`.
    """

    layout: str
    peak_bytes: float
    pipeline_rank: int
    moments: tuple[Moment, ...]
    traffic: tuple[Traffic, ...]
    schedule: Schedule | None
    time: StepTime | None
    no_time: str


def shape_of(run: RunFile, inventory: Inventory | None) -> Shape:
    """The planner's shape of the run's model. Raises `ConfigError` where it cannot be known."""
    name = run.model.model_name_or_path
    if not (is_import_path(name) or Path(name).exists()):
        raise ConfigError(
            f"the model `{name}` is not to be found from here.", "", "Run report where the run was started."
        )
    return shape_of_model(name, inventory, built_by(run.model.model_dump()))


def forecast(directory: Directory, device: Device | None, inventory: Inventory | None = None) -> Forecast | str:
    """What the planner says of the run of `directory`, or the reason why it says nothing."""
    run, world_size = directory.run, directory.environment.get("world_size")
    if run is None:
        return directory.missing.get("config.yaml", "there is no config.yaml")
    if not isinstance(world_size, int):
        return "environment.json does not say the number of ranks"
    try:
        axes = resolve_axes(run.parallelism, world_size)
        # a GPU says how much memory it has
        kind = "cuda" if "device_memory_bytes" in directory.environment else "cpu"
        job, layout = job_of(run, shape_of(run, inventory), kind), layout_of(run, axes, kind)
        if directory.environment.get("loss_chunk_tokens"):
            job = replace(job, loss="chunked")
        return _forecast(run, job, layout, device)
    except ShardwrightError as error:
        return str(error)


def _forecast(run: RunFile, job: Job, layout: Layout, device: Device | None) -> Forecast:
    program = SHARDWRIGHT_COMPILED if run.memory.compile else SHARDWRIGHT
    software = own_software(job.device_kind, run.memory.compile)
    stages = stages_of(job, layout)
    clock = Clock(job, device, software) if device else None
    fullest = peak(job, layout, program)
    sent = [traffic(job, layout, rank, program) for rank in range(layout.axes.pp)]
    return Forecast(
        layout_name(layout),
        fullest.allocated,
        fullest.pipeline_rank,
        tuple(timeline(job, layout, fullest.pipeline_rank, program)),
        max(sent, key=lambda parts: sum(part.sent_bytes for part in parts)),
        _schedule(job, layout, stages, clock) if layout.axes.pp > 1 else None,
        clock.timed(layout, stages) if clock else None,
        "" if clock else "the device's speed is not known: give --device",
    )


def _schedule(job: Job, layout: Layout, stages: tuple[int, ...], clock: Clock | None) -> Schedule:
    """The run's pipeline played; without a device in units of a block's forward, each half of the backward taking as long."""
    kind, pp, chunks = layout.schedule or "1f1b", layout.axes.pp, layout.chunks
    count = whole = layout.microbatches(job)
    limit = max(pp, DRAWN_ACTIONS // (pp * chunks * 2))
    while count > limit:
        fewer = max(pp, ceil(count / 2 / pp) * pp)
        if fewer >= count or legality(kind, pp, chunks, fewer):
            count = whole
            break
        count = fewer
    if clock:
        times = clock.stage_seconds(layout, stages)
    else:
        head = head_blocks(*matrix_weights(job.shape))
        weights = [blocks + head * (stage == len(stages) - 1) for stage, blocks in enumerate(stages)]
        times = [StageSeconds(weight, weight, weight) for weight in weights]
    spans: list[Span] = []
    played = play(actions(kind, pp, chunks, count), lambda stage: stage_rank(kind, pp, stage), times, seen=spans)
    return Schedule(tuple(spans), played, pp, count, SECONDS if clock else "forwards of one block")


def played_lists(lists: Sequence[Sequence[Action]]) -> Schedule:
    """Recorded action lists played with stages that are all alike: a forward counts 1, a backward 2."""
    owner = {action.stage: rank for rank, own in enumerate(lists) for action in own}
    times = [StageSeconds(1.0, 1.0, 1.0)] * len(owner)
    spans: list[Span] = []
    played = play(lists, owner.__getitem__, times, seen=spans)
    count = 1 + max(action.microbatch for own in lists for action in own)
    return Schedule(tuple(spans), played, len(lists), count, "forwards of one stage")


def device_of(environment: Mapping[str, Any]) -> Device | None:
    """The catalogue's entry for the device that a run's environment names; None for the CPU and for unknown ones."""
    name, memory = environment.get("device_name"), environment.get("device_memory_bytes")
    if environment.get("device") != "cuda" or not name or not memory:
        return None
    from shardwright.train.utilisation import device_of as named  # loads torch

    return named(str(name), int(memory))

"""What the planner says of a run under a layout, to be held against what is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.arch.model_shape import built_by, shape_of_model
from shardwright.arch.shape import Shape
from shardwright.config.schema import RunFile
from shardwright.errors import ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.layout.traffic import Traffic
from shardwright.models.parameter_inventory import inventory
from shardwright.planner.hardware import find_device
from shardwright.planner.memory_timeline import short_peak
from shardwright.planner.of_run import job_of, layout_of
from shardwright.planner.own_software import own_software
from shardwright.planner.program import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.planner.step_time import Clock
from shardwright.planner.traffic import Place, own_stages, traffic


@dataclass(frozen=True)
class Planned:
    """Of one layout: peak bytes of tensors on the fullest rank, and of what; seconds of an update, None without a device.

    idle: fraction of the update that the pipeline idles.
    """

    peak_bytes: float
    composition: dict[str, float]
    moment: str
    seconds: float | None
    parts: dict[str, float]
    idle: float | None


def shape_of(run: RunFile) -> Shape | None:
    """The model's shape as the planner sees it; None for a model that it cannot read."""
    section = built_by(run.model.model_dump())
    try:
        return shape_of_model(run.model.model_name_or_path, lambda _: inventory(run.model), section)
    except ShardwrightError:
        return None


def plan_of(
    run: RunFile, axes: Axes, shape: Shape, chunked: bool, device: str | None, hardware: str | None = None
) -> Planned:
    """Memory and time of `run` on `axes`. chunked: logits are made for a part of the targets at a time.

    device: torch's type, None for that of the run file. hardware: a name of the catalogue or a hardware file, for the time.
    """
    job = replace(job_of(run, shape, device), loss="chunked" if chunked else "full")
    layout = layout_of(run, axes, device)
    program = SHARDWRIGHT_COMPILED if run.memory.compile else SHARDWRIGHT
    found = short_peak(job, layout, program)
    seconds, parts, idle = None, {}, None
    if hardware is not None:
        clock = Clock(job, find_device(hardware), own_software(job.device_kind, run.memory.compile))
        time = clock.timed(layout, own_stages(shape, axes.pp * layout.chunks))
        seconds, parts = time.total, {name: part for name, part in time._asdict().items() if part}
        idle = time.bubble / time.total
    return Planned(found.allocated, found.composition, found.moment, seconds, parts, idle)


def traffic_of(run: RunFile, axes: Axes, shape: Shape, rank: int) -> tuple[Traffic, ...]:
    """What rank `rank` sends in the forward and backward passes of an update."""
    at, ddp = axes.coordinates(rank), run.parallelism.data_parallel == "ddp"
    place = Place(at["tp"], 0 if ddp else at["dp_shard"] * axes.cp + at["cp"])
    return traffic(job_of(run, shape), layout_of(run, axes), at["pp"], place=place)

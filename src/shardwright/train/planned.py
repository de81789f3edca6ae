"""What the planner says of a run under a layout, to be held against what is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.arch.shape import Shape
from shardwright.config.schema import RunFile
from shardwright.errors import ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.layout.traffic import Traffic
from shardwright.models.parameter_inventory import inventory
from shardwright.planner.estimate import estimate
from shardwright.planner.hardware import find_device
from shardwright.planner.problem import layout_of, problem_of, shape_of_run
from shardwright.planner.traffic import ShardCoordinates, traffic


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
    try:
        return shape_of_run(run, lambda _: inventory(run.model))
    except ShardwrightError:
        return None


def plan_of(
    run: RunFile, axes: Axes, shape: Shape, chunked: bool, device: str | None, hardware: str | None = None
) -> Planned:
    """Memory and time of `run` on `axes`. chunked: logits are made for a part of the targets at a time.

    device: torch's type, None for that of the run file. hardware: a name of the catalogue or a hardware file, for the time.
    """
    problem = problem_of(run, shape, device, find_device(hardware) if hardware else None)
    found = estimate(replace(problem, loss="chunked" if chunked else "full"), layout_of(run, axes, device))
    peak, time = found.peak, found.time
    parts = {name: part for name, part in time._asdict().items() if part} if time else {}
    seconds, idle = (time.total, time.bubble / time.total) if time else (None, None)
    return Planned(peak.allocated, peak.composition, peak.moment, seconds, parts, idle)


def traffic_of(run: RunFile, axes: Axes, shape: Shape, rank: int) -> tuple[Traffic, ...]:
    """What rank `rank` sends in the forward and backward passes of an update."""
    at, ddp = axes.coordinates(rank), run.parallelism.data_parallel == "ddp"
    place = ShardCoordinates(at["tp"], 0 if ddp else at["dp_shard"] * axes.cp + at["cp"])
    return traffic(problem_of(run, shape), layout_of(run, axes), at["pp"], place)

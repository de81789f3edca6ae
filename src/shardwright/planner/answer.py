"""The planner's answer as data: what was asked, the ranked layouts, what was rejected and why, and the
advice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardwright.arch.flops import model_flops, recompute_flops, utilisation
from shardwright.arch.parameters import counts
from shardwright.planner.advice import (
    APPROACHES,
    approach_of,
    first_to_test,
    more_devices,
    remaining_limits,
    what_would_fit,
)
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.reliability import CHECKPOINT_BYTES, Interruptions, interruptions
from shardwright.planner.search import Choice, Found, Search
from shardwright.planner.space import KINDS
from shardwright.planner.traffic import sent_by_axis, traffic
from shardwright.units import GIB

if TYPE_CHECKING:
    from shardwright.planner.problem import Layout, Problem


def layout_name(layout: Layout) -> str:
    """The layout on the command line: `pp4:1f1b+zero1+tp2`."""
    a = layout.axes
    parts = [f"pp{a.pp}:{layout.schedule}"] if a.pp > 1 else []
    parts.append(layout.data_parallel)
    if a.dp_replicate > 1 and layout.data_parallel != "ddp":
        parts.append(f"hsdp{a.dp_replicate}")
    parts += [f"{name}{size}" for name, size in (("cp", a.cp), ("tp", a.tp)) if size > 1]
    return "+".join(parts)


def layout_keys(layout: Layout) -> dict[str, Any]:
    """The keys of the run file that differ from its defaults, so that the layout can be run."""
    a = layout.axes
    keys: dict[str, Any] = {
        "training.per_device_train_batch_size": layout.microbatch_rows,
        "parallelism.data_parallel": layout.data_parallel,
    }
    for key, size in (
        ("dp_replicate_size", a.dp_replicate),
        ("tp_size", a.tp),
        ("cp_size", a.cp),
        ("pp_size", a.pp),
    ):
        if size > 1:
            keys[f"parallelism.{key}"] = size
    if a.pp > 1:
        keys["parallelism.pp_schedule"] = layout.schedule
        if layout.chunks > 1:
            keys["stages per rank"] = layout.chunks
    if layout.data_parallel == "zero3" and layout.reshard_after_forward is not True:
        keys["parallelism.reshard_after_forward"] = layout.reshard_after_forward
    if layout.data_parallel != "ddp":
        if layout.unit != "block":
            keys["parallelism.unit"] = layout.unit
        if layout.prefetch != 1:
            keys["parallelism.prefetch"] = layout.prefetch
    if layout.recompute != "none":
        keys["memory.activation_checkpointing"] = layout.recompute
    if layout.offload != "none":
        keys["memory.cpu_offload"] = layout.offload
    return keys


@dataclass(frozen=True)
class Described:
    """One layout with everything that is printed about it. Bytes, seconds, and fractions.

    sent_bytes: what pipeline rank 0 sends in one update, by axis. moment and composition say when its memory
    is fullest and what is alive then; empty where that was not asked for.
    """

    name: str
    family: str
    keys: dict[str, Any]
    microbatches: int
    seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    mfu: float
    hfu: float
    allocated_bytes: float
    device_bytes: float
    moment: str
    composition: dict[str, float]
    sent_bytes: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(search: Search, choice: Choice, *, composition: bool = True) -> Described:
    """Everything about one layout that fits; without `composition`, all but what its peak is made of."""
    problem, layout = search.problem, choice.layout
    found = short_peak(problem, layout) if composition else None
    moment = found.moment if found else ""
    tokens = problem.global_batch_size * problem.max_length
    rate = tokens / choice.seconds
    flops = model_flops(problem.shape, problem.attended).total
    again = recompute_flops(problem.shape, problem.attended, layout.recompute) if layout.recompute == "full" else 0.0
    peak_flops = search.device.peak(problem.param_dtype)
    return Described(
        name=layout_name(layout),
        family=choice.family,
        keys=layout_keys(layout),
        microbatches=layout.microbatches(problem),
        seconds=choice.seconds,
        parts={name: seconds for name, seconds in choice.time._asdict().items() if seconds},
        tokens_per_second=rate,
        mfu=utilisation(flops, rate, search.devices, peak_flops),
        hfu=utilisation(flops + again, rate, search.devices, peak_flops),
        allocated_bytes=choice.allocated_bytes,
        device_bytes=choice.device_bytes,
        moment=f"pipeline rank {found.pipeline_rank}, {moment}" if found and layout.axes.pp > 1 else moment,
        composition=found.composition if found else {},
        sent_bytes=sent_by_axis(traffic(problem, layout)),
    )


@dataclass(frozen=True)
class DescribedRejection:
    """A family in which nothing fits: what its leanest layout needs, mostly of what, and the nearest change
    that helps.
    """

    family: str
    name: str
    device_bytes: float
    mostly: str
    change: str


_NEXT = {
    "ddp": (
        ("zero1", "shard optimizer states"),
        ("zero2", "shard gradients too"),
        ("zero3", "shard parameters too"),
    ),
    "zero1": (("zero2", "shard gradients too"), ("zero3", "shard parameters too")),
    "zero2": (("zero3", "shard parameters too"),),
    "hsdp": (("zero3", "shard over all data ranks instead of replicating"),),
}


def _rejections(search: Search, found: Found) -> list[DescribedRejection]:
    order = {kind: index for index, kind in enumerate(KINDS)}
    result = []
    for family, rejection in sorted(
        found.rejected.items(), key=lambda item: (item[0].count("+"), order[item[0].partition("+")[0]])
    ):
        if rejection.layout is None:
            continue
        kind, _, split = family.partition("+")
        change = ""
        for better, how in _NEXT.get(kind, ()):
            if (f"{better}+{split}" if split else better) in found.best:
                change = f"{how}: {better}{'+' + split if split else ''} fits"
                break
        if not change and found.best:
            nearest = min(found.best.values(), key=lambda choice: choice.seconds)
            change = f"{nearest.family} fits"
        if not change:
            change = more_devices(search, family)
        top = short_peak(search.problem, rejection.layout).composition
        name, size = next(iter(top.items()))
        mostly = f"{name} {size / GIB:.1f} GiB"
        result.append(DescribedRejection(family, layout_name(rejection.layout), rejection.device_bytes, mostly, change))
    return result


@dataclass(frozen=True)
class Answer:
    """What `plan` found for a problem on so many devices."""

    problem: Problem
    device: str
    devices: int
    capacity_bytes: int
    parameters: int
    considered: int
    ranked: tuple[Described, ...]
    first: Described | None
    path: str
    rejected: tuple[DescribedRejection, ...]
    illegal: dict[str, int]
    limits: tuple[str, ...]
    would_fit: tuple[str, ...]
    interruptions: Interruptions

    @property
    def fits(self) -> bool:
        return self.first is not None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data for --json."""
        path = APPROACHES.get(self.path)
        return {
            "model": {
                "name": self.problem.shape.name or self.problem.shape.family,
                "parameters": self.parameters,
                **asdict(self.problem.shape),
            },
            "job": {
                key: value for key, value in vars(self.problem).items() if key not in ("shape", "program", "device")
            },
            "device": self.device,
            "devices": self.devices,
            "capacity_bytes": self.capacity_bytes,
            "layouts_considered": self.considered,
            "fits": self.fits,
            "first_to_test": self.first.as_dict() if self.first else None,
            "path": path._asdict() if path else None,
            "ranked": [described.as_dict() for described in self.ranked],
            "rejected": [asdict(rejected) for rejected in self.rejected],
            "illegal": self.illegal,
            "will_not_fix": list(self.limits),
            "would_fit": list(self.would_fit),
            "interruptions": asdict(self.interruptions),
        }


def answer(search: Search, shown: int = 5) -> Answer:
    """Searches, and puts the answer together; the `shown` best families are described in full."""
    found = search.run()
    ranked = found.ranked()
    first = first_to_test(search, found)
    described = [describe(search, choice, composition=False) for choice in ranked[:shown]]
    own = describe(search, first) if first is not None else None
    limits: tuple[str, ...] = ()
    if first is not None and own is not None:
        limits = tuple(remaining_limits(search, first, own.composition, own.allocated_bytes))
    would_fit = () if ranked else tuple(what_would_fit(search))
    nodes = max(1, search.devices // search.device.node.devices)
    total = counts(search.problem.shape).total
    return Answer(
        problem=search.problem,
        device=search.device.name,
        devices=search.devices,
        capacity_bytes=search.capacity,
        parameters=total,
        considered=found.considered,
        ranked=tuple(described),
        first=own,
        path=approach_of(first.layout) if first else "",
        rejected=tuple(_rejections(search, found)),
        illegal=found.illegal,
        limits=limits,
        would_fit=would_fit,
        interruptions=interruptions(search.devices, total * CHECKPOINT_BYTES, nodes),
    )

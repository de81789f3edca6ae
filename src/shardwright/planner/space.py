"""The search space: every legal layout of a problem on a number of devices, and why the other layouts are not legal.

A mesh shape is the sizes of tp, cp and pp. A layout group is a mesh shape with schedule, microbatch and recomputation. The
layouts of a group differ in data parallelism only, which changes neither kernels nor pipeline. Data parallelism only adds time,
so the time of the group without data parallelism is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardwright.layout.axes import Axes
from shardwright.layout.combinations import FULLY_SHARD, SPLIT_BACKWARD, excluded
from shardwright.layout.pipeline_schedules import legality
from shardwright.planner.problem import Layout, Problem, Recompute

if TYPE_CHECKING:
    from shardwright.arch.shape import Shape
    from shardwright.config.schema import Schedule

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
CHUNKS = (2, 3, 4, 6, 8)
UNITS: tuple[int | str, ...] = ("block", 2, 4, "root")
PREFETCH = (1, 2)

KINDS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "offload")
"""Data-parallel kinds. hsdp is zero3 with dp_replicate > 1; offload is zero3 with shards and optimizer on the host."""

ON_DEVICE = KINDS[:-1]
"""Without offload, which is searched on request only: the catalogue does not know the memory of hosts."""

WITHOUT_HSDP = tuple(kind for kind in KINDS if kind != "hsdp")

SPLIT_WEIGHTS = tuple(name for name in SPLIT_BACKWARD if excluded({name, *FULLY_SHARD}))
"""Schedules that compute gradients of weights apart, and run without `fully_shard` only."""


class MeshShape(NamedTuple):
    """Sizes of tp, cp and pp, and of the data axis that they leave."""

    tp: int
    cp: int
    pp: int
    data: int

    @property
    def family(self) -> str:
        """The axes that split the model: `tp+pp`, `tp`, `pp` or an empty string. cp splits rows and is not among them."""
        return "+".join(name for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)


class LayoutGroup(NamedTuple):
    """A mesh shape with schedule, microbatch and recomputation."""

    mesh_shape: MeshShape
    schedule: Schedule | None
    chunks: int  # pipeline stages of a rank
    microbatch_rows: int
    microbatches: int  # of each data rank in an update
    recompute: Recompute


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def tensor_reason(shape: Shape, tp: int) -> str:
    """Why the model cannot be split over `tp` ranks, which hold whole heads and equal MLP columns; empty where it can."""
    sizes = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn}
    reasons = (f"{name} = {size} is not divisible by tp_size = {tp}" for name, size in sizes.items() if size % tp)
    return next(reasons, "")


def mesh_shapes(problem: Problem, devices: int) -> tuple[list[MeshShape], dict[str, int]]:
    """The legal mesh shapes, and how many mesh shapes each reason refuses."""
    legal: list[MeshShape] = []
    illegal: Counter[str] = Counter()
    for tp in divisors(devices):
        if tensor_reason(problem.shape, tp):
            illegal["tp_size must divide the heads, the key and value heads, and the width of the MLP"] += 1
            continue
        for cp in divisors(devices // tp):
            if cp > 1 and problem.max_length % (2 * cp):
                illegal["2 x cp_size must divide max_length"] += 1
                continue
            for pp in divisors(devices // (tp * cp)):
                data = devices // (tp * cp * pp)
                if pp > problem.shape.layers:
                    illegal[f"pp_size is larger than the number of blocks, {problem.shape.layers}"] += 1
                elif problem.global_batch_size % data:
                    illegal[
                        f"the number of data ranks must divide the {problem.global_batch_size} rows of an update"
                    ] += 1
                else:
                    legal.append(MeshShape(tp, cp, pp, data))
    return legal, illegal


@lru_cache(maxsize=65536)
def schedules(pp: int, layers: int, microbatches: int) -> tuple[tuple[Schedule | None, int], ...]:
    """The (schedule, chunks) that run with so many microbatches."""
    if pp == 1:
        return ((None, 1),)
    options: list[tuple[Schedule, int]] = [("gpipe", 1), ("1f1b", 1)]
    options += [("interleaved_1f1b", chunks) for chunks in CHUNKS if pp * chunks <= layers]
    options.append(("zero_bubble", 1))
    if 2 * pp <= layers:
        options.append(("zbv", 2))
    return tuple(option for option in options if not legality(option[0], pp, option[1], microbatches))


@lru_cache(maxsize=16)
def recomputations(schedule: Schedule | None) -> tuple[Recompute, ...]:
    """The kinds of recomputation that run with a schedule."""
    return tuple(kind for kind in RECOMPUTE if schedule is None or not excluded({schedule, kind}))


def layout_groups(problem: Problem, mesh_shape: MeshShape) -> Iterator[LayoutGroup]:
    """Every layout group of a mesh shape."""
    rows = problem.global_batch_size // mesh_shape.data
    for microbatch in divisors(rows):
        count = rows // microbatch
        for schedule, chunks in schedules(mesh_shape.pp, problem.shape.layers, count):
            for recompute in recomputations(schedule):
                yield LayoutGroup(mesh_shape, schedule, chunks, microbatch, count, recompute)


@lru_cache(maxsize=65536)
def _kinds(schedule: Schedule | None, data: int, cp: int) -> tuple[str, ...]:
    if schedule in SPLIT_WEIGHTS:
        return ("ddp",)
    if data * cp == 1:
        return ("ddp", "offload")
    return KINDS if data > 1 else WITHOUT_HSDP


def kinds_of(layout_group: LayoutGroup) -> tuple[str, ...]:
    """The data-parallel kinds of a layout group's layouts. With one rank to shard over there is only ddp, and offload."""
    return _kinds(layout_group.schedule, layout_group.mesh_shape.data, layout_group.mesh_shape.cp)


@lru_cache(maxsize=65536)
def _axes(mesh_shape: MeshShape, replicate: int) -> Axes:
    return Axes(mesh_shape.pp, replicate, mesh_shape.data // replicate, mesh_shape.cp, mesh_shape.tp)


@lru_cache(maxsize=65536)
def shardings(data: int, cp: int, kind: str) -> tuple[tuple[int, bool], ...]:
    """The (replicas, reshard after forward) of a kind; the first one shards most and keeps least gathered."""
    if kind == "ddp":
        return ((1, False),)
    if kind == "offload":
        return ((1, True),)
    replicas = (1,) if kind == "zero3" else divisors(data)[kind == "hsdp" :]
    sharded = [replicate for replicate in replicas if data // replicate * cp > 1]
    if kind in ("zero1", "zero2"):
        return tuple((replicate, False) for replicate in sharded)
    return tuple((replicate, reshard) for replicate in sharded for reshard in (True, False))


def variant(layout_group: LayoutGroup, kind: str, replicate: int, reshard: bool) -> Layout:
    """One layout of a layout group, with units of one block and prefetch 1."""
    return Layout(
        _axes(layout_group.mesh_shape, replicate),
        "zero3" if kind in ("hsdp", "offload") else kind,  # type: ignore[arg-type]
        layout_group.microbatch_rows,
        layout_group.schedule,
        layout_group.chunks,
        layout_group.mesh_shape.tp > 1,
        layout_group.recompute,
        reshard,
        offload="params" if kind == "offload" else "none",
    )


def variants(layout_group: LayoutGroup, kind: str) -> Iterator[Layout]:
    """Every layout of a layout group of one data-parallel kind."""
    for replicate, reshard in shardings(layout_group.mesh_shape.data, layout_group.mesh_shape.cp, kind):
        yield variant(layout_group, kind, replicate, reshard)


@lru_cache(maxsize=65536)
def _layouts_of(schedule: Schedule | None, data: int, cp: int) -> int:
    sharded = len(UNITS) * len(PREFETCH)
    choices = {kind: 1 if kind in ("ddp", "zero1", "zero2") else sharded for kind in _kinds(schedule, data, cp)}
    return len(recomputations(schedule)) * sum(len(shardings(data, cp, kind)) * n for kind, n in choices.items())


@lru_cache(maxsize=65536)
def count_layouts(rows: int, data: int, cp: int, pp: int, layers: int) -> int:
    """How many layouts a mesh shape has, units and prefetch included, with so many rows per data rank."""
    return sum(
        _layouts_of(schedule, data, cp)
        for microbatch in divisors(rows)
        for schedule, _ in schedules(pp, layers, rows // microbatch)
    )

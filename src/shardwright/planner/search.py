"""The fastest layout of every family, by branch and bound over all legal layouts.

A mesh shape, then a layout group, has a lower bound of its time: kernels and pipeline without any data-parallel cost.
Mesh shapes and layout groups are visited in the order of their bounds, and left as soon as the bound is above the best
time that their families already have. So each family's best layout is the best of all its legal layouts,
though few are timed one by one. Memory is bounded the same way: one microbatch row, everything recomputed,
and the finest sharding need least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from shardwright.planner.bounds import Bounded, Bounds
from shardwright.planner.data_parallel_time import UnitCompute, exposed
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.space import (
    ON_DEVICE,
    PREFETCH,
    RECOMPUTE,
    UNITS,
    LayoutGroup,
    MeshShape,
    count_layouts,
    kinds_of,
    layout_groups,
    mesh_shapes,
    shardings,
    variant,
    variants,
)
from shardwright.planner.step_time import StepTime

SHARDED = ("zero1", "zero2", "zero3", "hsdp")
BAND = 1.02
"""Layouts whose times differ by less than 2% are ranked by simplicity: no prediction is that sharp."""
REFINED = 3
FAR = 1.25
"""Once a family has a layout that fits, slower ones are searched up to this multiple of the best of all."""


class Choice(NamedTuple):
    """A layout that fits, with its time and peak (allocated, and with fragmentation and context)."""

    family: str
    layout: Layout
    stage_blocks: tuple[int, ...]
    time: StepTime
    allocated_bytes: float
    device_bytes: float

    @property
    def seconds(self) -> float:
        return self.time.total


class Rejection(NamedTuple):
    """A family in which nothing fits: the layout that needs least, and what it needs."""

    family: str
    layout: Layout | None
    device_bytes: float


@dataclass
class Found:
    """What the search found. considered: legal layouts in the space; timed: those that no bound ruled out."""

    best: dict[str, Choice] = field(default_factory=dict)
    rejected: dict[str, Rejection] = field(default_factory=dict)
    illegal: dict[str, int] = field(default_factory=dict)
    considered: int = 0
    timed: int = 0

    def ranked(self) -> list[Choice]:
        """The best of each family, by time in bands of 2%, then by simplicity."""
        if not self.best:
            return []
        fastest = min(choice.seconds for choice in self.best.values())
        return sorted(
            self.best.values(),
            key=lambda c: (int(log(c.seconds / fastest) / log(BAND)), complexity(c.layout), c.seconds),
        )


def complexity(layout: Layout) -> int:
    """How much there is to understand and to go wrong: each axis in use, then the memory choices."""
    a = layout.axes
    score = 4 * sum(size > 1 for size in (a.pp, a.cp, a.tp, a.dp_replicate))
    score += {"ddp": 0, "zero1": 2, "zero2": 2, "zero3": 2}[layout.data_parallel]
    score += 2 * (layout.schedule in ("zero_bubble", "zbv")) + (layout.schedule == "interleaved_1f1b")
    score += (layout.recompute != "none") + (layout.unit != "block") + (layout.prefetch != 1)
    return score + 6 * (layout.offload != "none")


class Search(Bounds):
    """Searches the layouts of a problem on a number of equal devices."""

    def __init__(self, problem: Problem, devices: int, kinds: tuple[str, ...] = ON_DEVICE) -> None:
        super().__init__(problem, devices)
        self.kinds, self.found = kinds, Found()
        self._fastest, self._seconds = inf, dict[str, float]()
        self._lean: dict[tuple[LayoutGroup, str], bool] = {}
        self._leanest: dict[tuple[MeshShape, str], tuple[Layout, float] | None] = {}
        self._transfers: dict[tuple[MeshShape, str], tuple[list[tuple[float, float]], tuple[float, float]]] = {}
        self._leans: dict[tuple[LayoutGroup, str], Layout | None] = {}
        self._families: dict[tuple[MeshShape, str], str] = {}

    def run(self) -> Found:
        """Fills `found` and returns it."""
        found, layers = self.found, self.problem.shape.layers
        legal, found.illegal = mesh_shapes(self.problem, self.devices)
        alive: list[tuple[float, MeshShape]] = []
        for mesh_shape in legal:
            rows = self.problem.global_batch_size // mesh_shape.data
            found.considered += count_layouts(rows, mesh_shape.data, mesh_shape.cp, mesh_shape.pp, layers)
            alive.append((self.mesh_shape_bound(mesh_shape), mesh_shape))
        alive.sort(key=lambda entry: entry[0])
        for bound, mesh_shape in alive:
            open_kinds = [
                kind
                for kind in self.kinds
                if bound < self._limit(self._family(mesh_shape, kind)) and self._may_fit(mesh_shape, kind)
            ]
            if open_kinds:
                self._mesh_shape(mesh_shape, open_kinds)
        self._settle(legal)
        played: set[str] = set()
        while True:
            # Playing a pipeline changes its time a little, so others may come to the top.
            rest = [choice for choice in found.ranked()[:REFINED] if choice.family not in played]
            if not rest:
                found.timed = self.asked
                return found
            played.add(rest[0].family)
            found.best[rest[0].family] = self.refine(rest[0])

    def _settle(self, legal: list[MeshShape]) -> None:
        """Every family without a best layout is rejected with the leanest one."""
        rejected = self.found.rejected
        for mesh_shape in legal:
            for kind in self.kinds:
                family = self._family(mesh_shape, kind)
                if family in self.found.best:
                    continue
                known = rejected.get(family)
                if (
                    known is not None
                    and known.device_bytes <= self.states(mesh_shape, kind).mean + self.program.context_bytes
                ):
                    continue
                least = self._least(mesh_shape, kind)
                if least is not None and (known is None or least[1] < known.device_bytes):
                    rejected[family] = Rejection(family, *least)

    def _family(self, mesh_shape: MeshShape, kind: str) -> str:
        found = self._families.get((mesh_shape, kind))
        if found is None:
            split = mesh_shape.family
            found = self._families[mesh_shape, kind] = f"{kind}+{split}" if split else kind
        return found

    def _limit(self, family: str) -> float:
        """Seconds above which a layout of this family is of no interest: its own best, or FAR x the best."""
        best = self._seconds.get(family)
        return inf if best is None else min(best, FAR * self._fastest)

    def _least(self, mesh_shape: MeshShape, kind: str) -> tuple[Layout, float] | None:
        key = (mesh_shape, kind)
        if key not in self._leanest:
            self._leanest[key] = self.least(mesh_shape, kind)
        return self._leanest[key]

    def _may_fit(self, mesh_shape: MeshShape, kind: str) -> bool:
        """Whether the family may have a layout that fits here, by what every layout of it keeps."""
        return self.states(mesh_shape, kind).mean + self.program.context_bytes <= self.capacity

    def _mesh_shape(self, mesh_shape: MeshShape, kinds: list[str]) -> None:
        left = self.capacity - self.program.context_bytes
        states = {kind: self.states(mesh_shape, kind) for kind in kinds}
        room = {kind: left - floor.first for kind, floor in states.items()}
        families = {kind: self._family(mesh_shape, kind) for kind in kinds}
        too_many: dict[tuple[object, ...], int] = {}
        for bound in self.bounded(mesh_shape, max(room.values()), max(map(self._limit, families.values()))):
            layout_group, seconds = bound.layout_group, bound.seconds
            open_kinds = [kind for kind in kinds if seconds < self._limit(families[kind])]
            if not open_kinds:
                break
            open_kinds = [
                kind
                for kind in open_kinds
                if bound.kept + bound.first_blocks * states[kind].first_block <= room[kind]
                and kind in kinds_of(layout_group)
            ]
            for kind in open_kinds:
                # What does not fit with fewer rows, or with more recomputed, does not fit with more; as long
                # as there are more microbatches than ranks, so that the pipeline is full.
                key = (kind, layout_group.schedule, layout_group.chunks, layout_group.recompute)
                hopeless = layout_group.microbatches > mesh_shape.pp and layout_group.microbatch_rows >= too_many.get(
                    key, 1 << 60
                )
                if hopeless or self._layout_group(bound, kind):
                    continue
                if layout_group.microbatches > mesh_shape.pp:
                    for recompute in RECOMPUTE[: RECOMPUTE.index(layout_group.recompute) + 1]:
                        key = (kind, layout_group.schedule, layout_group.chunks, recompute)
                        too_many[key] = min(too_many.get(key, 1 << 60), layout_group.microbatch_rows)

    def only(
        self, tp: int, cp: int, pp: int, kind: str, replicate: int | None = None, schedule: str | None = None
    ) -> Choice | None:
        """The fastest layout that fits with these axes and data-parallel family (and schedule, replicas)."""
        data = self.devices // (tp * cp * pp)
        mesh_shape = MeshShape(tp, cp, pp, data)
        best: Choice | None = None
        for bound in sorted(map(self.bound, layout_groups(self.problem, mesh_shape)), key=itemgetter(0)):
            layout_group = bound.layout_group
            wanted = kind in kinds_of(layout_group) and schedule in (None, layout_group.schedule)
            if not wanted or (best and bound.seconds >= best.seconds):
                continue
            if not self._lean_fits(layout_group, kind):
                continue
            stage_blocks = self.stage_blocks(layout_group)
            for layout in variants(layout_group, kind):
                time = self.clock.step(layout, stage_blocks)
                if replicate not in (None, layout.axes.dp_replicate) or (best and time.total >= best.seconds):
                    continue
                allocated, device = self.needs(layout)
                if device <= self.capacity:
                    best = Choice(self._family(mesh_shape, kind), layout, stage_blocks, time, allocated, device)
        return best and self.refine(best)

    def _lean_of(self, layout_group: LayoutGroup, kind: str) -> Layout | None:
        """The first variant, which shards most and drops parameters after forward where there is a choice."""
        key = (layout_group, kind)
        if key not in self._leans:
            self._leans[key] = next(variants(layout_group, kind), None)
        return self._leans[key]

    def _lean_fits(self, layout_group: LayoutGroup, kind: str) -> bool:
        """Whether the leanest layout of the layout group fits: finest sharding, parameters dropped after forward."""
        key = (layout_group, kind)
        known = self._lean.get(key)
        if known is None:
            layout = self._lean_of(layout_group, kind)
            known = self._lean[key] = layout is not None and self.fits(layout)
        return known

    def _options(self, bound: Bounded, kind: str, best: float) -> Sequence[tuple[int, bool]]:
        """The shardings of the group that may take less than `best` seconds, by the collectives that they add to its bound."""
        layout_group, clock = bound.layout_group, self.clock
        mesh_shape = layout_group.mesh_shape
        every = shardings(mesh_shape.data, mesh_shape.cp, kind)
        if not every or kind not in SHARDED or not clock.program.reduces_units:
            return every
        found, quickest = self._transfers_of(layout_group, kind)
        left = best - bound.seconds
        if kind in ("zero1", "zero2"):
            known = kind, mesh_shape.tp, bound.worst, bound.backward, layout_group.microbatches
            if clock.least_once(*known, quickest[0]) >= left:
                return ()
            return [sharding for sharding, one in zip(every, found) if clock.least_once(*known, one[0]) < left]
        # The waits of the microbatches, and of those that pass while the pipeline fills.
        left /= (layout_group.microbatches + (mesh_shape.pp - 1) / layout_group.chunks) * bound.worst.blocks
        layers, block = self.problem.shape.layers // (mesh_shape.pp * layout_group.chunks), bound.block
        compute = UnitCompute(1, layers, layers > 1, block.forward, block.backward, clock.slowdown)
        if exposed(compute, *quickest) >= left:
            return ()
        return [sharding for sharding, one in zip(every, found) if exposed(compute, *one) < left]

    def _transfers_of(
        self, layout_group: LayoutGroup, kind: str
    ) -> tuple[list[tuple[float, float]], tuple[float, float]]:
        """Seconds of a unit's collectives for each sharding of the layout group's mesh shape, and the least of each column.

        Two columns as in `unit_transfers`; of zero1 and zero2 the reduction only, in the first.
        """
        key = (layout_group.mesh_shape, kind)
        known = self._transfers.get(key)
        if known is None:
            layouts = variants(layout_group, kind)
            if kind in ("zero1", "zero2"):
                found = [(self.clock.unit_reduction(layout), 0.0) for layout in layouts]
            else:
                found = [self.clock.unit_transfers(layout) for layout in layouts]
            quickest = min(one[0] for one in found), min(one[1] for one in found)
            known = self._transfers[key] = found, quickest
        return known

    def _layout_group(self, bound: Bounded, kind: str) -> bool:
        """Times the layouts of a layout group that may be of interest; False when its leanest one does not fit."""
        layout_group = bound.layout_group
        family = self._family(layout_group.mesh_shape, kind)
        best = self._limit(family)
        if best == inf and not self._lean_fits(layout_group, kind):
            return False
        options = self._options(bound, kind, best)
        if not options:
            return True
        stage_blocks = self.stage_blocks(layout_group)
        timed: list[tuple[Layout, StepTime]] = []
        for replicate, reshard in options:
            layout = variant(layout_group, kind, replicate, reshard)
            time = self.clock.step(layout, stage_blocks)
            if time.total < best:
                timed.append((layout, time))
        if timed and not self._lean_fits(layout_group, kind):
            return False
        for layout, time in timed:
            if time.total >= best:
                continue
            allocated, device = self.needs(layout, self.capacity)
            if device <= self.capacity:
                best = self._seconds[family] = time.total
                self._fastest = min(self._fastest, best)
                self.found.best[family] = Choice(family, layout, stage_blocks, time, allocated, device)
            elif layout.reshard_after_forward is not False or kind in ("zero1", "zero2"):
                break  # More replicas shard less.
        return True

    def refine(self, choice: Choice) -> Choice:
        """Units and prefetch of a layout found, and its pipeline simulated instead of the closed form."""
        best = choice
        if choice.layout.data_parallel == "zero3":
            for unit in UNITS:
                for prefetch in PREFETCH:
                    layout = replace(choice.layout, unit=unit, prefetch=prefetch)  # type: ignore[arg-type]
                    time = self.clock.step(layout, choice.stage_blocks)
                    if time.total < best.seconds / BAND:
                        allocated, device = self.needs(layout)
                        if device <= self.capacity:
                            best = Choice(choice.family, layout, choice.stage_blocks, time, allocated, device)
        return best._replace(time=self.clock.timed(best.layout, best.stage_blocks))

"""Lower bounds of the time and memory of mesh shapes and layout groups, by which the search leaves out many layouts at once."""

from __future__ import annotations

from math import inf
from operator import add, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from shardwright.layout.axes import Axes
from shardwright.planner.activations import ActivationKey, block_bytes
from shardwright.planner.memory_peak import PeakMemory
from shardwright.planner.problem import Layout, Problem, Recompute
from shardwright.planner.rank_bytes import Elements, blocks_per_stage, rules, states_of
from shardwright.planner.rank_time import rank_kinds
from shardwright.planner.space import (
    CHUNKS,
    RECOMPUTE,
    LayoutGroup,
    MeshShape,
    divisors,
    kinds_of,
    recomputations,
    schedules,
    shardings,
    variant,
    variants,
)
from shardwright.planner.step_time import Clock, idle_rounds

if TYPE_CHECKING:
    from shardwright.planner.rank_time import BlockSeconds, RankKind


SLIGHTLY_LESS = 1 - 1e-9
"""Bounds add up in another order than predictions do."""


Edge = tuple[float, float, float, float]
"""Forward and backward seconds of the head, then of the embedding."""


class StatesFloor(NamedTuple):
    """Lower bound of the bytes that a family reserves on a mesh shape: on the mean pipeline rank, and on rank 0."""

    mean: float
    first: float  # of rank 0 without its blocks
    first_block: float  # of each block of rank 0


class Bounded(NamedTuple):
    """A layout group with lower bounds: of its seconds, and of the bytes of activations on pipeline rank 0."""

    seconds: float
    worst: RankKind  # the pipeline rank that works longest
    kept: float
    first_blocks: int  # of pipeline rank 0
    layout_group: LayoutGroup
    block: BlockSeconds  # of one microbatch, as `edge`
    edge: Edge

    @property
    def backward(self) -> float:
        """Seconds of the backward pass of one microbatch on the rank that works longest."""
        blocks, first, last = self.worst
        return blocks * self.block.backward + last * self.edge[1] + first * self.edge[3]


class Bounds:
    """Lower bounds, and exact needs, of the layouts of a problem on a number of equal devices.

    asked: layouts whose exact peak was asked for.
    """

    def __init__(self, problem: Problem, devices: int) -> None:
        self.problem, self.device, self.devices, self.program = problem, problem.known_device, devices, problem.program
        self.clock = Clock(problem)
        self.peaks = PeakMemory(problem)
        self.capacity = self.device.memory_bytes
        self.asked = 0
        self._blocks: dict[tuple[object, ...], int] = {}
        self._stages: dict[int, tuple[int, ...]] = {}
        self._kinds: dict[tuple[object, ...], list[RankKind]] = {}
        self._saved: dict[ActivationKey, float] = {}
        self._states: dict[tuple[MeshShape, str], StatesFloor] = {}

    def stage_blocks(self, layout_group: LayoutGroup) -> tuple[int, ...]:
        """Blocks of each pipeline stage of the layout group."""
        return self._stage_blocks(layout_group.mesh_shape.pp * layout_group.chunks)

    def _stage_blocks(self, stages: int) -> tuple[int, ...]:
        found = self._stages.get(stages)
        if found is None:
            found = self._stages[stages] = blocks_per_stage(self.problem.shape, stages)
        return found

    def needs(self, layout: Layout, limit: float = inf) -> tuple[float, float]:
        """(allocated, with fragmentation and context) bytes at the peak of the fullest rank.

        Of a layout that needs more than `limit`: some number above it; the first such rank settles it.
        """
        self.asked += 1
        context = self.program.context_bytes
        allocated, reserved = self.peaks.peak_bytes(layout, limit - context)
        return allocated, reserved + context

    def fits(self, layout: Layout) -> bool:
        """Whether `needs` says that the layout fits."""
        return self.needs(layout, self.capacity)[1] <= self.capacity

    def states(self, mesh_shape: MeshShape, kind: str) -> StatesFloor:
        """What every layout of the family reserves without activations: that of the layout that shards most."""
        found = self._states.get((mesh_shape, kind))
        if found is None:
            found = self._states[mesh_shape, kind] = self._states_floor(mesh_shape, kind)
        return found

    def _states_floor(self, mesh_shape: MeshShape, kind: str) -> StatesFloor:
        options = shardings(mesh_shape.data, mesh_shape.cp, kind)
        if not options:
            return StatesFloor(inf, inf, 0.0)
        rows = self.problem.global_batch_size // mesh_shape.data
        layout = variant(
            LayoutGroup(mesh_shape, None if mesh_shape.pp == 1 else "1f1b", 1, rows, 1, "full"), kind, *options[0]
        )
        rule = rules(self.problem, layout, 1)

        def reserved(total: Elements) -> float:
            """States, gradients at rest and what stays gathered, each of which is linear in the elements of a rank."""
            states = sum(states_of(self.problem, layout, rule, total)) + rule.resting * total.shard
            gathered = rule.compute * total.whole * (1 + self.program.fragmentation) if rule.resident else 0.0
            return (states + gathered) * SLIGHTLY_LESS

        alone = mesh_shape.pp == 1
        block, embedding, head = self.peaks.elements(layout, rule.degree, True, alone)
        first = Elements(*map(add, embedding, head))
        if not alone:
            head = self.peaks.elements(layout, rule.degree, False, True)[2]
        layers = self.problem.shape.layers
        mean = Elements(*((layers * b + e + h) / mesh_shape.pp for b, e, h in zip(block, embedding, head)))
        constant = reserved(first)
        one = Elements(*map(add, first, block))
        return StatesFloor(reserved(mean), constant, reserved(one) - constant)

    def bounded(self, mesh_shape: MeshShape, most: float, limit: float) -> list[Bounded]:
        """The layout groups of the mesh shape whose activations may fit into `most` bytes and that may take less than `limit`
        seconds, the quickest bound first.

        Left out is GPipe where 1F1B runs too: it idles as long and keeps more.
        """
        found: list[Bounded] = []
        rows, share = (
            self.problem.global_batch_size // mesh_shape.data,
            self.problem.shape.layers / mesh_shape.pp * SLIGHTLY_LESS,
        )
        for microbatch in divisors(rows):
            count = rows // microbatch
            modes = [
                (
                    recompute,
                    self._saved_bytes(mesh_shape, microbatch, recompute),
                    self._block(mesh_shape, microbatch, recompute),
                )
                for recompute in RECOMPUTE
            ]
            # The longest rank has at least its share of the blocks.
            modes = [mode for mode in modes if count * share * (mode[2].forward + mode[2].backward) < limit]
            if not modes:
                continue
            edge, send = self._edges(mesh_shape, microbatch)
            for schedule, chunks in schedules(mesh_shape.pp, self.problem.shape.layers, count):
                if schedule == "gpipe" and count >= mesh_shape.pp:
                    continue
                blocks = self._first_blocks(mesh_shape.pp, schedule, chunks)
                held = blocks * self._in_flight(mesh_shape.pp, schedule, chunks, count)
                for recompute, saved, block in modes:
                    if saved * held <= most and recompute in recomputations(schedule):
                        seconds, worst = self._floor(mesh_shape.pp, schedule, chunks, count, block, edge, send)
                        if seconds < limit:
                            layout_group = LayoutGroup(mesh_shape, schedule, chunks, microbatch, count, recompute)
                            found.append(Bounded(seconds, worst, saved * held, blocks, layout_group, block, edge))
        found.sort(key=itemgetter(0))
        return found

    def _saved_bytes(self, mesh_shape: MeshShape, rows: int, recompute: Recompute) -> float:
        """What a block keeps of one microbatch, with fragmentation."""
        key = (mesh_shape.tp, mesh_shape.cp, rows, mesh_shape.tp > 1, recompute, mesh_shape.pp > 1)
        found = self._saved.get(key)
        if found is None:
            saved = block_bytes(self.problem, key).saved
            found = self._saved[key] = saved * (1 + self.program.fragmentation)
        return found

    def _in_flight(self, pp: int, schedule: str | None, chunks: int, microbatches: int) -> float:
        """Microbatches of which pipeline rank 0 keeps all its blocks when it keeps most, a lower bound."""
        flight: float = min(pp, microbatches)
        if schedule == "gpipe":
            flight = microbatches
        elif schedule == "interleaved_1f1b":
            flight = min(flight * (chunks + 1) / chunks - 1, microbatches)
        return flight

    def _first_blocks(self, pp: int, schedule: str | None, chunks: int) -> int:
        """Blocks of pipeline rank 0."""
        key = (pp, schedule, chunks)
        found = self._blocks.get(key)
        if found is None:
            stages = self._stage_blocks(pp * chunks)
            found = stages[0] + stages[-1] if schedule == "zbv" else sum(stages[::pp])
            self._blocks[key] = found
        return found

    def least(self, mesh_shape: MeshShape, kind: str) -> tuple[Layout, float] | None:
        """The layout of the family that needs least on this mesh shape, and what it needs; None for an empty
        family. Where one fits, the first that does.

        One row a microbatch and everything recomputed; or all rows in one microbatch, which keeps no
        unreduced gradients.
        """
        rows = self.problem.global_batch_size // mesh_shape.data
        best: tuple[Layout, float] | None = None
        for microbatch in {1, rows}:
            if best is not None and best[1] <= self.capacity:
                break
            count = rows // microbatch
            schedule = None if mesh_shape.pp == 1 else "1f1b" if count >= mesh_shape.pp else "gpipe"
            layout_group = LayoutGroup(mesh_shape, schedule, 1, microbatch, count, "full")  # type: ignore[arg-type]
            # For every kind the first variant shards most, and drops parameters after forward where there is
            # a choice.
            layout = next(iter(variants(layout_group, kind)), None) if kind in kinds_of(layout_group) else None
            if layout is not None:
                needed = self.needs(layout)[1]
                if best is None or needed < best[1]:
                    best = (layout, needed)
        return best

    def bound(self, layout_group: LayoutGroup) -> Bounded:
        """The lower bound of all layouts of the group: kernels and pipeline, without data-parallel cost."""
        mesh_shape, rows = layout_group.mesh_shape, layout_group.microbatch_rows
        block, (edge, send) = self._block(mesh_shape, rows, layout_group.recompute), self._edges(mesh_shape, rows)
        floor = self._floor(
            mesh_shape.pp, layout_group.schedule, layout_group.chunks, layout_group.microbatches, block, edge, send
        )
        blocks = self._first_blocks(mesh_shape.pp, layout_group.schedule, layout_group.chunks)
        held = blocks * self._in_flight(
            mesh_shape.pp, layout_group.schedule, layout_group.chunks, layout_group.microbatches
        )
        return Bounded(
            *floor,
            self._saved_bytes(mesh_shape, rows, layout_group.recompute) * held,
            blocks,
            layout_group,
            block,
            edge,
        )

    def _floor(
        self,
        pp: int,
        schedule: str | None,
        chunks: int,
        microbatches: int,
        block: BlockSeconds,
        edge: Edge,
        send: float,
    ) -> tuple[float, RankKind]:
        """`Clock.step` without anything that depends on the data-parallel axes, and the rank that works longest.

        Heavier stages of other ranks are left out: what they cost depends on which rank works longest. edge: forward and
        backward of head and embedding. send: seconds of one send between stages.
        """
        key = (pp, schedule, chunks)
        kinds = self._kinds.get(key)
        if kinds is None:
            kinds = self._kinds[key] = [k for k, _ in rank_kinds(self._stage_blocks(pp * chunks), schedule, pp, chunks)]
        one, layers = block.forward + block.backward, self.problem.shape.layers
        head, embedding = edge[0] + edge[1], edge[2] + edge[3]
        longest, worst = -1.0, kinds[0]
        for kind in kinds:
            blocks, first, last = kind
            works = blocks * one + first * embedding + last * head
            if works > longest:
                longest, worst = works, kind
        if pp == 1:
            return microbatches * longest * SLIGHTLY_LESS, worst
        every, w = layers * one + head + embedding, worst.blocks * block.weights
        missing = max(pp - microbatches, 0)
        if schedule == "zbv":
            inputs = layers * (block.backward - block.weights) + edge[1] + edge[3]
            inputs -= worst.blocks * block.backward + worst.last * edge[1] + worst.first * edge[3] - w
            idle = inputs / 2
        elif schedule == "zero_bubble":
            idle = every - longest - 2 * layers * block.weights + 2 * w + w * missing
        else:
            idle = (every - longest) / chunks + idle_rounds(pp, chunks, microbatches) * longest
        seconds = microbatches * longest + max(idle, 0.0) + self.clock.sends(pp, chunks, microbatches) * send
        return seconds * SLIGHTLY_LESS, worst

    def mesh_shape_bound(self, mesh_shape: MeshShape) -> float:
        """The smallest bound of its layout groups: nothing recomputed, the schedule that idles least, the best microbatch."""
        rows, layers, pp = self.problem.global_batch_size // mesh_shape.data, self.problem.shape.layers, mesh_shape.pp
        best = inf
        for microbatch in divisors(rows):
            b = self._block(mesh_shape, microbatch, "none")
            one = (b.forward + b.backward) * layers / pp
            idle = 0.0
            if pp > 1:
                idle = min(
                    one * (pp - 1) / max(CHUNKS),
                    ((b.backward - b.weights) * layers - one) / 2,
                    (pp - 1) * one - 2 * b.weights * layers,
                )
            best = min(best, one * (rows // microbatch) + max(idle, 0.0))
        return best * SLIGHTLY_LESS

    def _block(self, mesh_shape: MeshShape, rows: int, recompute: Recompute) -> BlockSeconds:
        return self.clock.block_at(mesh_shape.tp, mesh_shape.cp, mesh_shape.pp, self.devices, rows, recompute)

    def _edges(self, mesh_shape: MeshShape, rows: int) -> tuple[Edge, float]:
        """`Clock.edge` and `Clock.send` of one microbatch."""
        axes = Axes(mesh_shape.pp, 1, mesh_shape.data, mesh_shape.cp, mesh_shape.tp)
        layout = Layout(axes, "ddp", rows, sequence_parallel=mesh_shape.tp > 1)
        return self.clock.edge(layout), self.clock.send(layout)

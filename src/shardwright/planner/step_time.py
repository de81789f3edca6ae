"""Seconds of one update, part by part: kernels, exposed collectives, pipeline, optimizer.

`Clock` holds what does not change between layouts (the problem) and keeps the times that layouts
share, so that the search can ask for tens of thousands of layouts a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.pipeline_schedules import actions, legality, stage_rank
from shardwright.planner.data_parallel_time import DataParallelClock
from shardwright.planner.kernels import matmul_seconds
from shardwright.planner.network import send_seconds
from shardwright.planner.optimizer import NEWTON_SCHULZ_STEPS, block_matrices, optimizer_of
from shardwright.planner.pipeline_simulator import StageSeconds, play
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.rank_time import RankKind, RankSeconds

if TYPE_CHECKING:
    from shardwright.arch.shape import ParameterGroup

PLAYED_ACTIONS = 2500
"""Longer action lists are played with fewer microbatches and continued at the pace of the busiest rank."""


class StepTime(NamedTuple):
    """Seconds of one update on the busiest pipeline rank; `total` is their sum.

    compute: forward and backward of all microbatches. recompute: what of the backward pass is run again.
    tensor, context: exposed collectives of these axes. gathers: exposed waits for parameters and gradients at
    every microbatch (zero3). bubble: idle time of the pipeline. sends: exposed sends between stages.
    reduction: exposed gradient reduction and parameter gathers once per update. optimizer. fixed: what an
    update costs besides.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    gathers: float
    bubble: float
    sends: float
    reduction: float
    optimizer: float
    fixed: float

    @property
    def total(self) -> float:
        return sum(self)


class Alone(NamedTuple):
    """What data parallelism does not change: the kinds of ranks, the time that the busiest one sets, and the seconds of a
    microbatch if every turn took as long as the longest one (see `Clock._turn`).
    """

    ranks: list[RankSeconds]
    time: StepTime
    turn: float


def idle_rounds(pp: int, chunks: int, microbatches: int) -> float:
    """Microbatches' worth of idle time in interleaved rounds of fewer microbatches than ranks: each chunk but
    the first waits.
    """
    if chunks == 1:
        return 0.0
    rounds = max(1, microbatches // pp)
    return rounds * (chunks - 1) * max(pp - microbatches // rounds, 0) / chunks


class Clock(DataParallelClock):
    """Predicts the time of an update of `problem` for any layout."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._played: dict[tuple, float] = {}
        self._alone: dict[tuple, Alone] = {}
        self._optimizer_of, self._master_size = optimizer_of(problem.optimizer), DTYPE_BYTES[problem.master_dtype]
        self._orthogonal: dict[tuple[int, int, ParameterGroup], float] = {}

    def alone(self, layout: Layout, stage_blocks: tuple[int, ...]) -> Alone:
        """The time of one update without what the data-parallel axes and the optimizer add; `stage_blocks` says how many
        blocks each pipeline stage holds.
        """
        k = layout.microbatches(self.problem)
        key = (k, *self._ranks_key(layout, stage_blocks))
        found = self._alone.get(key)
        if found is not None:
            return found
        ranks = self._ranks(layout, stage_blocks)
        worst = max(ranks, key=lambda rank: rank.forward + rank.backward)
        turn = self._turn(layout, stage_blocks)
        time = self._parts(layout, ranks, worst, 0.0, turn)
        found = self._alone[key] = Alone(ranks, time, turn)
        return found

    def _parts(
        self,
        layout: Layout,
        ranks: list[RankSeconds],
        worst: RankSeconds,
        gathers: float,
        turn: float,
    ) -> StepTime:
        """The time of one update that rank `worst` sets, which waits `gathers` seconds at every microbatch."""
        k = layout.microbatches(self.problem)
        bubble = sends = 0.0
        if layout.axes.pp > 1:
            bubble, sends = self._pipeline(layout, ranks, worst, gathers, turn)
        b, n = self.block(layout), worst.blocks
        recompute, tensor, context = n * b.recompute, n * b.tensor, n * b.context
        compute = worst.forward + worst.backward - recompute - tensor - context
        return StepTime(
            k * compute,
            k * recompute,
            k * tensor,
            k * context,
            k * gathers,
            bubble,
            sends,
            0.0,
            0.0,
            self.program.update_seconds,
        )

    def step(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update in closed form."""
        ranks, time, turn = self.alone(layout, stage_blocks)
        waits = self._waits(layout, ranks)
        if self._each_microbatch(layout) and any(wait.microbatch for wait in waits):
            worst, wait = max(
                zip(ranks, waits), key=lambda pair: pair[0].forward + pair[0].backward + pair[1].microbatch
            )
            time = self._parts(layout, ranks, worst, wait.microbatch, turn)
        shards = layout.axes.dp_shard * layout.axes.cp if layout.data_parallel != "ddp" else 1
        return time._replace(
            reduction=max(wait.update for wait in waits),
            optimizer=max([self._optimizer(layout, rank.blocks, rank.parameters, shards) for rank in ranks]),
        )

    def send(self, layout: Layout) -> float:
        """Seconds of one send between stages."""
        a = layout.axes
        tokens = layout.microbatch_rows * self.problem.max_length / a.cp
        payload = tokens * self.problem.shape.hidden * self._size / (a.tp if layout.sequence_parallel else 1)
        inner = a.world_size // a.pp
        return send_seconds(self.device, inner >= self.device.node.devices, payload) + self.program.pipeline_seconds

    def _pipeline(
        self,
        layout: Layout,
        ranks: list[RankSeconds],
        worst: RankSeconds,
        gathers: float,
        turn: float,
    ) -> tuple[float, float]:
        """(idle seconds of the busiest rank, exposed sends) of one update.

        The first microbatch passes the other ranks forward and the last one backward; in between the busiest
        rank sets the pace. Chunks divide that, but with several stages per rank every round waits for its
        heaviest stage, and for the first microbatch to come round. With the weights' gradient apart
        (zero_bubble), it fills the wait of the ranks it belongs to; in zbv only the input's gradient of one
        stage is waited for. For equal stages this is what `timed` gets by playing the lists.
        """
        schedule, chunks, pp = layout.schedule, layout.chunks, layout.axes.pp
        microbatches = layout.microbatches(self.problem)
        whole = worst.forward + worst.backward + gathers
        if schedule == "zero_bubble":
            idle = sum(r.number * (r.forward + r.backward - 2 * r.weights) for r in ranks) + worst.weights * max(
                pp - microbatches, 0
            )
            idle -= worst.forward + worst.backward - 2 * worst.weights
        elif schedule == "zbv":
            inputs = sum(r.number * (r.backward - r.weights) for r in ranks) - (worst.backward - worst.weights)
            missing, more = max(pp - microbatches, 0), max(microbatches - pp, 0)
            idle = max(inputs / 2, inputs + missing * worst.forward - more * worst.weights)
        else:
            others = sum(r.number * (r.forward + r.backward) for r in ranks) - worst.forward - worst.backward
            idle = (others + (pp - 1) * gathers) / chunks + idle_rounds(pp, chunks, microbatches) * whole
        idle += microbatches * self._behind(layout, worst, turn)
        return max(idle, 0.0), self.sends(pp, chunks, microbatches) * self.send(layout)

    def sends(self, pp: int, chunks: int, microbatches: int) -> int:
        """Sends of one update that are waited for."""
        steps = 2 * (pp - 1)
        return steps if self.program.overlap_pipeline else steps + 2 * (microbatches - 1) * chunks

    def _turn(self, layout: Layout, stage_blocks: tuple[int, ...]) -> float:
        """Seconds of a microbatch on a rank of several stages, if each turn took as long as the longest one.

        A rank does a forward of one chunk and a backward of the opposite one in turn, all ranks in step.
        """
        chunks, pp = layout.chunks, layout.axes.pp
        if chunks == 1:
            return 0.0
        b = self.block(layout)
        heaviest = [max(stage_blocks[i * pp : (i + 1) * pp]) for i in range(chunks)]
        return chunks * max([b.forward * i + b.backward * j for i, j in zip(heaviest, reversed(heaviest))])

    def _behind(self, layout: Layout, worst: RankSeconds, turn: float) -> float:
        """Seconds per microbatch that rank `worst` waits for heavier stages of other ranks."""
        b = self.block(layout)
        return max(turn - worst.blocks * (b.forward + b.backward), 0.0)

    def timed(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update with the pipeline's action lists simulated, not in closed form."""
        closed = self.step(layout, stage_blocks)
        a, k, chunks = layout.axes, layout.microbatches(self.problem), layout.chunks
        if a.pp == 1 or layout.schedule is None:
            return closed
        schedule, played = layout.schedule, k
        while played * a.pp * chunks * 2 > PLAYED_ACTIONS and played >= 8 * a.pp and not played % 2:
            played //= 2
        if legality(schedule, a.pp, chunks, played):
            return closed
        times = self.stage_seconds(layout, stage_blocks)
        key = (schedule, a.pp, chunks, played, *times)
        idle = self._played.get(key)
        if idle is None:
            ran = play(
                actions(schedule, a.pp, chunks, played),
                lambda stage: stage_rank(schedule, a.pp, stage),
                times,
            )
            idle = self._played[key] = max(ran.total - max(ran.busy), 0.0)
        return closed._replace(bubble=idle)

    def stage_seconds(self, layout: Layout, stage_blocks: tuple[int, ...]) -> list[StageSeconds]:
        """One microbatch on every pipeline stage, the waits of data parallelism at each microbatch included."""
        last = len(stage_blocks) - 1
        stages = [
            self.rank(layout, RankKind(blocks, stage == 0, stage == last)) for stage, blocks in enumerate(stage_blocks)
        ]
        waits = [wait.microbatch / 2 for wait in self._waits(layout, stages)]
        return [
            StageSeconds(r.forward + wait, r.backward + wait - r.weights, r.weights) for r, wait in zip(stages, waits)
        ]

    def _optimizer(self, layout: Layout, blocks: int, parameters: float, shards: int) -> float:
        """Seconds of the optimizer step on a pipeline rank, whose states are divided over `shards` ranks."""
        if layout.offload == "params":
            # Gradients travel to the host and weights back; the host updates them at its own memory
            # bandwidth, which moves about four times as many bytes as travel.
            return parameters / shards * 4 * 2 * self._reduce_size / self.device.host_bandwidth
        moved = parameters * self._optimizer_of.moved
        if not self._optimizer_of.orthogonalises:
            return moved / shards / self._speed
        matrices = block_matrices(self.problem.shape)
        elements = blocks * sum(group.numel for group in matrices) / layout.axes.tp
        moved += elements * (self._optimizer_of.matrix_moved - self._optimizer_of.moved)
        orthogonal = blocks * sum(self._orthogonalising(layout.axes.tp, shards, group) for group in matrices)
        return moved / shards / self._speed + orthogonal

    def _orthogonalising(self, tp: int, shards: int, group: ParameterGroup) -> float:
        """Seconds of gathering one matrix and of making it orthogonal, on every rank alike (`train/muon.py`)."""
        found = self._orthogonal.get((tp, shards, group))
        if found is None:
            parts, dtype = tp if group.split else 1, "fp64" if self._master_size == 8 else "bf16"
            r, c = sorted(group.size)
            found = self._gather(shards, tp).seconds(group.numel * self._master_size / parts)
            found += self._gather(parts, 1).seconds(group.numel * self._master_size)
            products = ((r, r, c), (r, r, r), (r, c, r))
            once = sum(matmul_seconds(self.device, *product, dtype) for product in products)
            found = self._orthogonal[tp, shards, group] = found + NEWTON_SCHULZ_STEPS * once
        return found

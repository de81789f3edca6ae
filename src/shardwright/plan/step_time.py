"""Seconds of one update, part by part: kernels, exposed collectives, pipeline, optimizer.

`Clock` holds what does not change between layouts (job, device, software) and keeps the times that layouts
share, so that the search can ask for tens of thousands of layouts a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwright.layout.schedule import actions, legality, stage_rank
from shardwright.plan.network import Line, all_reduce_lines, gather_line, group_of, send_seconds
from shardwright.plan.playback import StageSeconds, play
from shardwright.plan.rank_time import RankClock, RankKind, RankSeconds

if TYPE_CHECKING:
    from shardwright.plan.device import Device
    from shardwright.plan.job import Job, Layout
    from shardwright.plan.kernels import Software

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
    """What data parallelism does not change: the kinds of ranks, the one that works longest, the time that it sets.

    least: that time without what heavier stages than its own cost, which depends on which rank works longest.
    """

    ranks: list[RankSeconds]
    worst: RankSeconds
    time: StepTime
    least: float


class Waits(NamedTuple):
    """Exposed seconds of the data-parallel axes on one rank: at each microbatch, and once per update."""

    microbatch: float
    update: float


def idle_rounds(pp: int, chunks: int, microbatches: int) -> float:
    """Microbatches' worth of idle time in interleaved rounds of fewer microbatches than ranks: each chunk but
    the first waits.
    """
    if chunks == 1:
        return 0.0
    rounds = max(1, microbatches // pp)
    return rounds * (chunks - 1) * max(pp - microbatches // rounds, 0) / chunks


class Clock(RankClock):
    """Predicts the time of an update of `job` on `device` under `software` for any layout."""

    def __init__(self, job: Job, device: Device, software: Software) -> None:
        super().__init__(job, device, software)
        self._played: dict[tuple, float] = {}
        self._alone: dict[tuple, Alone] = {}
        self._transfers: dict[tuple, tuple[float, float]] = {}
        self._gathers: dict[tuple[int, int], Line] = {}
        self._reduces: dict[tuple[int, int], tuple[Line, Line]] = {}

    def _gather(self, size: int, stride: int) -> Line:
        key = (size, stride)
        found = self._gathers.get(key)
        if found is None:
            found = self._gathers[key] = gather_line(
                self.device, group_of(size, stride, self.device.node.devices)
            )
        return found

    def _reduce(self, size: int, stride: int, payload: float) -> float:
        key = (size, stride)
        lines = self._reduces.get(key)
        if lines is None:
            lines = self._reduces[key] = all_reduce_lines(
                self.device, group_of(size, stride, self.device.node.devices)
            )
        ring, tree = lines
        return min(ring.fixed + ring.per_byte * payload, tree.fixed + tree.per_byte * payload)

    def _waits(self, layout: Layout, ranks: list[RankSeconds]) -> list[Waits]:
        """What the data-parallel axes add on each rank."""
        a = layout.axes
        if a.data_ranks * a.cp == 1 and layout.offload == "none":
            return [Waits(0.0, 0.0)] * len(ranks)
        if not self._each_microbatch(layout):
            once = layout.axes.pp > 1 and self.software.pipeline_keeps_gathered
            microbatches = 1 if once or layout.data_parallel != "zero2" else layout.microbatches(self.job)
            return [Waits(0.0, self._once(layout, rank, microbatches)) for rank in ranks]
        shard = self._shard_line(layout)
        edge_bytes = shard.per_byte * (self._size + self._reduce_size)
        unit = self.unit_wait(layout)
        return [
            Waits(rank.blocks * unit + 2 * shard.fixed + rank.edge_parameters * edge_bytes, 0.0)
            for rank in ranks
        ]

    def _shard_line(self, layout: Layout) -> Line:
        """A gather over the ranks that share the states."""
        a = layout.axes
        line = self._gather(a.dp_shard * a.cp, a.tp)
        if layout.offload == "params":
            # Each gather first brings this rank's shard from the host, each reduction ends in sending one
            # there.
            return Line(line.fixed, line.per_byte + 1 / (a.dp_shard * a.cp * self.device.host_bandwidth))
        return line

    def unit_wait(self, layout: Layout) -> float:
        """Seconds per block and microbatch that zero3 waits for parameters to come or gradients to leave."""
        return self.exposed(layout, *self.unit_transfers(layout))

    def _unit_blocks(self, layout: Layout) -> tuple[int, int]:
        """(blocks of a unit, blocks of a stage)."""
        layers = self.job.shape.layers // (layout.axes.pp * layout.chunks)
        if layout.unit == "block":
            return 1, layers
        return layers if layout.unit == "root" else min(int(layout.unit), layers), layers

    def unit_transfers(self, layout: Layout) -> tuple[float, float]:
        """Seconds that a unit's collectives take at each microbatch: its gather for forward, and in backward its
        reduce-scatter with the gather before it, where parameters were dropped.
        """
        a = layout.axes
        size = self._unit_blocks(layout)[0]
        key = (a.tp, a.cp, a.dp_shard, a.dp_replicate, size, layout.reshard_after_forward, layout.offload)
        found = self._transfers.get(key)
        if found is not None:
            return found
        shard = self._shard_line(layout)
        parameters = size * (self._block_split / a.tp + self._block_whole)
        gather = shard.fixed + shard.per_byte * parameters * self._size
        leave = shard.fixed + shard.per_byte * parameters * self._reduce_size
        if a.dp_replicate > 1:
            piece = parameters * self._reduce_size / (a.dp_shard * a.cp)
            leave += self._reduce(a.dp_replicate, a.tp * a.cp * a.dp_shard, piece)
        if layout.reshard_after_forward is True:
            leave += gather
        elif layout.reshard_after_forward is not False:
            leave += self._gather(int(layout.reshard_after_forward), a.tp).seconds(parameters * self._size)
        self._transfers[key] = (gather, leave)
        return gather, leave

    def exposed(self, layout: Layout, gather: float, leave: float) -> float:
        """Seconds per block that are waited for when a unit's collectives take `gather` and `leave`, window by window.

        With prefetch the gather of the next unit runs under the compute of a unit, and in the backward pass
        the reduce-scatter of the unit before as well. What does not fit there is exposed. While both run,
        compute is slower by `overlap_slowdown`. Embedding and head, at the ends, have nothing to hide under.
        """
        b, slow = self.block(layout), self.software.overlap_slowdown
        size, layers = self._unit_blocks(layout)
        waits = gather + leave
        if layout.prefetch > 0 and size < layers:
            forward, backward = b.forward * size, b.backward * size
            hidden = (
                max(gather - forward, 0.0)
                + slow * min(gather, forward)
                + max(leave - backward, 0.0)
                + slow * min(leave, backward)
            )
            # The first unit of a pass has no unit before it, nor has the last reduce-scatter one after it.
            waits = hidden + (waits - hidden) * size / layers
        return waits / size

    def _piece(self, layout: Layout, volume: float) -> float:
        """Bytes of gradients that are reduced together."""
        if layout.data_parallel != "ddp" and self.software.reduces_units:
            block = self._block_split / layout.axes.tp + self._block_whole
            return self._unit_blocks(layout)[0] * block * self._reduce_size
        return self.software.bucket_bytes or volume

    def _one_reduction(self, layout: Layout, payload: float) -> float:
        """Seconds of reducing one piece."""
        a = layout.axes
        if layout.data_parallel == "ddp":
            return self._reduce(a.data_ranks * a.cp, a.tp, payload)
        shard = self._gather(a.dp_shard * a.cp, a.tp)
        one = shard.fixed + shard.per_byte * payload
        if a.dp_replicate > 1:
            one += self._reduce(a.dp_replicate, a.tp * a.cp * a.dp_shard, payload / (a.dp_shard * a.cp))
        return one

    def _after(self, pieces: float, one: float, window: float) -> float:
        """Seconds that reducing `pieces` of `one` second each takes beyond, and costs within, a window of compute."""
        reduce = pieces * one
        return max(reduce - window, one) + self.software.overlap_slowdown * min(reduce, window)

    def _once(self, layout: Layout, rank: RankSeconds, reductions: int) -> float:
        """Exposed seconds of so many gradient reductions and one gather of the parameters."""
        a, software, kind = layout.axes, self.software, layout.data_parallel
        if not rank.parameters:
            return 0.0
        volume = rank.parameters * self._reduce_size
        pieces = max(1.0, volume / self._piece(layout, volume))
        overlaps = software.overlap_data_parallel and (
            kind != "ddp" or a.pp == 1 or software.overlap_pipeline_ddp
        )
        window = rank.backward if overlaps else 0.0
        exposed = self._after(pieces, self._one_reduction(layout, volume / pieces), window)
        gathers = 0.0
        if kind != "ddp":
            shard = self._gather(a.dp_shard * a.cp, a.tp)
            gathers = shard.fixed + shard.per_byte * rank.parameters * self._size
        return reductions * exposed + gathers

    def unit_reduction(self, layout: Layout) -> float:
        """Seconds of reducing one unit of zero1 or zero2."""
        return self._one_reduction(layout, self._piece(layout, 0.0))

    def least_once(self, layout: Layout, rank: RankSeconds, one: float, each: bool) -> float:
        """Seconds that zero1 or zero2 add to an update on `rank` (of `alone`), at least, where a unit takes `one`.

        each: it is reduced at every microbatch.
        """
        accumulate = rank.parameters * self.software.accumulate_bytes / self._speed
        pieces = rank.parameters * self._reduce_size / self._piece(layout, 0.0)
        count = layout.microbatches(self.job)
        exposed = self._after(pieces, one, rank.backward + accumulate) * (count if each else 1)
        return (exposed + count * accumulate) * (1 - 1e-9)

    def alone(self, layout: Layout, stage_blocks: tuple[int, ...]) -> Alone:
        """The time of one update without what the data-parallel axes and the optimizer add; `stage_blocks` says how many
        blocks each pipeline stage holds.
        """
        k = layout.microbatches(self.job)
        key = (k, *self._ranks_key(layout, stage_blocks))
        found = self._alone.get(key)
        if found is not None:
            return found
        ranks = self._ranks(layout, stage_blocks)
        worst = max(ranks, key=lambda rank: rank.forward + rank.backward)
        time = self._parts(layout, stage_blocks, ranks, worst, 0.0)
        least = time.total - k * self._turns(layout, stage_blocks, worst)
        found = self._alone[key] = Alone(ranks, worst, time, least)
        return found

    def _parts(
        self,
        layout: Layout,
        stage_blocks: tuple[int, ...],
        ranks: list[RankSeconds],
        worst: RankSeconds,
        gathers: float,
    ) -> StepTime:
        """The time of one update that rank `worst` sets, which waits `gathers` seconds at every microbatch."""
        k = layout.microbatches(self.job)
        bubble = sends = 0.0
        if layout.axes.pp > 1:
            bubble, sends = self._pipeline(layout, stage_blocks, ranks, worst, gathers, k)
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
            self.software.update_seconds,
        )

    def step(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update in closed form."""
        ranks, _, time, _ = self.alone(layout, stage_blocks)
        waits = self._waits(layout, ranks)
        if self._each_microbatch(layout) and any(wait.microbatch for wait in waits):
            worst, wait = max(
                zip(ranks, waits), key=lambda pair: pair[0].forward + pair[0].backward + pair[1].microbatch
            )
            time = self._parts(layout, stage_blocks, ranks, worst, wait.microbatch)
        shard = layout.axes.dp_shard * layout.axes.cp if layout.data_parallel != "ddp" else 1
        return time._replace(
            reduction=max(wait.update for wait in waits),
            optimizer=self._optimizer(layout, max(rank.parameters for rank in ranks) / shard),
        )

    def send(self, layout: Layout) -> float:
        """Seconds of one send between stages."""
        a = layout.axes
        tokens = layout.microbatch_rows * self.job.max_length / a.cp
        payload = tokens * self.job.shape.hidden * self._size / (a.tp if layout.sequence_parallel else 1)
        inner = a.world_size // a.pp
        return (
            send_seconds(self.device, inner >= self.device.node.devices, payload)
            + self.software.pipeline_seconds
        )

    def _pipeline(
        self,
        layout: Layout,
        stage_blocks: tuple[int, ...],
        ranks: list[RankSeconds],
        worst: RankSeconds,
        gathers: float,
        microbatches: int,
    ) -> tuple[float, float]:
        """(idle seconds of the busiest rank, exposed sends) of one update.

        The first microbatch passes the other ranks forward and the last one backward; in between the busiest
        rank sets the pace. Chunks divide that, but with several stages per rank every round waits for its
        heaviest stage, and for the first microbatch to come round. With the weights' gradient apart
        (zero_bubble), it fills the wait of the ranks it belongs to; in zbv only the input's gradient of one
        stage is waited for. For equal stages this is what `timed` gets by playing the lists.
        """
        schedule, chunks, pp = layout.schedule, layout.chunks, layout.axes.pp
        whole = worst.forward + worst.backward + gathers
        if schedule == "zero_bubble":
            idle = sum(
                r.number * (r.forward + r.backward - 2 * r.weights) for r in ranks
            ) + worst.weights * max(pp - microbatches, 0)
            idle -= worst.forward + worst.backward - 2 * worst.weights
        elif schedule == "zbv":
            inputs = sum(r.number * (r.backward - r.weights) for r in ranks) - (
                worst.backward - worst.weights
            )
            missing, more = max(pp - microbatches, 0), max(microbatches - pp, 0)
            idle = max(inputs / 2, inputs + missing * worst.forward - more * worst.weights)
        else:
            others = sum(r.number * (r.forward + r.backward) for r in ranks) - worst.forward - worst.backward
            idle = (others + (pp - 1) * gathers) / chunks + idle_rounds(pp, chunks, microbatches) * whole
        idle += microbatches * self._turns(layout, stage_blocks, worst)
        return max(idle, 0.0), self.sends(pp, chunks, microbatches) * self.send(layout)

    def sends(self, pp: int, chunks: int, microbatches: int) -> int:
        """Sends of one update that are waited for."""
        steps = 2 * (pp - 1)
        return steps if self.software.overlap_pipeline else steps + 2 * (microbatches - 1) * chunks

    def _turns(self, layout: Layout, stage_blocks: tuple[int, ...], worst: RankSeconds) -> float:
        """Seconds per microbatch that rank `worst` waits for heavier stages of other ranks.

        A rank does a forward of one chunk and a backward of the opposite one in turn, all ranks in step: each turn takes
        as long as the longest kind of turn.
        """
        chunks, pp = layout.chunks, layout.axes.pp
        if chunks == 1:
            return 0.0
        b = self.block(layout)
        heaviest = [max(stage_blocks[i * pp : (i + 1) * pp]) for i in range(chunks)]
        turn = max(b.forward * i + b.backward * j for i, j in zip(heaviest, reversed(heaviest)))
        return max(chunks * turn - worst.blocks * (b.forward + b.backward), 0.0)

    def timed(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update with the pipeline's action lists played, not in closed form."""
        closed = self.step(layout, stage_blocks)
        a, k, chunks = layout.axes, layout.microbatches(self.job), layout.chunks
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
            self.rank(layout, RankKind(blocks, stage == 0, stage == last))
            for stage, blocks in enumerate(stage_blocks)
        ]
        waits = [wait.microbatch / 2 for wait in self._waits(layout, stages)]
        return [
            StageSeconds(r.forward + wait, r.backward + wait - r.weights, r.weights)
            for r, wait in zip(stages, waits)
        ]

    def _optimizer(self, layout: Layout, local_parameters: float) -> float:
        if layout.offload == "params":
            # Gradients travel to the host and weights back; the host updates them at its own memory
            # bandwidth, which moves about four times as many bytes as travel.
            return local_parameters * 4 * 2 * self._reduce_size / self.device.host_bandwidth
        return local_parameters * self.software.optimizer_bytes / self._speed

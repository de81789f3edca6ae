"""What the data-parallel axes add to an update: parameters gathered, gradients reduced, and what of it is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwright.planner.network import TransferTime, all_reduce_times, gather_time, group_of
from shardwright.planner.rank_time import RankClock, RankKind, RankSeconds

if TYPE_CHECKING:
    from shardwright.planner.problem import Layout, Problem


class Waits(NamedTuple):
    """Exposed seconds of the data-parallel axes on one rank: at each microbatch, and once per update."""

    microbatch: float
    update: float


class UnitCompute(NamedTuple):
    """The compute of one unit of `size` blocks, of `layers` on its stage: seconds of forward and of backward.

    hides: collectives run beside it, which slows it by the fraction `slowdown` of their time.
    """

    size: int
    layers: int
    hides: bool
    forward: float
    backward: float
    slowdown: float


def exposed(compute: UnitCompute, gather: float, leave: float) -> float:
    """Seconds per block that are waited for when a unit's collectives take `gather` and `leave`.

    With prefetch the gather of the next unit runs under the compute of a unit, and in the backward pass the reduce-scatter
    of the unit before as well. What does not fit there is exposed. Embedding and head, at the ends, have nothing to hide
    under.
    """
    size, layers, hides, forward, backward, slow = compute
    waits = gather + leave
    if hides:
        hidden = gather - forward + slow * forward if gather > forward else slow * gather
        hidden = hidden + (leave - backward) + slow * backward if leave > backward else hidden + slow * leave
        # The first unit of a pass has no unit before it, nor has the last reduce-scatter one after it.
        waits = hidden + (waits - hidden) * size / layers
    return waits / size


class DataParallelClock(RankClock):
    """Times the collectives of the data-parallel axes, beside what a rank computes."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        load = self.device.node.transfer_load
        # Seconds that compute loses for each second of a transfer beside it.
        self.slowdown = self.program.overlap_slowdown if load is None else load
        self._gathers: dict[tuple[int, int], TransferTime] = {}
        self._reduces: dict[tuple[int, int], tuple[TransferTime, TransferTime]] = {}
        self._transfers: dict[tuple, tuple[float, float]] = {}

    def _gather(self, size: int, stride: int) -> TransferTime:
        key = (size, stride)
        found = self._gathers.get(key)
        if found is None:
            found = self._gathers[key] = gather_time(self.device, group_of(size, stride, self.device.node.devices))
        return found

    def _reduce(self, size: int, stride: int, payload: float) -> float:
        key = (size, stride)
        lines = self._reduces.get(key)
        if lines is None:
            lines = self._reduces[key] = all_reduce_times(self.device, group_of(size, stride, self.device.node.devices))
        ring, tree = lines
        return min(ring.fixed + ring.per_byte * payload, tree.fixed + tree.per_byte * payload)

    def _waits(self, layout: Layout, ranks: list[RankSeconds]) -> list[Waits]:
        """What the data-parallel axes add on each rank."""
        a = layout.axes
        if a.data_ranks * a.cp == 1 and layout.offload == "none":
            return [Waits(0.0, 0.0)] * len(ranks)
        if not self._each_microbatch(layout):
            once = layout.axes.pp > 1 and self.program.pipeline_keeps_gathered
            microbatches = 1 if once or layout.data_parallel != "zero2" else layout.microbatches(self.problem)
            return [Waits(0.0, self._once(layout, rank, microbatches)) for rank in ranks]
        shard = self._shard_time(layout)
        # Embedding and head are gathered once (`ZeroStage.gathers`), blocks that are dropped in between twice.
        edges = shard.per_byte * (self._size + self._reduce_size) + self._copied(1, 1)
        unit = self.unit_wait(layout)
        copied = self._copied(1 + (layout.reshard_after_forward is not False), 1)
        return [
            Waits(
                rank.blocks * unit
                + 2 * shard.fixed
                + rank.edge_parameters * edges
                + (rank.parameters - rank.edge_parameters) * copied,
                0.0,
            )
            for rank in ranks
        ]

    def _copied(self, gathers: int, reductions: int) -> float:
        """Seconds of a parameter that the computing core copies around so many gathers and reductions."""
        program = self.program
        moved = gathers * program.gather_passes * self._size
        return (moved + reductions * program.reduce_passes * self._reduce_size) / self._speed

    def _shard_time(self, layout: Layout) -> TransferTime:
        """A gather over the ranks that share the states."""
        a = layout.axes
        line = self._gather(a.dp_shard * a.cp, a.tp)
        if layout.offload == "params":
            # Each gather first brings this rank's shard from the host, each reduction ends in sending one
            # there.
            return TransferTime(line.fixed, line.per_byte + 1 / (a.dp_shard * a.cp * self.device.host_bandwidth))
        return line

    def unit_wait(self, layout: Layout) -> float:
        """Seconds per block and microbatch that zero3 waits for parameters to come or gradients to leave."""
        return exposed(self.unit_compute(layout), *self.unit_transfers(layout))

    def _unit_blocks(self, layout: Layout) -> tuple[int, int]:
        """(blocks of a unit, blocks of a stage)."""
        layers = self.problem.shape.layers // (layout.axes.pp * layout.chunks)
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
        shard = self._shard_time(layout)
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

    def unit_compute(self, layout: Layout) -> UnitCompute:
        """What a unit's collectives may run under."""
        b = self.block(layout)
        size, layers = self._unit_blocks(layout)
        hides = layout.prefetch > 0 and size < layers
        return UnitCompute(size, layers, hides, b.forward * size, b.backward * size, self.slowdown)

    def _piece(self, layout: Layout, volume: float) -> float:
        """Bytes of gradients that are reduced together."""
        if layout.data_parallel != "ddp" and self.program.reduces_units:
            block = self._block_split / layout.axes.tp + self._block_whole
            return self._unit_blocks(layout)[0] * block * self._reduce_size
        return self.program.bucket_bytes or volume

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
        return max(reduce - window, one) + self.slowdown * min(reduce, window)

    def _once(self, layout: Layout, rank: RankSeconds, reductions: int) -> float:
        """Exposed seconds of so many gradient reductions and one gather of the parameters."""
        a, program, kind = layout.axes, self.program, layout.data_parallel
        if not rank.parameters:
            return 0.0
        volume = rank.parameters * self._reduce_size
        pieces = max(1.0, volume / self._piece(layout, volume))
        overlaps = program.overlap_data_parallel and (kind != "ddp" or a.pp == 1 or program.overlap_pipeline_ddp)
        window = rank.backward if overlaps else 0.0
        one = self._one_reduction(layout, volume / pieces)
        exposed, last = self._after(pieces, one, window), 0.0
        if program.units_in_order and overlaps and rank.first:
            embedding = self._one_reduction(layout, self._embedding / a.tp * self._reduce_size)
            # Those of earlier microbatches travel under the next forward pass.
            last = max(0.0, embedding - max(pieces * one - window, one))
        if kind == "ddp":
            return reductions * exposed + last
        copied = rank.parameters * self._copied(1, reductions)
        return reductions * exposed + last + self._gathered_once(layout, rank) + copied

    def _gathered_once(self, layout: Layout, rank: RankSeconds) -> float:
        """Exposed seconds of gathering all parameters once per update."""
        a, b = layout.axes, self.block(layout)
        shard = self._gather(a.dp_shard * a.cp, a.tp)
        size = self._unit_blocks(layout)[0]
        if not self.program.units_in_order or layout.prefetch == 0 or rank.blocks <= size:
            return shard.fixed + shard.per_byte * rank.parameters * self._size
        ends = shard.seconds(rank.edge_parameters * self._size)
        inside = rank.parameters - rank.edge_parameters
        one = shard.seconds(inside / rank.blocks * size * self._size)
        beside = min(one, b.forward * size)
        return ends + one + (rank.blocks / size - 1) * (one - beside + self.slowdown * beside)

    def unit_reduction(self, layout: Layout) -> float:
        """Seconds of reducing one unit of zero1 or zero2."""
        return self._one_reduction(layout, self._piece(layout, 0.0))

    def least_once(self, kind: str, tp: int, worst: RankKind, backward: float, microbatches: int, one: float) -> float:
        """Seconds that zero1 or zero2 add to an update, at least, where a unit of one block takes `one`.

        On the rank that works longest; `backward`: of its blocks, embedding and head, in one microbatch.
        """
        parameters = self.parameters(tp, worst)[1]
        pieces = parameters / (self._block_split / tp + self._block_whole)
        accumulate = parameters * self.program.accumulate_bytes / self._speed
        reductions = microbatches if kind == "zero2" else 1
        reduced = self._after(pieces, one, backward + accumulate)
        return (reductions * reduced + microbatches * accumulate) * (1 - 1e-9)

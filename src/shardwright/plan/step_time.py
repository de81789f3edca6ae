"""Seconds of one update, part by part: kernels, exposed collectives, pipeline, optimizer.

`Clock` holds what does not change between layouts (job, device, software) and keeps the times that layouts share, so
that the search can ask for tens of thousands of layouts a second.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.inventory import counts
from shardwright.layout.schedule import actions, legality, rank_stages, stage_rank
from shardwright.layout.zero import STAGES
from shardwright.plan.job import DTYPE_BYTES, Job, Layout
from shardwright.plan.kernels import Software, block_time, embedding_time, head_time
from shardwright.plan.network import Group, all_reduce_seconds, gather_seconds, group_of, send_seconds
from shardwright.plan.playback import StageSeconds, play

if TYPE_CHECKING:
    from shardwright.plan.hardware import Device

PLAYED_ACTIONS = 6000
"""Longer action lists are played with fewer microbatches and continued at the pace of the busiest rank."""


class StepTime(NamedTuple):
    """Seconds of one update on the busiest pipeline rank; `total` is their sum.

    compute: forward and backward of all microbatches. recompute: what of the backward pass is run again. tensor, context:
    exposed collectives of these axes. gathers: exposed waits for parameters and gradients at every microbatch (zero3).
    bubble: idle time of the pipeline. sends: exposed sends between stages. reduction: exposed gradient reduction and
    parameter gathers once per update. optimizer. fixed: what an update costs besides.
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


class BlockSeconds(NamedTuple):
    """One block and microbatch: forward, backward (recompute in it), the weights' gradient (in backward), and of them the
    recomputed part and the waits of the tensor and context axes."""

    forward: float
    backward: float
    weights: float
    recompute: float
    tensor: float
    context: float


class RankSeconds(NamedTuple):
    """One microbatch on one pipeline rank (all its stages), and how many parameters it holds."""

    forward: float
    backward: float
    weights: float
    recompute: float
    tensor: float
    context: float
    gathers: float
    parameters: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.gathers


class RankKind(NamedTuple):
    """Pipeline ranks that are alike: blocks in all their stages, and whether they hold embedding and head."""

    blocks: int
    first: bool
    last: bool


@lru_cache(maxsize=4096)
def rank_kinds(stage_blocks: tuple[int, ...], schedule: str | None, pp: int, chunks: int) -> tuple[tuple[RankKind, int], ...]:
    """The distinct kinds of pipeline ranks and how many there are of each; the first kind is that of rank 0."""
    found: dict[RankKind, int] = {}
    for rank in range(pp):
        own = (0,) if pp == 1 else rank_stages(schedule or "1f1b", pp, chunks, rank)  # type: ignore[arg-type]
        kind = RankKind(sum(stage_blocks[stage] for stage in own), 0 in own, len(stage_blocks) - 1 in own)
        found[kind] = found.get(kind, 0) + 1
    return tuple(found.items())


class Clock:
    """Predicts the time of an update of `job` on `device` under `software` for any layout."""

    def __init__(self, job: Job, device: Device, software: Software) -> None:
        self.job, self.device, self.software = job, device, software
        self._blocks: dict[tuple, BlockSeconds] = {}
        self._edges: dict[tuple, tuple[float, float, float, float]] = {}
        number = counts(job.shape)
        self._block_split, self._block_whole = number.block_split, number.block_whole
        self._embedding = number.embedding + number.positions
        self._head = number.head + number.final_norm
        self._tied_head = number.embedding if job.shape.tied else 0
        self._size = DTYPE_BYTES[job.param_dtype]
        self._reduce_size = DTYPE_BYTES[job.reduce_dtype]
        self._speed = device.memory_bandwidth * device.efficiency.bandwidth

    def block(self, layout: Layout) -> BlockSeconds:
        """One block and microbatch, exposed tensor- and context-parallel collectives included."""
        a = layout.axes
        crosses = a.pp > 1 and a.world_size > self.device.node.devices
        key = (a.tp, a.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute, crosses)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(layout, crosses)
        return found

    def _block(self, layout: Layout, crosses: bool) -> BlockSeconds:
        job, device, a, s, software = self.job, self.device, layout.axes, self.job.shape, self.software
        time = block_time(
            device, software, s, layout.microbatch_rows, job.max_length, a.tp, a.cp,
            layout.sequence_parallel, layout.recompute, job.attention, job.param_dtype,
        )
        tokens = layout.microbatch_rows * job.max_length / a.cp
        tp = group_of(a.tp, 1, device.node.devices)
        payload = tokens * s.hidden * self._size
        again = layout.recompute == "full"
        if layout.sequence_parallel:
            one = gather_seconds(device, tp, payload)
            # Forward: gather, scatter, twice. Backward: the same, and the sharded inputs of the two column products are
            # gathered once more for the weights' gradient.
            tp_f, tp_b = 4 * one, 6 * one
        else:
            tp_f = tp_b = 2 * all_reduce_seconds(device, tp, payload)
        tp_b = (tp_b + again * tp_f) * (1 - software.overlap_tensor_parallel)
        # Context parallel gathers K and V of the whole row; backward gathers them again and scatters their gradients.
        kv = layout.microbatch_rows * job.max_length * 2 * s.kv_width / a.tp * self._size
        cp_f = gather_seconds(device, group_of(a.cp, a.tp, device.node.devices), kv)
        cp_b = cp_f * (2 + again)
        host = software.host_tensor_pipeline * a.tp if a.tp > 1 and crosses else 0.0
        forward = max(time.matmul + time.attention + time.elementwise + tp_f + cp_f, time.host_forward + host)
        backward = time.backward_matmul + time.backward_attention + time.backward_elementwise + time.recompute + tp_b + cp_b
        return BlockSeconds(
            forward, max(backward, time.host_backward + host), time.backward_matmul / 2, time.recompute, tp_f + tp_b, cp_f + cp_b
        )

    def _edge(self, layout: Layout) -> tuple[float, float, float, float]:
        """Forward and backward seconds of the head (with the loss), then of the embedding, collectives included."""
        a = layout.axes
        key = (a.tp, a.cp, layout.microbatch_rows)
        found = self._edges.get(key)
        if found is None:
            job, rows = self.job, layout.microbatch_rows
            head = head_time(self.device, self.software, job.shape, rows, job.max_length, a.tp, a.cp, job.param_dtype)
            embedding = embedding_time(self.device, job.shape, rows, job.max_length, a.tp, a.cp, job.param_dtype)
            payload = rows * job.max_length / a.cp * job.shape.hidden * self._size
            one = gather_seconds(self.device, group_of(a.tp, 1, self.device.node.devices), payload)
            found = self._edges[key] = (head[0] + one, head[1] + one, embedding[0] + one, embedding[1] + one)
        return found

    def rank(self, layout: Layout, kind: RankKind) -> RankSeconds:
        """One microbatch on a pipeline rank of this kind."""
        n, first, last = kind
        b = self.block(layout)
        head_f, head_b, embedding_f, embedding_b = self._edge(layout)
        block_parameters = self._block_split / layout.axes.tp + self._block_whole
        edge_parameters = 0.0
        forward, backward = n * b.forward, n * b.backward
        if first:
            forward, backward, edge_parameters = forward + embedding_f, backward + embedding_b, edge_parameters + self._embedding
        if last:
            forward, backward = forward + head_f, backward + head_b
            edge_parameters += self._head + (0 if first else self._tied_head)
        edge_parameters /= layout.axes.tp
        parameters = n * block_parameters + edge_parameters
        gathers = 0.0
        if layout.data_parallel == "zero3":
            if layout.axes.dp_shard * layout.axes.cp > 1 and n:
                gathers = self._unit_waits(layout, n, b, block_parameters, edge_parameters)
        elif self.software.accumulate_bytes:
            backward += parameters * self.software.accumulate_bytes / self._speed
        weights = n * b.weights
        return RankSeconds(forward, backward, weights, n * b.recompute, n * b.tensor, n * b.context, gathers, parameters)

    def _groups(self, layout: Layout) -> tuple[Group, Group | None]:
        """The group that shards (dp_shard x cp) and the one that replicates, if there is one."""
        a, per_node = layout.axes, self.device.node.devices
        shard = group_of(a.dp_shard * a.cp, a.tp, per_node)
        if a.dp_replicate == 1:
            return shard, None
        return shard, group_of(a.dp_replicate, a.tp * a.cp * a.dp_shard, per_node)

    def _unit_waits(self, layout: Layout, blocks: int, b: BlockSeconds, block: float, edge: float) -> float:
        """Seconds of one microbatch that wait for parameters to come or gradients to leave, window by window.

        With prefetch the gather of the next unit runs under the compute of a unit, and in the backward pass the
        reduce-scatter of the unit before as well. What does not fit there is exposed, and so are the gather and
        reduce-scatter of embedding and head. While both run, compute is slower by `overlap_slowdown`.
        """
        shard, outer = self._groups(layout)
        device, slow = self.device, self.software.overlap_slowdown
        size = 1 if layout.unit == "block" else blocks if layout.unit == "root" else min(int(layout.unit), blocks)
        unit, units = block * size, blocks / size
        forward, backward = (b.forward * size, b.backward * size) if layout.prefetch and units > 1 else (0.0, 0.0)
        gather = gather_seconds(device, shard, unit * self._size)
        reduce = gather_seconds(device, shard, unit * self._reduce_size)
        edges = gather_seconds(device, shard, edge * self._size) + gather_seconds(device, shard, edge * self._reduce_size)
        if outer is not None:
            reduce += all_reduce_seconds(device, outer, unit * self._reduce_size / shard.size)
        again = gather if layout.reshard_after_forward is True else 0.0
        if layout.reshard_after_forward is not True and layout.reshard_after_forward is not False:
            inner = group_of(int(layout.reshard_after_forward), layout.axes.tp, device.node.devices)
            again = gather_seconds(device, inner, unit * self._size)
        waits = max(gather - forward, 0.0) + slow * min(gather, forward)
        waits += max(again + reduce - backward, 0.0) + slow * min(again + reduce, backward)
        return edges + units * waits

    def step(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update in closed form; `stage_blocks` says how many blocks each pipeline stage holds."""
        kinds = rank_kinds(stage_blocks, layout.schedule, layout.axes.pp, layout.chunks)
        ranks = [(self.rank(layout, kind), number) for kind, number in kinds]
        worst = max(ranks, key=lambda pair: pair[0].whole)[0]
        k = layout.microbatches(self.job)
        bubble = sends = 0.0
        if layout.axes.pp > 1:
            bubble, sends = self._pipeline(layout, ranks, worst, k)
        reduction = max(self._once(layout, rank, k) for rank, _ in ranks)
        optimizer = max(self._optimizer(layout, rank.parameters) for rank, _ in ranks)
        compute = worst.forward + worst.backward - worst.recompute - worst.tensor - worst.context
        return StepTime(
            k * compute, k * worst.recompute, k * worst.tensor, k * worst.context, k * worst.gathers,
            bubble, sends, reduction, optimizer, self.software.update_seconds,
        )

    def _send(self, layout: Layout) -> float:
        a = layout.axes
        tokens = layout.microbatch_rows * self.job.max_length / a.cp
        payload = tokens * self.job.shape.hidden * self._size / (a.tp if layout.sequence_parallel else 1)
        inner = a.world_size // a.pp
        return send_seconds(self.device, inner >= self.device.node.devices, payload) + self.software.pipeline_seconds

    def _pipeline(
        self, layout: Layout, ranks: list[tuple[RankSeconds, int]], worst: RankSeconds, microbatches: int
    ) -> tuple[float, float]:
        """(idle seconds of the busiest rank, exposed sends) of one update.

        The first microbatch passes the other ranks forward and the last one backward; in between the busiest rank sets
        the pace. Chunks divide that. With the weights' gradient apart (zero_bubble), it fills the wait of the ranks it
        belongs to; in zbv only the input's gradient of one stage is waited for. `timed` plays the lists instead.
        """
        schedule, chunks = layout.schedule, layout.chunks
        if schedule == "zero_bubble":
            other = sum(number * (rank.whole - 2 * rank.weights) for rank, number in ranks) - (worst.whole - 2 * worst.weights)
            idle = other
        elif schedule == "zbv":
            idle = sum(number * (rank.backward - rank.weights) for rank, number in ranks) - (worst.backward - worst.weights)
            idle /= chunks
        else:
            idle = (sum(number * rank.whole for rank, number in ranks) - worst.whole) / chunks
        steps = 2 * (layout.axes.pp - 1)
        if not self.software.overlap_pipeline:
            steps += 2 * (microbatches - 1) * chunks
        return max(idle, 0.0), steps * self._send(layout)

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
        last = len(stage_blocks) - 1
        times = []
        for stage, blocks in enumerate(stage_blocks):
            r = self.rank(layout, RankKind(blocks, stage == 0, stage == last))
            times.append(StageSeconds(r.forward + r.gathers / 2, r.backward + r.gathers / 2 - r.weights, r.weights))
        ran = play(actions(schedule, a.pp, chunks, played), lambda stage: stage_rank(schedule, a.pp, stage), times)
        return closed._replace(bubble=max(ran.total - max(ran.busy), 0.0))

    def _once(self, layout: Layout, rank: RankSeconds, microbatches: int) -> float:
        """Exposed seconds of gradient reductions and parameter gathers that happen once per update (or per microbatch)."""
        a, device, software = layout.axes, self.device, self.software
        kind = layout.data_parallel
        if kind == "zero3" or a.data_ranks * a.cp == 1 or not rank.parameters:
            return 0.0
        shard, outer = self._groups(layout)
        volume = rank.parameters * self._reduce_size
        buckets = max(1.0, volume / software.bucket_bytes) if software.bucket_bytes else 1.0
        payload = volume / buckets
        if kind == "ddp":
            one = all_reduce_seconds(device, group_of(a.data_ranks * a.cp, a.tp, device.node.devices), payload)
        else:
            one = gather_seconds(device, shard, payload)
            if outer is not None:
                one += all_reduce_seconds(device, outer, payload / shard.size)
        reduce = buckets * one
        window = rank.backward if software.overlap_data_parallel else 0.0
        seconds = STAGES[kind].reductions(microbatches) * (max(reduce - window, one) + software.overlap_slowdown * min(reduce, window))
        if kind != "ddp":
            seconds += gather_seconds(device, shard, rank.parameters * self._size)
        return seconds

    def _optimizer(self, layout: Layout, parameters: float) -> float:
        shard = layout.axes.dp_shard * layout.axes.cp if layout.data_parallel != "ddp" else 1
        if layout.offload == "params":
            # Gradients travel to the host and weights back; the host updates them at its own memory bandwidth, which
            # moves about four times as many bytes as travel.
            return parameters / shard * 4 * 2 * self._reduce_size / self.device.host_bandwidth
        return parameters / shard * self.software.optimizer_bytes / self._speed

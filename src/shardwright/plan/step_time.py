"""Seconds of one update, part by part: kernels, exposed collectives, pipeline, optimizer.

`Clock` holds what does not change between layouts (job, device, software) and keeps the times that layouts share, so
that the search can ask for tens of thousands of layouts a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.arch.inventory import counts
from shardwright.plan.hardware import Device
from shardwright.plan.job import DTYPE_BYTES, Job, Layout
from shardwright.plan.kernels import BlockTime, Software, block_time, embedding_time, head_time
from shardwright.plan.network import Group, all_reduce_seconds, gather_seconds, group_of, send_seconds


class StepTime(NamedTuple):
    """Seconds of one update on the slowest rank; `total` is the sum of the parts.

    compute: forward and backward of all microbatches on the busiest stage, its tensor- and context-parallel waits not
    included. recompute: the part of the backward pass that is run again. tensor, context: exposed collectives of these
    axes. gathers: exposed waits for parameters and gradients of zero3 (every microbatch). reduction: exposed
    gradient reduction and parameter gathers once per update. bubble: idle time of the pipeline's busiest stage. sends:
    exposed sends between stages. optimizer. fixed: what an update costs besides.
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


@dataclass(frozen=True)
class Stage:
    """Forward and backward seconds of one microbatch on one pipeline rank, and what of them is not compute."""

    forward: float
    backward: float
    recompute: float
    tensor: float
    context: float
    gathers: float
    parameters: float


class Clock:
    """Predicts the time of an update of `job` on `device` for any layout."""

    def __init__(self, job: Job, device: Device, software: Software) -> None:
        self.job, self.device, self.software = job, device, software
        self._blocks: dict[tuple, tuple[BlockTime, float, float, float, float]] = {}
        self._edges: dict[tuple, tuple[float, float, float, float]] = {}
        number = counts(job.shape)
        self._block_split, self._block_whole = number.block_split, number.block_whole
        self._embedding = number.embedding + number.positions
        self._head = number.head + number.final_norm
        self._tied_head = number.embedding if job.shape.tied else 0
        self._size = DTYPE_BYTES[job.param_dtype]
        self._reduce_size = DTYPE_BYTES[job.reduce_dtype]
        self._speed = device.memory_bandwidth * device.efficiency.bandwidth

    def block(self, layout: Layout) -> tuple[BlockTime, float, float, float, float]:
        """(kernels, tensor-parallel seconds forward, backward, context-parallel seconds forward, backward) of a block."""
        a = layout.axes
        key = (a.tp, a.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(layout)
        return found

    def _block(self, layout: Layout) -> tuple[BlockTime, float, float, float, float]:
        job, device, a, s = self.job, self.device, layout.axes, self.job.shape
        time = block_time(
            device, self.software, s, layout.microbatch_rows, job.max_length, a.tp, a.cp,
            layout.sequence_parallel, layout.recompute, job.attention, job.param_dtype,
        )
        tokens = layout.microbatch_rows * job.max_length / a.cp
        tp = group_of(a.tp, 1, device.node.devices)
        payload = tokens * s.hidden * self._size
        again = 2 if layout.recompute == "full" else 1
        if layout.sequence_parallel:
            one = gather_seconds(device, tp, payload)
            # Forward: gather, scatter, twice. Backward: the same, and the sharded inputs of the two column products are
            # gathered once more for the weight's gradient.
            tp_f, tp_b = 4 * one, 6 * one
        else:
            one = all_reduce_seconds(device, tp, payload)
            tp_f = tp_b = 2 * one
        tp_b += (again - 1) * tp_f
        cp = group_of(a.cp, a.tp, device.node.devices)
        kv = layout.microbatch_rows * job.max_length * 2 * s.kv_width / a.tp * self._size
        cp_f = gather_seconds(device, cp, kv)
        return time, tp_f, tp_b * (1 - self.software.overlap_tensor_parallel), cp_f, cp_f * (1 + again)

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

    def stage(self, layout: Layout, blocks: int, first: bool, last: bool) -> Stage:
        """One microbatch on a pipeline rank with so many blocks."""
        a, n = layout.axes, blocks
        time, tp_f, tp_b, cp_f, cp_b = self.block(layout)
        head_f, head_b, embedding_f, embedding_b = self._edge(layout)
        edge_f = (head_f if last else 0.0) + (embedding_f if first else 0.0)
        edge_b = (head_b if last else 0.0) + (embedding_b if first else 0.0)
        block_parameters = self._block_split / a.tp + self._block_whole
        edge_parameters = ((self._embedding if first else 0) + ((self._head + (0 if first else self._tied_head)) if last else 0)) / a.tp
        parameters = n * block_parameters + edge_parameters
        crosses = a.pp > 1 and a.world_size > self.device.node.devices
        host = self.software.host_tensor_pipeline * a.tp if a.tp > 1 and crosses else 0.0
        forward = n * max(time.matmul + time.attention + time.elementwise + tp_f + cp_f, time.host_forward + host)
        backward = n * max(
            time.backward_matmul + time.backward_attention + time.backward_elementwise + time.recompute + tp_b + cp_b,
            time.host_backward + host,
        )
        gathers = 0.0
        if layout.data_parallel == "zero3" and a.dp_shard * a.cp > 1:
            gathers = self._unit_waits(layout, n, forward / max(n, 1), backward / max(n, 1), block_parameters, edge_parameters)
        elif self.software.accumulate_bytes:
            backward += parameters * self.software.accumulate_bytes / self._speed
        return Stage(forward + edge_f, backward + edge_b, n * time.recompute, n * (tp_f + tp_b), n * (cp_f + cp_b), gathers, parameters)

    def _shard_group(self, layout: Layout) -> Group:
        a = layout.axes
        return group_of(a.dp_shard * a.cp, a.tp, self.device.node.devices)

    def _unit_waits(self, layout: Layout, blocks: int, forward: float, backward: float, unit: float, edge: float) -> float:
        """Seconds of one microbatch that wait for parameters or for gradients to leave, window by window.

        With prefetch the gather of unit i + 1 runs under the compute of unit i, and the reduce-scatter of unit i + 1
        and the gather of unit i - 1 under the backward pass of unit i. What does not fit there is exposed, and so are
        the first gather and the last reduce-scatter. Kernels and collectives share the memory bandwidth and the SMs.
        """
        group = self._shard_group(layout)
        device = self.device
        gather = gather_seconds(device, group, unit * self._size)
        reduce = gather_seconds(device, group, unit * self._reduce_size)
        a = layout.axes
        if a.dp_replicate > 1:
            outer = group_of(a.dp_replicate, a.tp * a.cp * a.dp_shard, device.node.devices)
            reduce += all_reduce_seconds(device, outer, unit * self._reduce_size / group.size)
        edge_gather = gather_seconds(device, group, edge * self._size)
        edge_reduce = gather_seconds(device, group, edge * self._reduce_size)
        again = gather if layout.reshard_after_forward is True else 0.0
        if layout.prefetch == 0:
            forward = backward = 0.0
        slow = self.software.overlap_slowdown
        waits_f = blocks * (max(gather - forward, 0.0) + slow * min(gather, forward))
        waits_b = blocks * (max(again + reduce - backward, 0.0) + slow * min(again + reduce, backward))
        return edge_gather + waits_f + waits_b + edge_reduce

    def step(self, layout: Layout, stage_blocks: tuple[int, ...]) -> StepTime:
        """The time of one update; `stage_blocks` says how many blocks each pipeline rank holds."""
        stages = [
            self.stage(layout, blocks, index == 0, index == len(stage_blocks) - 1) for index, blocks in enumerate(stage_blocks)
        ]
        microbatches = layout.microbatches(self.job)
        whole = [stage.forward + stage.backward + stage.gathers for stage in stages]
        busiest = max(range(len(stages)), key=whole.__getitem__)
        worst = stages[busiest]
        bubble, sends = self._pipeline(layout, whole, microbatches) if len(stages) > 1 else (0.0, 0.0)
        waits = [self._once(layout, stage, index) for index, stage in enumerate(stages)]
        reduction = max(waits)
        optimizer = max(self._optimizer(layout, stage.parameters) for stage in stages)
        k = microbatches
        compute = worst.forward + worst.backward - worst.recompute - worst.tensor - worst.context
        return StepTime(
            k * compute, k * worst.recompute, k * worst.tensor, k * worst.context, k * worst.gathers,
            bubble, sends, reduction, optimizer, self.software.update_seconds,
        )

    def _pipeline(self, layout: Layout, whole: list[float], microbatches: int) -> tuple[float, float]:
        """(idle seconds of the busiest stage, exposed sends) of one update, in closed form.

        The first microbatch passes all stages forward and the last one all stages backward; in between the busiest
        stage sets the pace. So the update takes the sum over stages of one microbatch, plus (microbatches - 1) times
        the busiest stage; chunks divide the idle part. `play` gives the same for equal stages.
        """
        a = layout.axes
        idle = (sum(whole) - max(whole)) / layout.chunks
        if layout.schedule in ("zero_bubble", "zbv"):
            idle /= 3  # only the forward passes of the other stages are waited for; weight gradients fill the rest
        tokens = layout.microbatch_rows * self.job.max_length / a.cp
        payload = tokens * self.job.shape.hidden * self._size / (a.tp if layout.sequence_parallel else 1)
        inner = a.world_size // a.pp
        one = send_seconds(self.device, inner >= self.device.node.devices, payload) + self.software.pipeline_seconds
        steps = 2 * (len(whole) - 1)
        if not self.software.overlap_pipeline:
            steps += 2 * (microbatches - 1) * layout.chunks
        return idle, steps * one

    def _once(self, layout: Layout, stage: Stage, index: int) -> float:
        """Exposed seconds of what happens once per update: gradients reduced, parameters gathered again."""
        a, device, kind = layout.axes, self.device, layout.data_parallel
        seconds = 0.0
        shard, software = self._shard_group(layout), self.software
        if kind == "zero3" or a.data_ranks * a.cp == 1 or not stage.parameters:
            return 0.0
        bucket = software.bucket_bytes or stage.parameters * self._reduce_size
        buckets = max(1.0, stage.parameters * self._reduce_size / bucket)
        payload = stage.parameters * self._reduce_size / buckets
        if kind == "ddp":
            everyone = group_of(a.data_ranks * a.cp, a.tp, device.node.devices)
            one = all_reduce_seconds(device, everyone, payload)
        else:
            one = gather_seconds(device, shard, payload)
            if a.dp_replicate > 1:
                outer = group_of(a.dp_replicate, a.tp * a.cp * a.dp_shard, device.node.devices)
                one += all_reduce_seconds(device, outer, payload / shard.size)
        reduce = buckets * one
        times = layout.microbatches(self.job) if kind == "zero2" else 1
        window = stage.backward if software.overlap_data_parallel else 0.0
        seconds += times * (max(reduce - window, one) + software.overlap_slowdown * min(reduce, window))
        if kind != "ddp":
            seconds += gather_seconds(device, shard, stage.parameters * self._size)
        return seconds

    def _optimizer(self, layout: Layout, parameters: float) -> float:
        shard = layout.axes.dp_shard * layout.axes.cp if layout.data_parallel != "ddp" else 1
        if layout.offload == "params":
            # Gradients travel to the host and new weights back; the host updates at its own memory bandwidth.
            return parameters / shard * 2 * self._reduce_size / self.device.host_bandwidth * 4
        return parameters / shard * self.software.optimizer_bytes / self._speed

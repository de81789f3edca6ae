"""Seconds of one microbatch on one pipeline rank: blocks, embedding, head, and the waits of tensor and
context axes.

What does not depend on the data-parallel axes, kept by the sizes that it does depend on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.parameters import counts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.axes import Axes
from shardwright.layout.pipeline_schedules import rank_stages
from shardwright.planner.kernels import block_time, embedding_time, head_time
from shardwright.planner.network import all_reduce_seconds, gather_seconds, group_of
from shardwright.planner.problem import SELECTIVE, Layout, Problem, Recompute

if TYPE_CHECKING:
    pass


class BlockSeconds(NamedTuple):
    """One block and microbatch: forward, backward (recompute in it), the weights' gradient (in backward), and
    of them the recomputed part and the waits of the tensor and context axes."""

    forward: float
    backward: float
    weights: float
    recompute: float
    tensor: float
    context: float


class RankSeconds(NamedTuple):
    """One microbatch on one pipeline rank (all its stages; `first`: with the embedding), and its parameters: of embedding
    and head, and all.

    It does not depend on the data-parallel axes; `_waits` gives what they add.
    """

    number: int
    first: bool
    blocks: int
    forward: float
    backward: float
    weights: float
    edge_parameters: float
    parameters: float


class RankKind(NamedTuple):
    """Pipeline ranks that are alike: blocks in all their stages, and whether they hold embedding and head."""

    blocks: int
    first: bool
    last: bool


@lru_cache(maxsize=4096)
def rank_kinds(
    stage_blocks: tuple[int, ...], schedule: str | None, pp: int, chunks: int
) -> tuple[tuple[RankKind, int], ...]:
    """The distinct kinds of pipeline ranks and how many there are of each."""
    found: dict[RankKind, int] = {}
    for rank in range(pp):
        own = (0,) if pp == 1 else rank_stages(schedule or "1f1b", pp, chunks, rank)  # type: ignore[arg-type]
        kind = RankKind(sum(stage_blocks[stage] for stage in own), 0 in own, len(stage_blocks) - 1 in own)
        found[kind] = found.get(kind, 0) + 1
    return tuple(found.items())


class RankClock:
    """Times blocks and pipeline ranks of `problem` on its device under its program; `Clock` adds the rest of an
    update.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.device, self.program = problem, problem.known_device, problem.program
        device = self.device
        self._blocks: dict[tuple, BlockSeconds] = {}
        self._edges: dict[tuple, tuple[float, float, float, float]] = {}
        self._rank_seconds: dict[tuple, list[RankSeconds]] = {}
        self._parameters: dict[tuple[int, RankKind], tuple[float, float]] = {}
        number = counts(problem.shape)
        self._block_split, self._block_whole = number.block_split, number.block_whole
        self._embedding = number.embedding + number.positions
        self._head = number.head + number.final_norm
        self._tied_head = number.embedding if problem.shape.tied else 0
        self._size = DTYPE_BYTES[problem.param_dtype]
        self._reduce_size = DTYPE_BYTES[problem.reduce_dtype]
        self._speed = device.memory_bandwidth * device.efficiency.bandwidth

    def _block_key(self, layout: Layout) -> tuple:
        """What of a layout decides the time of a block."""
        a = layout.axes
        crosses = a.pp > 1 and a.world_size > self.device.node.devices
        return (a.tp, a.cp, layout.microbatch_rows, layout.sequence_parallel, layout.recompute, crosses)

    def block(self, layout: Layout) -> BlockSeconds:
        """One block and microbatch, exposed tensor- and context-parallel collectives included."""
        key = self._block_key(layout)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(layout, key[-1])
        return found

    def block_at(self, tp: int, cp: int, pp: int, devices: int, rows: int, recompute: Recompute) -> BlockSeconds:
        """`block` by sizes, with sequence parallel: what the bounds of the search ask for."""
        found = self._blocks.get((tp, cp, rows, tp > 1, recompute, pp > 1 and devices > self.device.node.devices))
        if found is None:
            axes = Axes(pp, 1, devices // (tp * cp * pp), cp, tp)
            layout = Layout(axes, "ddp", rows, sequence_parallel=tp > 1, recompute=recompute)
            found = self.block(layout)
        return found

    def _block(self, layout: Layout, crosses: bool) -> BlockSeconds:
        problem, device, a, s, program = self.problem, self.device, layout.axes, self.problem.shape, self.program
        time = block_time(
            device,
            program,
            s,
            layout.microbatch_rows,
            problem.max_length,
            a.tp,
            a.cp,
            layout.sequence_parallel,
            layout.recompute,
            problem.attention,
            problem.param_dtype,
            problem.attended,
        )
        tokens = layout.microbatch_rows * problem.max_length / a.cp
        tp = group_of(a.tp, 1, device.node.devices)
        payload = tokens * s.hidden * self._size
        again = layout.recompute == "full"
        # Ours keeps attention and the sums over tensor-parallel ranks, not what was gathered for products and attention.
        gathers_again = program.own and layout.recompute in SELECTIVE
        if layout.sequence_parallel:
            one = gather_seconds(device, tp, payload)
            # Forward: gather, scatter, twice. Backward: the same, and the sharded inputs of the two column
            # products are gathered once more for the weights' gradient.
            tp_f, tp_b = 4 * one, 6 * one
        else:
            tp_f = tp_b = 2 * all_reduce_seconds(device, tp, payload)
        if a.tp > 1:
            copied = payload * program.tensor_passes / self._speed
            tp_f, tp_b = tp_f + 4 * copied, tp_b + 6 * copied
        if gathers_again and layout.sequence_parallel:
            tp_b += tp_f / 2
        tp_b = (tp_b + again * tp_f) * (1 - program.overlap_tensor_parallel)
        # Context parallel gathers K and V of the whole row; backward gathers them again and scatters their
        # gradients.
        kv = layout.microbatch_rows * problem.max_length * 2 * s.kv_width / a.tp * self._size
        cp_f = gather_seconds(device, group_of(a.cp, a.tp, device.node.devices), kv)
        cp_b = cp_f * (2 + (again or gathers_again))
        host = program.host_tensor_pipeline * a.tp if a.tp > 1 and crosses else 0.0
        forward = max(time.matmul + time.attention + time.elementwise + tp_f + cp_f, time.host_forward + host)
        backward = (
            time.backward_matmul + time.backward_attention + time.backward_elementwise + time.recompute + tp_b + cp_b
        )
        return BlockSeconds(
            forward,
            max(backward, time.host_backward + host),
            time.backward_matmul / 2,
            time.recompute,
            tp_f + tp_b,
            cp_f + cp_b,
        )

    def edge(self, layout: Layout) -> tuple[float, float, float, float]:
        """Forward and backward seconds of the head (with the loss), then of the embedding, collectives
        included.
        """
        a = layout.axes
        key = (a.tp, a.cp, layout.microbatch_rows)
        found = self._edges.get(key)
        if found is None:
            problem, rows = self.problem, layout.microbatch_rows
            head = head_time(
                self.device, self.program, problem.shape, rows, problem.max_length, a.tp, a.cp, problem.param_dtype
            )
            embedding = embedding_time(
                self.device, problem.shape, rows, problem.max_length, a.tp, a.cp, problem.param_dtype
            )
            payload = rows * problem.max_length / a.cp * problem.shape.hidden * self._size
            one = gather_seconds(self.device, group_of(a.tp, 1, self.device.node.devices), payload)
            found = self._edges[key] = (head[0] + one, head[1] + one, embedding[0] + one, embedding[1] + one)
        return found

    def parameters(self, tp: int, kind: RankKind) -> tuple[float, float]:
        """Parameters of a pipeline rank of this kind: of embedding and head, and all."""
        found = self._parameters.get((tp, kind))
        if found is None:
            n, first, last = kind
            edge = (first * self._embedding + last * (self._head + (not first) * self._tied_head)) / tp
            found = edge, n * (self._block_split / tp + self._block_whole) + edge
            self._parameters[tp, kind] = found
        return found

    def rank(self, layout: Layout, kind: RankKind, number: int = 1) -> RankSeconds:
        """One microbatch on a pipeline rank of this kind, without the data-parallel axes."""
        n, first, last = kind
        b = self.block(layout)
        head_f, head_b, embedding_f, embedding_b = self.edge(layout)
        forward, backward = n * b.forward, n * b.backward
        if first:
            forward, backward = forward + embedding_f, backward + embedding_b
        if last:
            forward, backward = forward + head_f, backward + head_b
        edge, parameters = self.parameters(layout.axes.tp, kind)
        if not self._each_microbatch(layout):
            backward += parameters * self.program.accumulate_bytes / self._speed
        return RankSeconds(number, first, n, forward, backward, n * b.weights, edge, parameters)

    def _ranks_key(self, layout: Layout, stage_blocks: tuple[int, ...]) -> tuple:
        each = self._each_microbatch(layout)
        return (*self._block_key(layout), layout.axes.pp, layout.schedule, layout.chunks, stage_blocks, each)

    def _ranks(self, layout: Layout, stage_blocks: tuple[int, ...]) -> list[RankSeconds]:
        key = self._ranks_key(layout, stage_blocks)
        found = self._rank_seconds.get(key)
        if found is None:
            kinds = rank_kinds(stage_blocks, layout.schedule, layout.axes.pp, layout.chunks)
            found = self._rank_seconds[key] = [self.rank(layout, kind, number) for kind, number in kinds]
        return found

    def _each_microbatch(self, layout: Layout) -> bool:
        """Whether units are gathered and reduced at every microbatch: zero3, but not where a pipeline keeps
        them.
        """
        return layout.data_parallel == "zero3" and (layout.axes.pp == 1 or not self.program.pipeline_keeps_gathered)

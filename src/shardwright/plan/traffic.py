"""What each rank sends in one update: every collective by axis, its count, payload and bytes sent.

A ring all-gather or reduce-scatter over N ranks sends (N - 1) / N of the whole tensor from each rank; an all-reduce is
one of each, so twice that. How often units are gathered and reduced stands in `layout/zero.py`.
Sources: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.layout.zero import STAGES
from shardwright.plan.program import SHARDWRIGHT, Program
from shardwright.plan.rank_bytes import holds, rank_elements, rules

if TYPE_CHECKING:
    from shardwright.plan.job import Job, Layout

RINGS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "send": 0}


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of one update on one rank.

    axis: `dp_shard`, `dp_replicate`, `dp`, `tp`, `cp` or `pp`. size: ranks in the group. count: calls per update.
    payload_bytes: of one call, the whole tensor. what: what is sent.
    """

    axis: str
    collective: str
    what: str
    size: int
    count: float
    payload_bytes: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in the update."""
        if self.collective == "send":
            return self.count * self.payload_bytes
        return self.count * RINGS[self.collective] * (self.size - 1) / self.size * self.payload_bytes


def traffic(job: Job, layout: Layout, rank: int = 0, program: Program = SHARDWRIGHT) -> tuple[Traffic, ...]:
    """Everything that a device of pipeline rank `rank` sends in one update, groups of one rank left out."""
    every = (
        *_data_parallel(job, layout, rank, program),
        *_tensor_parallel(job, layout, rank, program),
        *_context_parallel(job, layout, rank, program),
        *_pipeline(job, layout, rank),
    )
    return tuple(one for one in every if one.size > 1 and one.count > 0)


def sent_by_axis(parts: tuple[Traffic, ...]) -> dict[str, float]:
    """Bytes sent per update and rank, by axis."""
    result: dict[str, float] = {}
    for part in parts:
        result[part.axis] = result.get(part.axis, 0.0) + part.sent_bytes
    return result


def _units(job: Job, layout: Layout, rank: int) -> tuple[int, float]:
    """(units, parameters) of one rank after tensor parallelism: blocks or groups of them, embedding, head."""
    blocks, first, last = holds(job, layout, rank)
    block, embedding, head = rank_elements(job, layout, 1, first >= 0, last >= 0)
    count = sum(blocks)
    if layout.unit == "root":
        units = 1
    else:
        size = 1 if layout.unit == "block" else int(layout.unit)
        units = -(-count // size) + (embedding.whole > 0) + (head.whole > 0)
    return units, float(count * block.whole + embedding.whole + head.whole)


def _data_parallel(job: Job, layout: Layout, rank: int, program: Program) -> Iterator[Traffic]:
    microbatches = layout.microbatches(job)
    rule, stage, axes = rules(job, layout, program, microbatches), STAGES[layout.data_parallel], layout.axes
    units, parameters = _units(job, layout, rank)
    if not stage.shards_optimizer:
        size = axes.data_ranks * axes.cp
        yield Traffic("dp", "all-reduce", "gradients", size, 1, rule.reduce * parameters)
        return
    times = 1 if rule.late else stage.reductions(microbatches)
    gathers = stage.gathers(microbatches)
    partial = 0
    if rule.resident:
        gathers = 1 if rule.late or not stage.gathers_each_microbatch else microbatches
    elif not isinstance(layout.reshard_after_forward, bool):
        gathers, partial = microbatches, microbatches
    if program.engine == "flat":
        gathers, times = 1, 1
    unit = parameters / units
    yield Traffic("dp_shard", "all-gather", "parameters", rule.degree, gathers * units, rule.compute * unit)
    if partial:
        yield Traffic(
            "dp_shard",
            "all-gather",
            "parameters kept on fewer ranks",
            int(layout.reshard_after_forward),
            partial * units,
            rule.compute * unit,
        )
    yield Traffic("dp_shard", "reduce-scatter", "gradients", rule.degree, times * units, rule.reduce * unit)
    if axes.dp_replicate > 1:
        piece = rule.reduce * unit / rule.degree
        yield Traffic("dp_replicate", "all-reduce", "gradient shards", axes.dp_replicate, units, piece)


def _tensor_parallel(job: Job, layout: Layout, rank: int, program: Program) -> Iterator[Traffic]:
    """Per block and direction: two all-gathers and two reduce-scatters with sequence parallel, else two all-reduces."""
    axes, microbatches = layout.axes, layout.microbatches(job)
    blocks, first, last = holds(job, layout, rank)
    tokens = layout.microbatch_rows * job.max_length / axes.cp
    width = rules(job, layout, program, microbatches).compute
    payload, count = tokens * job.shape.hidden * width, sum(blocks) * microbatches
    again = layout.recompute == "full"
    if not layout.sequence_parallel:
        yield Traffic("tp", "all-reduce", "activations", axes.tp, (4 + 2 * again) * count, payload)
        ends = microbatches * ((first >= 0) + (last >= 0))
        yield Traffic("tp", "all-reduce", "embedding and head", axes.tp, ends, payload)
        return
    # The backward of a product gathers its input again where it was not kept.
    regathers = 0 if program.keeps_gathered else 2
    yield Traffic("tp", "all-gather", "activations", axes.tp, (4 + 2 * again + regathers) * count, payload)
    yield Traffic("tp", "reduce-scatter", "activations", axes.tp, (4 + 2 * again) * count, payload)
    for end, name in ((first, "embedding"), (last, "head")):
        if end >= 0:
            yield Traffic("tp", "all-gather", name, axes.tp, microbatches, payload)
            yield Traffic("tp", "reduce-scatter", name, axes.tp, microbatches, payload)


def _context_parallel(job: Job, layout: Layout, rank: int, program: Program) -> Iterator[Traffic]:
    """Per block: K and V of the whole row gathered in forward (and again when recomputed), their gradients scattered."""
    axes, microbatches = layout.axes, layout.microbatches(job)
    blocks, _, _ = holds(job, layout, rank)
    width = rules(job, layout, program, microbatches).compute
    payload = layout.microbatch_rows * job.max_length * 2 * job.shape.kv_width / axes.tp * width
    count = sum(blocks) * microbatches
    # any recomputation runs the exchange again: its result is none of the matrix products that selective keeps
    gathers = 1 + (layout.recompute != "none") + (not program.gathers_kv)
    yield Traffic("cp", "all-gather", "keys and values", axes.cp, gathers * count, payload)
    yield Traffic("cp", "reduce-scatter", "gradients of keys and values", axes.cp, count, payload)


def _pipeline(job: Job, layout: Layout, rank: int) -> Iterator[Traffic]:
    """Activations to the next stage and their gradients to the one before, once per microbatch and boundary."""
    axes, microbatches = layout.axes, layout.microbatches(job)
    blocks, first, last = holds(job, layout, rank)
    tokens = layout.microbatch_rows * job.max_length / axes.cp
    width = rules(job, layout, SHARDWRIGHT, microbatches).compute
    payload = tokens * job.shape.hidden * width / (axes.tp if layout.sequence_parallel else 1)
    turns = layout.schedule == "zbv" and rank == axes.pp - 1
    ahead = len(blocks) - (last >= 0) - turns
    back = len(blocks) - (first >= 0) - turns
    yield Traffic("pp", "send", "activations", axes.pp, ahead * microbatches, payload)
    yield Traffic("pp", "send", "gradients of activations", axes.pp, back * microbatches, payload)

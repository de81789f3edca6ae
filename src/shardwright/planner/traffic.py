"""What each rank sends in one update: every collective by axis, its count, payload and bytes sent.

For our own programs the tables of `layout/traffic.py`, equal to what the engine sends; for published programs, what their
papers say: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
How often units are gathered and reduced stands in `layout/zero.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.pipeline_schedules import head_blocks, split_blocks
from shardwright.layout.traffic import (
    Sharding,
    TensorWork,
    Traffic,
    context_traffic,
    pipeline_traffic,
    replica_traffic,
    shard_traffic,
    tensor_traffic,
    whole_widths,
)
from shardwright.layout.zero import STAGES
from shardwright.planner.program import SHARDWRIGHT, Program
from shardwright.planner.rank_bytes import holds, rank_elements, rules
from shardwright.planner.states import split_dim

if TYPE_CHECKING:
    from shardwright.arch.shape import ParameterGroup, Shape
    from shardwright.planner.job import Job, Layout


class Place(NamedTuple):
    """A device among its peers: its rank on the tensor-parallel axis, and among the ranks that share its parameters.

    What does not divide leaves the later ones less; the first has the fullest parts.
    """

    tp: int = 0
    shard: int = 0


FIRST = Place()


def traffic(
    job: Job, layout: Layout, rank: int = 0, program: Program = SHARDWRIGHT, place: Place = FIRST
) -> tuple[Traffic, ...]:
    """Everything that a device of pipeline rank `rank` sends in one update, groups of one rank left out."""
    if program.own:
        every = _own(job, layout, rank, place)
    else:
        every = (
            *_data_parallel(job, layout, rank, program),
            *_tensor_parallel(job, layout, rank, program),
            *_context_parallel(job, layout, rank, program),
            *_pipeline(job, layout, rank, program),
        )
    return tuple(one for one in every if one.size > 1 and one.count > 0)


def sent_by_axis(parts: tuple[Traffic, ...]) -> dict[str, float]:
    """Bytes sent per update and rank, by axis."""
    result: dict[str, float] = {}
    for part in parts:
        result[part.axis] = result.get(part.axis, 0.0) + part.sent_bytes
    return result


# Our own engines


def _own(job: Job, layout: Layout, rank: int, place: Place) -> tuple[Traffic, ...]:
    shape, axes, microbatches = job.shape, layout.axes, layout.microbatches(job)
    blocks, first, last = holds(job, layout, rank, own_stages(shape, axes.pp * layout.chunks))
    compute = DTYPE_BYTES[job.param_dtype]
    length = job.max_length // axes.cp
    hidden_bytes = layout.microbatch_rows * length * shape.hidden * compute
    recomputes = int(layout.recompute != "none")
    degree = axes.dp_shard * axes.cp if layout.data_parallel != "ddp" else 1
    parts = _Parts(shape, axes.tp, degree, place)
    pipeline: tuple[Traffic, ...] = ()
    if axes.pp > 1:
        pipeline = pipeline_traffic(
            layout.schedule or "1f1b",
            axes.pp,
            layout.chunks,
            rank,
            microbatches=microbatches,
            hidden_bytes=hidden_bytes // (axes.tp if layout.sequence_parallel else 1),
            tied_bytes=parts.own("embedding") * DTYPE_BYTES[job.master_dtype] if shape.tied else 0,
        )
    return (
        *_own_data_parallel(job, layout, parts, blocks, first, last),
        *tensor_traffic(_tensor_work(job, layout, parts, sum(blocks), first >= 0, last >= 0, recomputes)),
        *context_traffic(
            layout.cp_attention,
            cp=axes.cp,
            blocks=sum(blocks),
            microbatches=microbatches,
            rows=layout.microbatch_rows,
            length=job.max_length,
            kv_width=shape.kv_width // (1 if _whole_attention(shape) else axes.tp),
            width_bytes=compute,
            recomputes=recomputes,
        ),
        *pipeline,
    )


def own_stages(shape: Shape, stages: int) -> tuple[int, ...]:
    """Blocks of each of our pipeline stages: balanced by matrix products, the head among them."""
    if stages == 1:
        return (shape.layers,)
    block = sum(g.numel for g in _groups(shape, "block") if len(g.size) > 1)
    return split_blocks(shape.layers, stages, head_blocks(block, shape.vocab * shape.hidden))


def _groups(shape: Shape, part: str) -> Iterator[ParameterGroup]:
    """The parameters of `block`, `embedding`, `positions` or `end` (final norm and head)."""
    inside = family_of(shape.family).block + "."
    for group in parameters(shape):
        outside = group.part if group.part in ("embedding", "positions") else "end"
        if part == ("block" if group.name.startswith(inside) else outside):
            yield group


class _Parts:
    """Elements of the parts of a model on one rank, after tensor parallelism and in the fullest of `degree` shards."""

    def __init__(self, shape: Shape, tp: int, degree: int, place: Place) -> None:
        self._shape, self._tp, self._degree, self._place = shape, tp, degree, place
        self._in_first = family_of(shape.family).transposed_weights
        self.block, self.embedding, self.positions, self.end = (
            sum(self._shard(group, 0) for group in _groups(shape, part))
            for part in ("block", "embedding", "positions", "end")
        )

    def _shard(self, group: ParameterGroup, shard: int) -> int:
        size = list(group.size)
        if (dim := split_dim(group, self._tp, self._in_first)) is not None:
            size[dim] = _piece(size[dim], self._tp, self._place.tp)
        return _piece(size[0], self._degree, shard) * prod(size[1:])

    def own(self, part: str, *names: str) -> int:
        """Elements of this rank's shard of the parameters of a part, or of those of it that are `names`."""
        groups = [g for g in _groups(self._shape, part) if not names or g.name in names]
        return sum(self._shard(group, self._place.shard) for group in groups)


def _piece(length: int, pieces: int, number: int) -> int:
    """The length of one piece, as `torch.chunk` cuts."""
    size = -(-length // pieces)
    return max(0, min(size, length - number * size))


def _whole_attention(shape: Shape) -> bool:
    return bool(whole_widths(shape.family, 1, 1, 1, True)[0])


def _own_data_parallel(
    job: Job, layout: Layout, parts: _Parts, blocks: tuple[int, ...], first: int, last: int
) -> tuple[Traffic, ...]:
    axes, tied = layout.axes, job.shape.tied
    copies = last >= 0 and tied and axes.pp > 1  # the last stage holds a tied embedding too
    if layout.data_parallel == "ddp":
        ends = (first >= 0) * (parts.embedding + parts.positions) + (last >= 0) * parts.end
        elements = sum(blocks) * parts.block + ends + copies * parts.embedding
        axis = "dp_replicate" if axes.data_ranks > 1 else "cp"
        return replica_traffic(axis, elements, axes.data_ranks * axes.cp, DTYPE_BYTES[job.reduce_dtype])
    units: list[int] = []
    once: list[int] = []
    # What is kept on fewer ranks is let go there by gathering it: then an embedding is gathered for backward too.
    partly = not isinstance(layout.reshard_after_forward, bool)
    for chunk, count in enumerate(blocks):
        own, root = [], 0
        if layout.unit == "root":
            root += count * parts.block
        else:
            size = 1 if layout.unit == "block" else int(layout.unit)
            own = [parts.block * min(size, count - start) for start in range(0, count, size)]
        # A tied embedding, and what shares it, is in the root of its stage.
        for here, inside, elements, twice in (
            (chunk == first, tied and axes.pp == 1, parts.embedding, partly),
            (chunk == first, True, parts.positions, False),
            (chunk == last, tied, parts.end, False),
            (chunk == last, True, copies * parts.embedding, False),
        ):
            if here and (inside or layout.unit == "root"):
                root += elements
            elif here:
                (own if twice else once).append(elements)
        units += own
        once.append(root)
    how = Sharding(
        STAGES[layout.data_parallel],
        "dp_shard" if axes.dp_shard > 1 else "cp",
        axes.dp_shard * axes.cp,
        axes.dp_replicate,
        layout.microbatches(job),
        layout.reshard_after_forward,
        DTYPE_BYTES[job.param_dtype],
        DTYPE_BYTES[job.reduce_dtype],
    )
    return shard_traffic(units, once, how)


def _tensor_work(
    job: Job, layout: Layout, parts: _Parts, blocks: int, first: bool, last: bool, recomputes: int
) -> TensorWork:
    shape, axes = job.shape, layout.axes
    family = family_of(shape.family)
    norms = {f"{family.block}.{name}.weight" for name in family.qk_norms}
    # Every rank sees other positions; where heads are divided, norms inside of them see other heads.
    names = {g.name for g in _groups(shape, "block") if g.split is None and layout.sequence_parallel} | norms
    if _whole_attention(shape):
        names -= norms
    gathered, split = whole_widths(shape.family, shape.query_width, shape.kv_width, shape.ffn, shape.gated)
    return TensorWork(
        tp=axes.tp,
        blocks=blocks,
        first=first,
        last=last,
        microbatches=layout.microbatches(job),
        rows=layout.microbatch_rows,
        length=job.max_length // axes.cp,
        hidden=shape.hidden,
        width_bytes=DTYPE_BYTES[job.param_dtype],
        sequence=layout.sequence_parallel,
        recomputes=recomputes,
        gathered=gathered,
        split=split,
        kept_behind="post_feedforward_layernorm" in family.norms,
        partial=blocks * parts.own("block", *names) if names else 0,
        master_bytes=DTYPE_BYTES[job.master_dtype],
    )


# Published programs


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
        yield Traffic("dp_replicate", "all-reduce", "gradients", size, 1, rule.reduce * parameters)
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


def _pipeline(job: Job, layout: Layout, rank: int, program: Program) -> Iterator[Traffic]:
    """Activations to the next stage and their gradients to the one before, once per microbatch and boundary."""
    axes, microbatches = layout.axes, layout.microbatches(job)
    blocks, first, last = holds(job, layout, rank)
    tokens = layout.microbatch_rows * job.max_length / axes.cp
    width = rules(job, layout, program, microbatches).compute
    payload = tokens * job.shape.hidden * width / (axes.tp if layout.sequence_parallel else 1)
    turns = layout.schedule == "zbv" and rank == axes.pp - 1
    ahead = len(blocks) - (last >= 0) - turns
    back = len(blocks) - (first >= 0) - turns
    yield Traffic("pp", "send", "activations", axes.pp, ahead * microbatches, payload)
    yield Traffic("pp", "send", "gradients of activations", axes.pp, back * microbatches, payload)

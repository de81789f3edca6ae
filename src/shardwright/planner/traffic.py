"""What each rank sends in one update: every collective by axis, its count, payload and bytes sent.

The tables of `layout/traffic.py`, which equal what the engine sends. How often units are gathered and reduced stands in
`layout/zero.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.dtypes import DTYPE_BYTES
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
from shardwright.planner.problem import SELECTIVE
from shardwright.planner.rank_bytes import holding, split_dim

if TYPE_CHECKING:
    from shardwright.arch.shape import ParameterGroup, Shape
    from shardwright.planner.problem import Layout, Problem


class ShardCoordinates(NamedTuple):
    """A device among its peers: its rank on the tensor-parallel axis, and among the ranks that share its parameters.

    What does not divide leaves the later ones less; the first has the fullest parts.
    """

    tp: int = 0
    shard: int = 0


FIRST_SHARD = ShardCoordinates()


def sent_by_axis(parts: tuple[Traffic, ...]) -> dict[str, float]:
    """Bytes sent per update and rank, by axis."""
    result: dict[str, float] = {}
    for part in parts:
        result[part.axis] = result.get(part.axis, 0.0) + part.sent_bytes
    return result


def traffic(
    problem: Problem, layout: Layout, rank: int = 0, place: ShardCoordinates = FIRST_SHARD
) -> tuple[Traffic, ...]:
    """What a device of pipeline rank `rank` sends in forward and backward of one update, groups of one rank left out."""
    shape, axes, microbatches = problem.shape, layout.axes, layout.microbatches(problem)
    _, blocks, first, last = holding(problem, layout, rank)
    compute = DTYPE_BYTES[problem.param_dtype]
    length = problem.max_length // axes.cp
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
            tied_bytes=parts.own("embedding") * DTYPE_BYTES[problem.master_dtype] if shape.tied else 0,
        )
    every = (
        *_data_parallel(problem, layout, parts, blocks, first, last),
        *tensor_traffic(_tensor_work(problem, layout, parts, sum(blocks), first >= 0, last >= 0, recomputes)),
        *context_traffic(
            layout.cp_attention,
            cp=axes.cp,
            blocks=sum(blocks),
            microbatches=microbatches,
            rows=layout.microbatch_rows,
            length=problem.max_length,
            kv_width=shape.kv_width // (1 if _whole_attention(shape) else axes.tp),
            width_bytes=compute,
            recomputes=recomputes,
        ),
        *pipeline,
    )
    return tuple(one for one in every if one.size > 1 and one.count > 0)


def _groups(shape: Shape, part: str) -> Iterator[ParameterGroup]:
    """The parameters of `block`, `embedding`, `positions` or `end` (final norm and head)."""
    inside = family_of(shape.family).block + "."
    for group in parameters(shape):
        outside = group.part if group.part in ("embedding", "positions") else "end"
        if part == ("block" if group.name.startswith(inside) else outside):
            yield group


class _Parts:
    """Elements of the parts of a model on one rank, after tensor parallelism and in the fullest of `degree` shards."""

    def __init__(self, shape: Shape, tp: int, degree: int, place: ShardCoordinates) -> None:
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


def _data_parallel(
    problem: Problem, layout: Layout, parts: _Parts, blocks: tuple[int, ...], first: int, last: int
) -> tuple[Traffic, ...]:
    axes, tied = layout.axes, problem.shape.tied
    copies = last >= 0 and tied and axes.pp > 1  # the last stage holds a tied embedding too
    if layout.data_parallel == "ddp":
        ends = (first >= 0) * (parts.embedding + parts.positions) + (last >= 0) * parts.end
        elements = sum(blocks) * parts.block + ends + copies * parts.embedding
        axis = "dp_replicate" if axes.data_ranks > 1 else "cp"
        return replica_traffic(axis, elements, axes.data_ranks * axes.cp, DTYPE_BYTES[problem.reduce_dtype])
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
        layout.microbatches(problem),
        layout.reshard_after_forward,
        DTYPE_BYTES[problem.param_dtype],
        DTYPE_BYTES[problem.reduce_dtype],
    )
    return shard_traffic(units, once, how)


def _tensor_work(
    problem: Problem, layout: Layout, parts: _Parts, blocks: int, first: bool, last: bool, recomputes: int
) -> TensorWork:
    shape, axes = problem.shape, layout.axes
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
        microbatches=layout.microbatches(problem),
        rows=layout.microbatch_rows,
        length=problem.max_length // axes.cp,
        hidden=shape.hidden,
        width_bytes=DTYPE_BYTES[problem.param_dtype],
        sequence=layout.sequence_parallel,
        recomputes=recomputes,
        keeps_sums=layout.recompute in SELECTIVE,
        gathered=gathered,
        split=split,
        kept_behind="post_feedforward_layernorm" in family.norms,
        partial=blocks * parts.own("block", *names) if names else 0,
        master_bytes=DTYPE_BYTES[problem.master_dtype],
    )

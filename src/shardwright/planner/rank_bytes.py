"""What one pipeline rank holds, in bytes: states, and what is gathered and reduced unit by unit.

m bytes of the stored (master) dtype, c of the compute dtype, r of the reduction dtype. N is the sharding degree: dp_shard x
cp, since context-parallel peers hold the same parameters and shard them too. Every parameter is divided by tp and by N along
its first dim, rounded up, as `fully_shard` does.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import matrix_weights, parameters
from shardwright.arch.shape import ParameterGroup, Shape
from shardwright.backends.facts import backend_facts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.pipeline_schedules import head_blocks, rank_stages, split_blocks
from shardwright.layout.zero import STAGES
from shardwright.planner.optimizer import optimizer_of, orthogonalising_bytes
from shardwright.planner.problem import Layout, Problem

BLOCK, EMBEDDING, HEAD, LOSS, STEP = range(5)
"""Where in an update a rank is. The first three are units too, whose gradients are counted apart."""


class Elements(NamedTuple):
    """Elements of one part of the model on one rank.

    whole: after tensor parallelism. shard: of them in the fullest shard. states, shard_states: of optimizer states, likewise.
    """

    whole: float
    shard: float
    states: float
    shard_states: float

    def __add__(self, other: Elements) -> Elements:  # type: ignore[override]
        return Elements(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])


NOTHING = Elements(0, 0, 0, 0)
Parts = tuple[Elements, Elements, Elements]
"""A block, the embedding (with positions), and final norm and head of a rank."""


def split_dim(group: ParameterGroup, tp: int, in_first: bool) -> int | None:
    """The dim along which tensor parallelism cuts a parameter, None where every rank holds all of it."""
    if group.split is None or tp == 1:
        return None
    if len(group.size) == 1:
        return 0
    rows = group.split != "row"
    return 0 if rows != (in_first and group.split != "vocabulary") else 1


def local_size(group: ParameterGroup, tp: int, in_first: bool) -> tuple[int, ...]:
    """The size of one parameter on one tensor-parallel rank, rounded up."""
    dim = split_dim(group, tp, in_first)
    return tuple(-(-size // tp) if axis == dim else size for axis, size in enumerate(group.size))


@lru_cache(maxsize=4096)
def _local_elements(shape: Shape, optimizer: str, tp: int, degree: int) -> tuple[Elements, Elements, Elements, int]:
    """Of a block, the embedding, and final norm and head; and elements of a block's largest parameter."""
    family, kept = family_of(shape.family), optimizer_of(optimizer)
    matrix, sums = 0, [NOTHING, NOTHING, NOTHING]
    for group in parameters(shape):
        size = local_size(group, tp, family.transposed_weights)
        whole, shard, states = prod(size), -(-size[0] // degree) * prod(size[1:]), kept.states_of(group)
        if group.name.startswith(family.block + "."):
            part, matrix = BLOCK, max(matrix, whole)
        else:
            part = EMBEDDING if group.part in ("embedding", "positions") else HEAD
        sums[part] += Elements(whole, shard, states * whole, states * shard)
    return (*sums, matrix)  # type: ignore[return-value]


def rank_elements(problem: Problem, layout: Layout, degree: int, first: bool, last: bool) -> Parts:
    """The parts of a rank that does or does not hold the embedding, and the head."""
    block, embedding, head, _ = _local_elements(problem.shape, problem.optimizer, layout.axes.tp, degree)
    if problem.shape.tied and layout.axes.pp > 1:
        head += embedding  # the last stage holds its own copy of a tied embedding
    return block, embedding if first else NOTHING, head if last else NOTHING


@lru_cache(maxsize=4096)
def blocks_per_stage(shape: Shape, stages: int) -> tuple[int, ...]:
    """Blocks of every pipeline stage, cut where the runtime cuts (`parallel/pipeline/stages.py`)."""
    return split_blocks(shape.layers, stages, head_blocks(*matrix_weights(shape)))


class Holding(NamedTuple):
    """What a pipeline rank holds: its stages, the blocks of each, and which of them has the embedding, the head (-1: none)."""

    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    first: int
    last: int


def holding(problem: Problem, layout: Layout, rank: int, stage_blocks: tuple[int, ...] | None = None) -> Holding:
    """What pipeline rank `rank` holds. stage_blocks: blocks of each stage, where it is not `blocks_per_stage`."""
    axes = layout.axes
    blocks = stage_blocks or blocks_per_stage(problem.shape, axes.pp * layout.chunks)
    own = (0,) if axes.pp == 1 else rank_stages(layout.schedule or "1f1b", axes.pp, layout.chunks, rank)
    final = len(blocks) - 1
    return Holding(
        own,
        tuple(blocks[stage] for stage in own),
        own.index(0) if 0 in own else -1,
        own.index(final) if final in own else -1,
    )


class Rules(NamedTuple):
    """What the data-parallel kind means for memory in one program."""

    sharded: bool  # `fully_shard` keeps shards and gathers
    degree: int  # ranks that share the states
    late: bool  # gradients stay whole until the last microbatch (A112)
    resident: bool  # gathered parameters stay for the whole update
    casts: bool  # ddp keeps casts of the weights with the activations
    compute: int  # bytes of the compute dtype
    master: int  # of the stored dtype
    reduce: int  # of the dtype of reduction
    resting: float  # bytes per element of a reduced gradient, with the partial sum of a hybrid
    accumulated: float  # bytes per element of a gradient that waits for the last microbatch
    sent: int  # bytes per element of a gradient that autograd has made and that is being reduced or added up


def rules(problem: Problem, layout: Layout, microbatches: int) -> Rules:
    """The rules of this layout in the problem's program."""
    axes, stage, kind, program = layout.axes, STAGES[layout.data_parallel], layout.data_parallel, problem.program
    c, m, r = (DTYPE_BYTES[dtype] for dtype in (problem.param_dtype, problem.master_dtype, problem.reduce_dtype))
    torch_engine = program.engine == "torch"
    sharded = torch_engine and stage.shards_optimizer
    stage_keeps = axes.pp > 1 and program.pipeline_keeps_gathered
    late = sharded and microbatches > 1 and (stage_keeps or not stage.reduces_each_microbatch)
    resident = sharded and (
        stage_keeps
        or not stage.gathers_each_microbatch
        or layout.reshard_after_forward is False
        or layout.unit == "root"
    )
    hybrid = sharded and axes.dp_replicate > 1 and microbatches > 1 and not late
    return Rules(
        sharded=sharded,
        degree=axes.dp_shard * axes.cp if stage.shards_optimizer else 1,
        late=late,
        resident=resident,
        casts=torch_engine and kind == "ddp" and c < m,
        compute=c,
        master=m,
        reduce=r,
        resting=0.0 if not sharded or layout.offload != "none" else m + (r if hybrid else 0.0),
        accumulated=float(r) if late else 0.0,
        sent=c + r if sharded else (c + m if c < m else c),
    )


class States(NamedTuple):
    """Bytes that are there for the whole update: parameters, optimizer states, gradients, and buffers."""

    parameters: float
    optimizer: float  # with the flat engine's master copy
    gradients: float
    buffers: float


def states_of(problem: Problem, layout: Layout, rule: Rules, total: Elements) -> States:
    """The states of a rank that holds `total`, linear in it: the search's bound asks for a mean rank."""
    program, m = problem.program, rule.master
    if program.engine == "flat":
        master = m if rule.compute < m else 0
        optimizer = (m * total.states + master * total.whole) / rule.degree
        gradients = (m + program.flat_gradient_copies) * total.whole
        return States(rule.compute * total.whole, optimizer, gradients, program.buffer_bytes)
    if not rule.sharded:
        return States(m * total.whole, m * total.states, m * total.whole, program.buffer_bytes)
    buffers = program.buffer_bytes
    if not rule.resident and layout.reshard_after_forward is not True:
        buffers += rule.compute * total.whole / int(layout.reshard_after_forward)
    if layout.offload != "none":
        return States(0.0, 0.0, 0.0, buffers)
    return States(m * total.shard, m * total.shard_states, 0.0, buffers)


class RankBytes(NamedTuple):
    """What a rank is made of, in bytes, apart from activations. By unit: of a block, the embedding, the head."""

    states: States
    at_rest: float  # of all gradients once they are reduced
    step: float  # made by the optimizer step
    resting: tuple[float, float, float]  # by unit: a reduced gradient
    accumulated: tuple[float, float, float]  # by unit: a gradient that waits for the last microbatch
    gathered: tuple[float, ...]  # by place: gathered parameters
    sent: tuple[float, ...]  # by place: gradients on their way


def rank_bytes(problem: Problem, layout: Layout, rule: Rules, blocks: int, parts: Parts) -> RankBytes:
    """The bytes of a rank with `blocks` blocks; of its peers on the other axes, the one with the fullest shards."""
    block, embedding, head = parts
    total = Elements(
        blocks * block.whole + embedding.whole + head.whole,
        blocks * block.shard + embedding.shard + head.shard,
        blocks * block.states + embedding.states + head.states,
        blocks * block.shard_states + embedding.shard_states + head.shard_states,
    )
    states = states_of(problem, layout, rule, total)
    if exchanged := _exchanged_bytes(problem, layout, rule, parts):
        states = states._replace(buffers=states.buffers + exchanged)
    rest, wait = rule.resting, rule.accumulated
    return RankBytes(
        states,
        rest * total.shard,
        0.0 if layout.offload != "none" else _step_bytes(problem, rule, total, parts),
        (rest * block.shard, rest * embedding.shard, rest * head.shard),
        (wait * block.whole, wait * embedding.whole, wait * head.whole),
        *_travelling(problem, layout, rule, blocks, parts),
    )


def _step_bytes(problem: Problem, rule: Rules, total: Elements, parts: Parts) -> float:
    """What the optimizer step makes: copies of every element, of the largest parameter, or a whole gathered matrix."""
    optimizer = optimizer_of(problem.optimizer)
    made = problem.program.optimizer_temporary_bytes * total.shard
    if optimizer.temporaries:
        made += optimizer.temporaries * rule.master * max(parts[EMBEDDING].shard, parts[HEAD].shard)
    if optimizer.orthogonalises:
        made = max(made, orthogonalising_bytes(problem.shape, rule.master))
    return made


def _travelling(
    problem: Problem, layout: Layout, rule: Rules, blocks: int, parts: Parts
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes by place: parameters gathered there, and gradients not yet reduced or added up.

    Without `fully_shard` nothing is gathered, and a gradient on its way is the largest matrix that autograd has made and
    not yet added up. A root unit that holds embedding and head stays gathered, and its gradients wait for the end of backward.
    As units of their own the head stays gathered from forward to backward, and backward does not gather the embedding.
    """
    block, embedding, head = parts[0].whole, parts[1].whole, parts[2].whole
    c, sent, axes = rule.compute, rule.sent, layout.axes
    if not rule.sharded:
        matrix = _local_elements(problem.shape, problem.optimizer, axes.tp, 1)[3]
        return (0.0,) * 5, (sent * matrix, sent * embedding, sent * head, 0.0, 0.0)
    total = blocks * block + embedding + head
    if layout.unit == "root":
        return (*(c * total,) * 4, 0.0), (sent * total, sent * total, sent * total, 0.0, 0.0)
    ahead = min(layout.prefetch, blocks)
    unit = block * (1 if layout.unit == "block" else min(int(layout.unit), blocks))
    inside = min(1 + layout.prefetch, blocks) * c * unit
    if problem.program.ends_in_root or (problem.shape.tied and axes.pp == 1):
        root = embedding + head
        gathered = (inside + c * root, c * root, c * root + ahead * c * unit, c * root, 0.0)
        going = (sent * unit + c * root, sent * root, c * root, 0.0, 0.0)
    else:
        again = 0.0 if layout.reshard_after_forward is True else c * embedding
        gathered = (inside, again, c * head + ahead * c * unit, c * head, 0.0)
        going = (sent * unit, sent * embedding, sent * head, 0.0, 0.0)
    return (*(c * total,) * 4, 0.0) if rule.resident else gathered, going


def _exchanged_bytes(problem: Problem, layout: Layout, rule: Rules, parts: Parts) -> float:
    """Gradients that gloo's exchange keeps into the next forward: sent and received, of the units that backward ends with."""
    units = backend_facts(problem.device_kind).exchanged_units
    if not units or not rule.sharded or rule.degree == 1 or rule.late or layout.microbatches(problem) == 1:
        return 0.0
    block, embedding, head = parts[0].whole, parts[1].whole, parts[2].whole
    if problem.shape.tied and layout.axes.pp == 1:
        embedding += head  # all in the root unit
    return 2 * rule.reduce * (embedding + (units - 1) * block if embedding else units * block)

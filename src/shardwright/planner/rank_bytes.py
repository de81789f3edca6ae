"""What one pipeline rank holds, as bytes per block, per microbatch and per part: the constants of timeline and closed form.

m bytes of the stored (master) dtype, c of the compute dtype, r of the reduction dtype. N is the sharding degree: dp_shard x
cp, since context-parallel peers hold the same parameters and shard them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.arch.parameters import matrix_weights
from shardwright.arch.shape import Shape
from shardwright.dtypes import DTYPE_BYTES
from shardwright.layout.pipeline_schedules import head_blocks, rank_stages, split_blocks
from shardwright.layout.zero import EXCHANGED, STAGES
from shardwright.planner.block_bytes import BlockBytes, activation_key, block_bytes, loss_bytes, with_casts
from shardwright.planner.job import Job, Layout
from shardwright.planner.program import Program
from shardwright.planner.states import Elements, local_elements

_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}


def moments_of(optimizer: str) -> int:
    """Optimizer states per parameter, in the master dtype: sgd with momentum; 2 for an optimizer that is not ours."""
    return _MOMENTS.get(optimizer, 2)


@dataclass(frozen=True)
class RankBytes:
    """Everything the memory of one pipeline rank is made of, in bytes.

    blocks: blocks of each of its stages. first, last: which of its stages (by local number) holds the embedding, the
    head; -1 for none. resting: of one block, the embedding and the head, gradients once reduced. accumulated: the same
    before reduction, when it is put off. transient, gathered: see `Travelling`. late: gradients are put off. loss: all
    copies in the backward of the loss; loss_kept: those kept from forward to backward; loss_after: those alive in the
    head's backward.
    """

    blocks: tuple[int, ...]
    first: int
    last: int
    parameters: float
    optimizer: float
    buffers: float
    always: float
    resting: tuple[float, float, float]
    accumulated: tuple[float, float, float]
    transient: tuple[float, float, float, float]
    gathered: tuple[float, float, float, float]
    late: bool
    step: float
    activations: BlockBytes
    loss: float
    loss_kept: float
    loss_after: float

    @property
    def at_rest(self) -> float:
        """Bytes of all gradients once they are reduced."""
        total = sum(self.blocks) * self.resting[0]
        return total + (self.resting[1] if self.first >= 0 else 0.0) + (self.resting[2] if self.last >= 0 else 0.0)


def planned_stages(shape: Shape, stages: int) -> tuple[int, ...]:
    """Blocks of every pipeline stage, cut where the runtime cuts (`parallel/pipeline/stages.py`)."""
    return split_blocks(shape.layers, stages, head_blocks(*matrix_weights(shape)))


def stages_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """`planned_stages` of a layout."""
    return planned_stages(job.shape, layout.axes.pp * layout.chunks)


class Rules(NamedTuple):
    """What the data-parallel kind means for memory in one program.

    sharded: `fully_shard` keeps shards and gathers. degree: ranks that share the states. late: gradients stay whole until
    the last microbatch (A112). resident: gathered parameters stay for the whole update. casts: ddp keeps casts of the
    weights with the activations. compute, master, reduce: bytes of the dtypes. resting: bytes per element of a reduced
    gradient (with the partial sum of a hybrid). accumulated: bytes per element of one that is put off.
    """

    sharded: bool
    degree: int
    late: bool
    resident: bool
    casts: bool
    compute: int
    master: int
    reduce: int
    resting: float
    accumulated: float
    sent: int


def rules(job: Job, layout: Layout, program: Program, microbatches: int) -> Rules:
    """The rules of this layout in this program."""
    axes, stage, kind = layout.axes, STAGES[layout.data_parallel], layout.data_parallel
    c, m, r = DTYPE_BYTES[job.param_dtype], DTYPE_BYTES[job.master_dtype], DTYPE_BYTES[job.reduce_dtype]
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


def _three(per_element: float, elements: tuple[float, float, float]) -> tuple[float, float, float]:
    return (per_element * elements[0], per_element * elements[1], per_element * elements[2])


def _unit_blocks(layout: Layout, layers: int) -> int:
    if layout.unit == "block":
        return 1
    return layers if layout.unit == "root" else min(int(layout.unit), layers)


def rank_elements(
    job: Job, layout: Layout, degree: int, first: bool, last: bool
) -> tuple[Elements, Elements, Elements]:
    """Elements of a block, of the embedding and of the head on a rank that does or does not hold the latter two."""
    e = local_elements(job.shape, layout.axes.tp, degree)
    head, none = e.head, Elements(0, 0)
    if job.shape.tied and layout.axes.pp > 1:
        # The last stage holds its own copy of a tied embedding.
        head = Elements(head.whole + e.embedding.whole, head.shard + e.embedding.shard)
    return e.block, e.embedding if first else none, head if last else none


def holds(
    job: Job, layout: Layout, rank: int, stage_blocks: tuple[int, ...] | None = None
) -> tuple[tuple[int, ...], int, int]:
    """(blocks of each of its stages, which of them holds the embedding, which the head; -1 for none)."""
    stages = stage_blocks or stages_of(job, layout)
    own = (0,) if layout.axes.pp == 1 else rank_stages(layout.schedule or "1f1b", layout.axes.pp, layout.chunks, rank)
    final = len(stages) - 1
    return (
        tuple(stages[stage] for stage in own),
        own.index(0) if 0 in own else -1,
        own.index(final) if final in own else -1,
    )


class Travelling(NamedTuple):
    """Bytes by place (block, embedding, head, loss): parameters gathered there, and gradients not yet reduced or added up."""

    gathered: tuple[float, float, float, float]
    sent: tuple[float, float, float, float]


def travelling(
    job: Job, layout: Layout, program: Program, rule: Rules, blocks: int, parts: tuple[float, float, float]
) -> Travelling:
    """What is gathered and on its way at each place; `parts`: whole elements of a block, the embedding, the head.

    Without `fully_shard` nothing is gathered, and a gradient on its way is the largest matrix that autograd has made and
    not yet added up. A root unit that holds the ends stays gathered, and its gradients wait for the end of backward. As units
    of their own the head stays gathered from forward to backward, and backward does not gather the embedding.
    """
    block, embedding, head = parts
    sent = rule.sent
    if not rule.sharded:
        matrix = local_elements(job.shape, layout.axes.tp, 1).matrix
        return Travelling((0.0, 0.0, 0.0, 0.0), (sent * matrix, sent * embedding, sent * head, 0.0))
    c, total = rule.compute, blocks * block + embedding + head
    if layout.unit == "root":
        return Travelling((c * total,) * 4, (sent * total, sent * total, sent * total, 0.0))
    ahead = min(layout.prefetch, blocks)
    unit = block * (1 if layout.unit == "block" else min(int(layout.unit), blocks))
    inside = min(1 + layout.prefetch, blocks) * c * unit
    if program.ends_in_root or (job.shape.tied and layout.axes.pp == 1):
        root = embedding + head
        gathered = (inside + c * root, c * root, c * root + ahead * c * unit, c * root)
        going = (sent * unit + c * root, sent * root, c * root, 0.0)
    else:
        again = 0.0 if layout.reshard_after_forward is True else c * embedding
        gathered = (inside, again, c * head + ahead * c * unit, c * head)
        going = (sent * unit, sent * embedding, sent * head, 0.0)
    return Travelling((c * total,) * 4 if rule.resident else gathered, going)


def rank_bytes(
    job: Job, layout: Layout, program: Program, rank: int, stage_blocks: tuple[int, ...] | None = None
) -> RankBytes:
    """The bytes of pipeline rank `rank`; of its peers on the other axes, the one with the fullest shards.

    `stage_blocks`: blocks of each stage, when it is not the split of `stages_of`.
    """
    blocks, first, last = holds(job, layout, rank, stage_blocks)
    rule = rules(job, layout, program, layout.microbatches(job))
    e = rank_elements(job, layout, rule.degree, first >= 0, last >= 0)
    whole = (float(e[0].whole), float(e[1].whole), float(e[2].whole))
    shard = (float(e[0].shard), float(e[1].shard), float(e[2].shard))
    count, c = sum(blocks), rule.compute
    total, total_shard = count * whole[0] + whole[1] + whole[2], count * shard[0] + shard[1] + shard[2]
    a = block_bytes(job, program, activation_key(layout))
    if rule.casts:
        a = with_casts(a, layout.recompute, c * whole[0], c * whole[2])
    state = state_bytes(job, layout, program, rule, total, total_shard, exchanged_bytes(job, layout, rule, whole))
    moving = travelling(job, layout, program, rule, count, whole)
    loss, kept, after = loss_bytes(job, program, a.logits, layout)
    return RankBytes(
        blocks=blocks,
        first=first,
        last=last,
        parameters=state[0],
        optimizer=state[1],
        always=state[2],
        buffers=state[3],
        resting=_three(rule.resting, shard),
        accumulated=_three(rule.accumulated, whole),
        transient=moving.sent,
        gathered=moving.gathered,
        late=rule.late,
        step=program.optimizer_temporary_bytes * (0.0 if layout.offload != "none" else total_shard),
        activations=a,
        loss=loss,
        loss_kept=kept,
        loss_after=after,
    )


def exchanged_bytes(job: Job, layout: Layout, rule: Rules, parts: tuple[float, float, float]) -> float:
    """Gradients that gloo's exchange keeps into the next forward: sent and received, of the units that backward ends with.

    `parts`: whole elements of a block, the embedding, the head.
    """
    exchanges = job.device_kind == "cpu" and rule.sharded and rule.degree > 1
    if not exchanges or rule.late or layout.microbatches(job) == 1:
        return 0.0
    block, embedding, head = parts
    if job.shape.tied and layout.axes.pp == 1:
        embedding += head  # all in the root unit
    ends = embedding + (EXCHANGED - 1) * block if embedding else EXCHANGED * block
    return 2 * rule.reduce * ends


def state_bytes(
    job: Job,
    layout: Layout,
    program: Program,
    rule: Rules,
    total: float,
    total_shard: float,
    exchanged: float,
) -> tuple[float, float, float, float]:
    """(parameters, optimizer states with any master copy, gradients that are always there, buffers) of one rank.

    exchanged: of `exchanged_bytes`.
    """
    moments = moments_of(job.optimizer) * rule.master
    buffers = program.buffer_bytes + exchanged
    if program.engine == "flat":
        master = rule.master if rule.compute < rule.master else 0
        gradients = (rule.master + program.flat_gradient_copies) * total
        return rule.compute * total, (moments + master) * total / rule.degree, gradients, buffers
    if not rule.sharded:
        return rule.master * total, moments * total, rule.master * total, buffers
    if not rule.resident and layout.reshard_after_forward is not True:
        buffers += rule.compute * total / int(layout.reshard_after_forward)
    if layout.offload != "none":
        return 0.0, 0.0, 0.0, buffers
    return rule.master * total_shard, moments * total_shard, 0.0, buffers


def stage_saved(b: RankBytes, chunk: int) -> float:
    """Bytes that one microbatch in flight keeps on a stage."""
    a = b.activations
    saved = b.blocks[chunk] * a.saved + a.boundary
    return saved + (a.head + b.loss_kept if chunk == b.last else 0.0)

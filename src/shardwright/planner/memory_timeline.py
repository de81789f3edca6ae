"""Peak memory of one update: a timeline of what is alive when, and a closed form that gives its maximum.

The timeline walks a pipeline rank's action list block by block. The closed form looks only at the moments that can be the
maximum: in the backward of each distinct state of the action list, the loss, the head, the first and last block that backward
meets, the embedding; and the optimizer step. A test holds the two equal on random layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import mul

from shardwright.layout.pipeline_schedules import Action, rank_actions, rank_stages
from shardwright.planner.job import Job, Layout
from shardwright.planner.peak import PeakModel
from shardwright.planner.program import SHARDWRIGHT, Program
from shardwright.planner.rank_bytes import RankBytes, rank_bytes, stage_saved

PARTS = (
    "parameters",
    "optimizer states",
    "gradients",
    "gathered parameters",
    "unreduced gradients",
    "activations",
    "kept for weight gradients",
    "recomputation and workspace",
    "logits and loss",
    "buffers",
)


@dataclass(frozen=True)
class Moment:
    """One moment of an update on one pipeline rank: its name, and the bytes of each of `PARTS`."""

    label: str
    alive: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.alive)


@dataclass(frozen=True)
class Peak:
    """The fullest moment of the fullest rank.

    allocated: bytes of tensors. reserved: with the allocator's fragmentation. device: with the CUDA context, to be compared
    with the device's memory. composition: bytes by name, at that moment, largest first.
    """

    allocated: float
    reserved: float
    device: float
    pipeline_rank: int
    moment: str
    composition: dict[str, float]


def walked_actions(layout: Layout, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The action list of one pipeline rank; without a pipeline, forward and backward in turn."""
    if layout.axes.pp == 1:
        return tuple(Action(0, kind, index) for index in range(microbatches) for kind in "FB")
    return rank_actions(layout.schedule or "1f1b", layout.axes.pp, layout.chunks, microbatches, rank)


class _Walk:
    """The state of a rank while its action list is walked."""

    def __init__(self, b: RankBytes, microbatches: int, ends: bool) -> None:
        self.b, self.count, self.ends = b, microbatches, ends
        stages = len(b.blocks)
        self.alive, self.deferred = [0] * stages, [0] * stages
        self.weights = [0] * stages
        # Units of each stage whose gradients exist: reduced, and put off.
        self.reduced = [[0, 0, 0] for _ in range(stages)]
        self.waiting = [[0, 0, 0] for _ in range(stages)]

    def moment(
        self,
        label: str,
        activations: float,
        *,
        gathered: float = 0.0,
        unreduced: float = 0.0,
        work: float = 0.0,
        loss: float = 0.0,
    ) -> Moment:
        b = self.b
        gradients, put_off = b.always, 0.0
        for reduced, waiting in zip(self.reduced, self.waiting):
            gradients += sum(map(mul, reduced, b.resting))
            put_off += sum(map(mul, waiting, b.accumulated))
        later = sum(map(mul, self.deferred, b.blocks)) * b.activations.deferred
        parts = (b.parameters, b.optimizer, gradients, gathered)
        return Moment(label, (*parts, unreduced + put_off, activations, later, work, loss, b.buffers))

    def in_flight(self) -> float:
        return sum(count * stage_saved(self.b, chunk) for chunk, count in enumerate(self.alive))

    def gradient(self, chunk: int, place: int) -> None:
        """One unit's gradient has been made: it is reduced, or it waits for the last microbatch."""
        limit = self.b.blocks[chunk] if place == 0 else 1
        if self.b.late and self.weights[chunk] < self.count - 1:
            self.waiting[chunk][place] = min(self.waiting[chunk][place] + 1, limit)
        else:
            self.waiting[chunk][place] = max(self.waiting[chunk][place] - 1, 0)
            self.reduced[chunk][place] = min(self.reduced[chunk][place] + 1, limit)

    def forward(self, chunk: int, name: str) -> Iterator[Moment]:
        b, a = self.b, self.b.activations
        base = self.in_flight()
        for block in range(b.blocks[chunk] - 1 if self.ends else 0, b.blocks[chunk]):
            kept = base + a.boundary + (block + 1) * a.saved
            gathered = b.gathered[0]
            yield self.moment(f"forward of {name}, block {block}", kept, gathered=gathered, work=a.forward)
        self.alive[chunk] += 1

    def backward(self, chunk: int, kind: str, name: str) -> Iterator[Moment]:
        b, a, n = self.b, self.b.activations, self.b.blocks[chunk]
        self.alive[chunk] -= 1
        base = self.in_flight() + a.boundary
        saved, reduces = a.saved, kind == "B"
        sending = b.transient if reduces else (0.0, 0.0, 0.0, 0.0)
        if chunk == b.last:
            kept = base + n * saved + a.head
            yield self.moment(f"loss of {name}", kept, loss=b.loss, gathered=b.gathered[3])
            yield self.moment(
                f"backward of {name}, head",
                kept,
                loss=b.loss_after,
                gathered=b.gathered[2],
                unreduced=sending[2],
            )
            if reduces:
                self.gradient(chunk, 2)
        for block in reversed(range(n)):
            if block in (0, n - 1) or not self.ends:
                yield self.moment(
                    f"backward of {name}, block {block}",
                    base + (block + 1) * saved,
                    gathered=b.gathered[0],
                    unreduced=sending[0],
                    work=a.work,
                )
            if reduces:
                self.gradient(chunk, 0)
        if chunk == b.first and reduces:
            yield self.moment(f"backward of {name}, embedding", base, gathered=b.gathered[1], unreduced=sending[1])
            self.gradient(chunk, 1)
        if kind == "I":
            self.deferred[chunk] += 1
        else:
            self.weights[chunk] += 1

    def weight(self, chunk: int, name: str) -> Iterator[Moment]:
        b = self.b
        gathered = b.gathered[0]
        yield self.moment(f"weight gradients of {name}", self.in_flight(), gathered=gathered, unreduced=b.transient[0])
        self.deferred[chunk] -= 1
        for _ in range(b.blocks[chunk]):
            self.gradient(chunk, 0)
        for place, holder in ((1, b.first), (2, b.last)):
            if chunk == holder:
                self.gradient(chunk, place)
        self.weights[chunk] += 1


def timeline(
    job: Job,
    layout: Layout,
    rank: int = 0,
    program: Program = SHARDWRIGHT,
    stage_blocks: tuple[int, ...] | None = None,
    ends: bool = False,
) -> Iterator[Moment]:
    """Every moment of one update on pipeline rank `rank`, in order, in the steady state of training.

    ends: of the blocks of a stage only those where what is alive can be most, the first and the last: in between it grows
    or shrinks evenly.
    """
    microbatches = layout.microbatches(job)
    b = rank_bytes(job, layout, program, rank, stage_blocks)
    walk = _Walk(b, microbatches, ends)
    pp = layout.axes.pp
    own = (0,) if pp == 1 else rank_stages(layout.schedule or "1f1b", pp, layout.chunks, rank)
    for stage, kind, index in walked_actions(layout, microbatches, rank):
        name = f"microbatch {index}" if pp == 1 else f"microbatch {index}, stage {stage}"
        chunk = own.index(stage)
        if kind == "F":
            yield from walk.forward(chunk, name)
        elif kind == "W":
            yield from walk.weight(chunk, name)
        else:
            yield from walk.backward(chunk, kind, name)
    end = walk.moment("optimizer step", 0.0, work=b.step)
    # Nothing is gathered any more.
    yield Moment(end.label, tuple(0.0 if part == "gathered parameters" else x for part, x in zip(PARTS, end.alive)))


def _reserved(moment: Moment, total: float, at_rest: float, program: Program) -> float:
    """What the allocator reserves for a moment: states and all gradients at rest, and the rest with fragmentation."""
    parameters, optimizer, gradients, *_, buffers = moment.alive
    states = parameters + optimizer + buffers
    moving = total - states - gradients
    always = gradients if at_rest == 0 else at_rest
    return states + always + (1 + program.fragmentation) * moving


def peak(
    job: Job,
    layout: Layout,
    program: Program = SHARDWRIGHT,
    *,
    ranks: Iterable[int] | None = None,
    stage_blocks: tuple[int, ...] | None = None,
    ends: bool = False,
) -> Peak:
    """The fullest moment over all pipeline ranks (or those named), with what is alive at it. ends: see `timeline`."""
    fullest: tuple[float, int, Moment] = (0.0, 0, Moment("nothing", ()))
    reserved = 0.0
    for rank in range(layout.axes.pp) if ranks is None else ranks:
        at_rest = rank_bytes(job, layout, program, rank, stage_blocks).at_rest
        for moment in timeline(job, layout, rank, program, stage_blocks, ends):
            total = moment.total
            if total > fullest[0]:
                fullest = (total, rank, moment)
            reserved = max(reserved, _reserved(moment, total, at_rest, program))
    allocated, rank, moment = fullest
    parts = sorted(zip(PARTS, moment.alive), key=lambda part: -part[1])
    return Peak(
        allocated=allocated,
        reserved=reserved,
        device=reserved + program.context_bytes,
        pipeline_rank=rank,
        moment=moment.label,
        composition={name: size for name, size in parts if size > 0},
    )


def short_peak(job: Job, layout: Layout, program: Program = SHARDWRIGHT) -> Peak:
    """`peak`, walking only the pipeline ranks that can be the fullest and as many microbatches as reach the steady state.

    Whole rounds, so that interleaved schedules keep their shape; GPipe has no steady state.
    """
    pp, microbatches = layout.axes.pp, layout.microbatches(job)
    rounds = max(1, microbatches // pp)
    few = microbatches // rounds * min(rounds, 3)
    if pp == 1:
        few = min(microbatches, 3)
    elif layout.schedule == "gpipe":
        few = microbatches
    rows = layout.microbatch_rows * layout.axes.data_ranks * few
    ranks = PeakModel(job, program).ranks(layout)
    return peak(replace(job, global_batch_size=rows), layout, program, ranks=ranks, ends=True)

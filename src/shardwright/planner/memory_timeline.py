"""The tensors that are alive at each moment on one pipeline rank: counts without sizes, and their bytes.

`alive` walks a rank's action list block by block. Everything else reads its counts: `timeline` gives bytes by category at every
moment, `peak` the fullest moment, and `memory_peak.py` the peak of many layouts, from the moments that can be the fullest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from shardwright.layout.pipeline_schedules import Action, rank_actions
from shardwright.planner.activations import Activations, activation_bytes
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.rank_bytes import (
    BLOCK,
    EMBEDDING,
    HEAD,
    LOSS,
    STEP,
    Holding,
    Parts,
    RankBytes,
    Rules,
    holding,
    rank_bytes,
    rank_elements,
    rules,
)

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


class Alive(NamedTuple):
    """One moment as counts: first of `Activations`, in the same order, then of gradients."""

    saved: int  # blocks whose activations are kept
    boundaries: int  # inputs of stages
    heads: int  # activations of final norm and head
    losses: int  # what losses keep from forward to backward
    deferred: int  # blocks whose weight gradients are still to come
    work: int  # 1 in the backward of a block
    forward: int  # 1 in the forward of a block
    loss: int  # 1 in the backward of the loss
    loss_after: int  # 1 in the backward of the head
    waiting_blocks: int  # units whose gradients wait for the last microbatch
    waiting_embeddings: int
    waiting_heads: int
    reduced_blocks: int  # units whose gradients are reduced
    reduced_embeddings: int
    reduced_heads: int
    sends: int  # 1 where a unit's gradient and what is reduced of it are both there
    place: int  # BLOCK, EMBEDDING, HEAD, LOSS or STEP: what is gathered

    @property
    def waiting(self) -> tuple[int, int, int]:
        return self[9:12]

    @property
    def reduced(self) -> tuple[int, int, int]:
        return self[12:15]


class _Walk:
    """The state of a rank while its action list is walked. Its methods yield (what is done, where, what is alive)."""

    def __init__(self, held: Holding, microbatches: int, late: bool, ends: bool) -> None:
        self.held, self.count, self.late, self.ends = held, microbatches, late, ends
        self.saved = self.boundaries = self.heads = self.deferred = 0
        self.done = [0] * len(held.blocks)  # microbatches whose weight gradients a stage has made
        self.waiting, self.reduced = [0, 0, 0], [0, 0, 0]
        self.met: set[tuple[object, ...]] = set()

    def now(
        self,
        place: int,
        saved: int = 0,
        own: int = 0,
        head: int = 0,
        work: int = 0,
        forward: int = 0,
        loss: int = 0,
        after: int = 0,
        sends: int = 0,
    ) -> Alive:
        """What is alive, with so many blocks of the microbatch that is worked on; own: 1 for its boundary."""
        kept = (self.saved + saved, self.boundaries + own, self.heads + head, self.heads, self.deferred)
        return Alive._make((*kept, work, forward, loss, after, *self.waiting, *self.reduced, sends, place))

    def saves(self, chunk: int, change: int) -> None:
        """A forward of a stage saves activations (change 1), or a backward frees them (-1)."""
        self.saved += change * self.held.blocks[chunk]
        self.boundaries += change
        self.heads += change * (chunk == self.held.last)

    def _gradients(self, chunk: int, unit: int, count: int = 1) -> None:
        """Gradients of so many units have been made: they are reduced, or wait for the last microbatch."""
        first, last = self.done[chunk] == 0, self.done[chunk] == self.count - 1
        if self.late and not last:
            self.waiting[unit] += count * first
        elif self.late or first:
            self.waiting[unit] -= count * self.late
            self.reduced[unit] += count

    def repeats(self, chunk: int, kind: str) -> bool:
        """Passes an action that finds what an earlier one has found: the steady phase repeats, and makes no new gradients."""
        if not self.ends or (kind != "I" and not 0 < self.done[chunk] < self.count - 1):
            return False
        found = (kind, chunk, self.saved, self.boundaries, self.heads, self.deferred, *self.waiting, *self.reduced)
        if found not in self.met:
            self.met.add(found)
            return False
        if kind != "W":
            self.saves(chunk, -1)
        self.deferred += self.held.blocks[chunk] * {"I": 1, "B": 0, "W": -1}[kind]
        self.done[chunk] += kind != "I"
        return True

    def forward(self, chunk: int) -> Iterator[tuple[str, str, Alive]]:
        for block in range(self.held.blocks[chunk]):
            yield "forward", f"block {block}", self.now(BLOCK, block + 1, 1, forward=1)
        self.saves(chunk, 1)

    def backward(self, chunk: int, whole: bool) -> Iterator[tuple[str, str, Alive]]:
        """whole: the gradients of weights too, which are sent; else they are put off."""
        self.saves(chunk, -1)
        blocks = self.held.blocks[chunk]
        if chunk == self.held.last:
            yield "loss", "", self.now(LOSS, blocks, 1, 1, loss=1)
            yield "backward", "head", self.now(HEAD, blocks, 1, 1, after=1, sends=whole)
            if whole:
                self._gradients(chunk, HEAD)
        # In between, what is alive grows or shrinks evenly.
        walked = sorted({0, blocks - 1} if self.ends else range(blocks), reverse=True)
        for block, below in zip(walked, [*walked[1:], -1]):
            yield "backward", f"block {block}", self.now(BLOCK, block + 1, 1, work=1, sends=whole)
            if whole:
                self._gradients(chunk, BLOCK, block - below)
        if not whole:
            self.deferred += blocks
            return
        if chunk == self.held.first:
            yield "backward", "embedding", self.now(EMBEDDING, own=1, sends=1)
            self._gradients(chunk, EMBEDDING)
        self.done[chunk] += 1

    def weights(self, chunk: int) -> Iterator[tuple[str, str, Alive]]:
        yield "weight gradients", "", self.now(BLOCK, sends=1)
        self.deferred -= self.held.blocks[chunk]
        self._gradients(chunk, BLOCK, self.held.blocks[chunk])
        for unit, holder in ((EMBEDDING, self.held.first), (HEAD, self.held.last)):
            if chunk == holder:
                self._gradients(chunk, unit)
        self.done[chunk] += 1


def alive(
    walked: Sequence[Action], held: Holding, microbatches: int, late: bool, ends: bool = False
) -> Iterator[tuple[Action | None, str, str, Alive]]:
    """(action, what it does, where, what is alive) of every moment of one update, in the steady state of training.

    The optimizer step, without an action, comes last. late: see `Rules`. ends: only moments that can be the fullest: of the
    backward pass the first and the last block of a stage, no forward, and nothing twice.
    """
    walk = _Walk(held, microbatches, late, ends)
    chunk_of = {stage: chunk for chunk, stage in enumerate(held.stages)}
    for action in walked:
        chunk, kind = chunk_of[action.stage], action.kind
        if ends and kind == "F":  # no moment of a forward has more than the backward that follows
            walk.saves(chunk, 1)
            continue
        if walk.repeats(chunk, kind):
            continue
        moments = walk.forward(chunk) if kind == "F" else walk.weights(chunk) if kind == "W" else None
        for what, where, now in moments or walk.backward(chunk, kind == "B"):
            yield action, what, where, now
    yield None, "optimizer step", "", walk.now(STEP)


def walked_actions(layout: Layout, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The action list of one pipeline rank; without a pipeline, forward and backward in turn."""
    if layout.axes.pp == 1:
        return tuple(Action(0, kind, index) for index in range(microbatches) for kind in "FB")
    return rank_actions(layout.schedule or "1f1b", layout.axes.pp, layout.chunks, microbatches, rank)


class Moment(NamedTuple):
    """One moment of an update on one pipeline rank: its name, and the bytes of each of `PARTS`."""

    label: str
    alive: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.alive)


def cast_bytes(rule: Rules, parts: Parts) -> tuple[float, float]:
    """Bytes of the casts of a block's and the head's weights; see `activation_bytes`."""
    return (rule.compute * parts[BLOCK].whole, rule.compute * parts[HEAD].whole) if rule.casts else (0.0, 0.0)


def _bytes_of(now: Alive, sizes: Activations, b: RankBytes) -> tuple[float, ...]:
    """The bytes of each of `PARTS` at a moment."""
    saved, boundary, head, kept, deferred, work, forward, loss, after = map(mul, now, sizes)
    states, step = b.states, b.step if now.place == STEP else 0.0
    return (
        states.parameters,
        states.optimizer,
        states.gradients + sum(map(mul, now.reduced, b.resting)),
        b.gathered[now.place],
        now.sends * b.sent[now.place] + sum(map(mul, now.waiting, b.accumulated)),
        saved + boundary + head + kept,
        deferred,
        work + forward + step,
        loss + after,
        states.buffers,
    )


def sized_rank(problem: Problem, layout: Layout, rule: Rules, held: Holding) -> tuple[Activations, RankBytes]:
    """The bytes of what `alive` counts on a rank that holds `held`."""
    # The last stage's head alone decides the casts of a head: other ranks count none.
    heads = rank_elements(problem, layout, 1, first=False, last=True)
    parts = rank_elements(problem, layout, rule.degree, held.first >= 0, held.last >= 0)
    sizes = activation_bytes(problem, layout, cast_bytes(rule, heads))
    return sizes, rank_bytes(problem, layout, rule, sum(held.blocks), parts)


def timeline(
    problem: Problem,
    layout: Layout,
    rank: int = 0,
    stage_blocks: tuple[int, ...] | None = None,
    *,
    microbatches: int = 0,
    ends: bool = False,
) -> Iterator[Moment]:
    """Every moment of one update on pipeline rank `rank`, in order.

    stage_blocks: see `holding`. microbatches: to walk, where not all; ends: see `alive`.
    """
    rule, held = rules(problem, layout, layout.microbatches(problem)), holding(problem, layout, rank, stage_blocks)
    sizes, b = sized_rank(problem, layout, rule, held)
    count = microbatches or layout.microbatches(problem)
    for action, what, where, now in alive(walked_actions(layout, count, rank), held, count, rule.late, ends):
        label = what
        if action is not None:
            label += f" of microbatch {action.microbatch}" + (f", stage {action.stage}" if layout.axes.pp > 1 else "")
        yield Moment(label + (where and f", {where}"), _bytes_of(now, sizes, b))


@dataclass(frozen=True)
class Peak:
    """The fullest moment of the fullest rank."""

    allocated: float  # bytes of tensors
    reserved: float  # bytes with the allocator's fragmentation
    device: float  # bytes with the CUDA context, to be compared with the device's memory
    pipeline_rank: int
    moment: str
    composition: dict[str, float]  # bytes by name of `PARTS` at that moment, largest first


def peak(
    problem: Problem,
    layout: Layout,
    *,
    ranks: Iterable[int] | None = None,
    stage_blocks: tuple[int, ...] | None = None,
    microbatches: int = 0,
    ends: bool = False,
) -> Peak:
    """The fullest moment over all pipeline ranks, or over `ranks`, with what is alive at it; the rest: see `timeline`."""
    fullest, at, most = Moment("nothing", ()), 0, 0.0
    rule, reserved, extra = rules(problem, layout, layout.microbatches(problem)), 0.0, problem.program.fragmentation
    for rank in range(layout.axes.pp) if ranks is None else ranks:
        at_rest = sized_rank(problem, layout, rule, holding(problem, layout, rank, stage_blocks))[1].at_rest
        for moment in timeline(problem, layout, rank, stage_blocks, microbatches=microbatches, ends=ends):
            total = moment.total
            if total > most:
                fullest, at, most = moment, rank, total
            parameters, optimizer, gradients, *_, buffers = moment.alive
            # Reserved are states and all gradients at rest, and the rest with fragmentation.
            states = parameters + optimizer + buffers
            reserved = max(reserved, states + (at_rest or gradients) + (1 + extra) * (total - states - gradients))
    parts = sorted(zip(PARTS, fullest.alive), key=lambda part: -part[1])
    composition = {name: size for name, size in parts if size > 0}
    return Peak(most, reserved, reserved + problem.program.context_bytes, at, fullest.label, composition)

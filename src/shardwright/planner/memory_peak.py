"""The peak memory of many layouts: the counts of `memory_timeline.alive` at the moments that can be the fullest, times sizes.

A moment of a rank cannot be the fullest where another one at the same place has at least as much of everything. Which moments
are left depends on no size, so they are found once for a schedule. A test holds the result equal to the whole timeline's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import inf
from operator import ge, mul
from typing import TYPE_CHECKING

from shardwright.layout.axes import Axes
from shardwright.planner.activations import activation_bytes, activation_key
from shardwright.planner.memory_timeline import (
    Alive,
    Peak,
    alive,
    cast_bytes,
    peak,
    walked_actions,
)
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.rank_bytes import (
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

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule

Sized = tuple[float, tuple[int, int, int], tuple[int, int, int], int, int]
"""A moment with the bytes of its activations: units whose gradients wait and are reduced, sends, place."""


def steady_count(schedule: Schedule | None, pp: int, microbatches: int) -> int:
    """A number of microbatches that meets all the same moments: the steady phase repeats. GPipe has none."""
    if schedule is None:
        return min(microbatches, 3)
    if schedule == "gpipe":
        return microbatches
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        rounds = max(1, microbatches // pp)
        return microbatches // rounds * min(rounds, 2)
    return min(microbatches, pp + 2 if schedule == "1f1b" else 2 * pp + 2)


@lru_cache(maxsize=8192)
def fullest_moments(layout: Layout, count: int, rank: int, held: Holding, late: bool) -> tuple[Alive, ...]:
    """The moments of a rank that can be the fullest. layout: its axes, schedule and chunks decide, nothing else."""
    seen = {
        now
        for _, _, _, now in alive(walked_actions(layout, count, rank), held, count, late, ends=True)
        if now.place != STEP
    }
    kept: dict[int, list[Alive]] = {}
    for moment in sorted(seen, key=sum, reverse=True):
        alike = kept.setdefault(moment.place, [])
        saved, reduced = moment.saved, moment.reduced_blocks
        for other in alike:
            # Two counts decide most comparisons, at a fraction of the cost of all seventeen.
            if other.saved >= saved and other.reduced_blocks >= reduced and all(map(ge, other, moment)):
                break
        else:
            alike.append(moment)
    return tuple(moment for alike in kept.values() for moment in alike)


class PeakMemory:
    """Peak memory of the layouts of one problem. The search makes one and asks it for every layout."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._sized: dict[tuple[object, ...], list[tuple[Holding, list[Sized]]]] = {}
        self._held: dict[tuple[object, ...], tuple[tuple[int, Holding], ...]] = {}
        self._parts: dict[tuple[int, int, bool, bool, bool], Parts] = {}

    def candidates(self, layout: Layout) -> tuple[tuple[int, Holding], ...]:
        """(rank, what it holds) of the ranks that can be the fullest: of those with equally many blocks, the ends."""
        pp = layout.axes.pp
        key = (pp, layout.schedule, layout.chunks)
        found = self._held.get(key)
        if found is None:
            every = [holding(self.problem, layout, rank) for rank in range(pp)]
            alike: dict[tuple[int, ...], list[int]] = {}
            for rank in range(1, pp - 1):
                alike.setdefault(every[rank].blocks, []).append(rank)
            ends = (0, -1) if layout.schedule in ("zero_bubble", "zbv") else (0,)
            ranks = {0, pp - 1, *(own[end] for own in alike.values() for end in ends)}
            found = self._held[key] = tuple((rank, every[rank]) for rank in sorted(ranks))
        return found

    def elements(self, layout: Layout, degree: int, first: bool, last: bool) -> Parts:
        """`rank_elements`, kept."""
        key = (layout.axes.tp, degree, first, last, layout.axes.pp > 1)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = rank_elements(self.problem, layout, degree, first, last)
        return found

    def _moments(self, layout: Layout, rule: Rules, microbatches: int) -> Iterable[tuple[Holding, list[Sized]]]:
        """What each rank that can be the fullest holds, and its moments in bytes; made as they are asked for."""
        axes = layout.axes
        schedule = None if axes.pp == 1 else layout.schedule or "1f1b"
        count = steady_count(schedule, axes.pp, microbatches)
        key = (*activation_key(layout), axes.pp, schedule, layout.chunks, count, rule.late, rule.casts)
        made = self._sized.setdefault(key, [])
        yield from made
        walked = Layout(Axes(pp=axes.pp), "ddp", 1, schedule, layout.chunks)
        for rank, held in self.candidates(layout)[len(made) :]:
            casts = cast_bytes(rule, self.elements(layout, 1, False, True))
            sizes = activation_bytes(self.problem, layout, casts)
            moments = fullest_moments(walked, count, rank, held, rule.late)
            # `map` stops with the sizes: gradients are counted for themselves.
            sized = [(sum(map(mul, m, sizes)), m.waiting, m.reduced, m.sends, m.place) for m in moments]
            made.append((held, sized))
            yield held, sized

    def peak_bytes(self, layout: Layout, limit: float = inf) -> tuple[float, float]:
        """(allocated, reserved) bytes at the peak of the fullest rank; `Program.fragmentation` says what is reserved.

        As soon as a rank reserves more than `limit` bytes, what has been seen so far is returned: that is too much already.
        """
        microbatches = layout.microbatches(self.problem)
        rule = rules(self.problem, layout, microbatches)
        extra, allocated, reserved = 1 + self.problem.program.fragmentation, 0.0, 0.0
        for held, moments in self._moments(layout, rule, microbatches):
            parts = self.elements(layout, rule.degree, held.first >= 0, held.last >= 0)
            b = rank_bytes(self.problem, layout, rule, sum(held.blocks), parts)
            states = sum(b.states)
            most, moving = _fullest(moments, b, rule)
            allocated = max(allocated, states + most, states + b.at_rest + b.step)
            reserved = max(reserved, states + b.at_rest + extra * max(moving, b.step))
            if reserved > limit:
                break
        return allocated, reserved


def _fullest(moments: list[Sized], b: RankBytes, rule: Rules) -> tuple[float, float]:
    """The fullest moment without what is always there, with and without gradients at rest."""
    gathered, sent, late, done = b.gathered, b.sent, rule.accumulated, rule.resting
    block, embedding, head = b.accumulated
    resting_block, resting_embedding, resting_head = b.resting
    most = moving = 0.0
    for activations, waiting, reduced, sends, place in moments:
        total = activations + gathered[place]
        if sends:
            total += sent[place]
        if late:
            total += waiting[0] * block + waiting[1] * embedding + waiting[2] * head
        if total > moving:
            moving = total
        if done:
            total += reduced[0] * resting_block + reduced[1] * resting_embedding + reduced[2] * resting_head
        if total > most:
            most = total
    return most, moving


def short_peak(problem: Problem, layout: Layout) -> Peak:
    """`peak`, walking only the pipeline ranks that can be the fullest and as many microbatches as reach the steady state.

    Whole rounds, so that interleaved schedules keep their shape; GPipe has no steady state.
    """
    pp, microbatches = layout.axes.pp, layout.microbatches(problem)
    rounds = max(1, microbatches // pp)
    few = microbatches // rounds * min(rounds, 3)
    if pp == 1:
        few = min(microbatches, 3)
    elif layout.schedule == "gpipe":
        few = microbatches
    ranks = [rank for rank, _ in PeakMemory(problem).candidates(layout)]
    return peak(problem, layout, ranks=ranks, microbatches=few, ends=True)

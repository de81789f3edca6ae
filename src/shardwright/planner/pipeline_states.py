"""What the backward actions of a pipeline rank meet, whatever the sizes: microbatches in flight, gradients so far.

States that another state of the same rank dominates are left out: they cannot be the peak.
"""

from __future__ import annotations

from functools import lru_cache
from operator import ge
from typing import TYPE_CHECKING, NamedTuple

from shardwright.layout.pipeline_schedules import rank_actions, rank_stages

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule


class State(NamedTuple):
    """What a backward action of a pipeline rank meets, whatever the sizes.

    kind, chunk: the action and the rank's stage it is for. alive: microbatches in flight per stage, this one included.
    deferred: microbatches per stage whose weight gradients are still to come. gradients: per stage, 0 before its first
    backward, 2 after its last, else 1. first, last: this is the stage's first, or last, backward for weights.
    """

    kind: str
    chunk: int
    alive: tuple[int, ...]
    deferred: tuple[int, ...]
    gradients: tuple[int, ...]
    first: bool
    last: bool


def steady_count(schedule: Schedule | None, pp: int, microbatches: int) -> int:
    """A number of microbatches with the same states: the steady phase repeats. GPipe has none."""
    if schedule is None:
        return min(microbatches, 3)
    if schedule == "gpipe":
        return microbatches
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        rounds = max(1, microbatches // pp)
        return microbatches // rounds * min(rounds, 2)
    return min(microbatches, pp + 2 if schedule == "1f1b" else 2 * pp + 2)


@lru_cache(maxsize=8192)
def states(schedule: Schedule | None, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[State, ...]:
    """The backward states of a rank that no other state of it dominates."""
    count = steady_count(schedule, pp, microbatches)
    if schedule in (None, "gpipe", "1f1b"):
        # Backward k meets as many microbatches as there are left, up to what the schedule allows.
        limit = {None: 1, "gpipe": count, "1f1b": pp - rank}[schedule]
        kept = {0, min(1, count - 1), count - 1}
        return tuple(
            State("B", 0, (min(count - k, limit),), (0,), (int(k > 0),), k == 0, k == count - 1) for k in sorted(kept)
        )
    own = rank_stages(schedule, pp, chunks, rank)
    place = {stage: chunk for chunk, stage in enumerate(own)}
    alive, deferred, weights, gradients = ([0] * len(own) for _ in range(4))
    found: dict[tuple[str, int, bool], list[State]] = {}
    seen: set[tuple[object, ...]] = set()
    for stage, kind, _ in rank_actions(schedule, pp, chunks, count, rank):
        chunk = place[stage]
        if kind == "F":
            alive[chunk] += 1
            continue
        first, last = weights[chunk] == 0, weights[chunk] == count - 1
        met = (kind, chunk, tuple(alive), tuple(deferred), tuple(gradients), first, last)
        if met not in seen:
            # The steady phase meets the same again and again.
            seen.add(met)
            _keep(found.setdefault((kind, chunk, last), []), State(*met))
        if kind != "W":
            alive[chunk] -= 1
        if kind == "I":
            deferred[chunk] += 1
            continue
        deferred[chunk] -= kind == "W"
        weights[chunk] += 1
        gradients[chunk] = 1 + last
    return tuple(state for group in found.values() for state in group)


def _keep(group: list[State], new: State) -> None:
    """Adds `new` unless another of its group holds at least as much of everything; drops those it dominates.

    Gradients that are put off and gradients that are reduced cannot be compared: more of them means some against none.
    """

    def covers(a: State, b: State) -> bool:
        return (
            a.first <= b.first
            and all(map(ge, a.alive, b.alive))
            and all(map(ge, a.deferred, b.deferred))
            and (a.gradients == b.gradients or all(x == y or not y for x, y in zip(a.gradients, b.gradients)))
        )

    for old in group:
        if covers(old, new):
            return
    group[:] = [old for old in group if not covers(new, old)] + [new]

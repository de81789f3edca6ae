"""The closed form of peak memory: the largest total an update can reach, without walking it.

Only these moments can be the largest: in the backward of each distinct state of a rank's action list, the loss, the head, the
first and the last block that backward meets, and the embedding; weight gradients that were put off; the optimizer step. Each
is a sum of activations that no sharding changes (cached) and of multiples of a few sizes. `memory.timeline` walks
everything; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import inf
from operator import ge, mul
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.block_bytes import activation_key, block_bytes, loss_bytes, with_casts
from shardwright.planner.job import Job, Layout
from shardwright.planner.pipeline_states import State, states, steady_count
from shardwright.planner.program import SHARDWRIGHT, Program
from shardwright.planner.rank_bytes import (
    Rules,
    exchanged_bytes,
    holds,
    rank_elements,
    rules,
    state_bytes,
    travelling,
)
from shardwright.planner.states import Elements

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule

BLOCK, EMBEDDING, HEAD, LOSS = 0, 1, 2, 3


Units = tuple[int, int, int]
"""How many blocks, embeddings and heads."""

NONE: Units = (0, 0, 0)


Entry = tuple[int, ...]
"""One moment that can be the largest, as counts: it does not depend on any size.

Sixteen numbers: how often each of the eight `weights` counts; blocks, embeddings and heads whose gradients are put off, and
whose gradients are reduced; whether a unit's gradient and reduction input are there (0 or 1); the place, which says what is
gathered.
"""


def weights(job: Job, layout: Layout, program: Program, cast: tuple[float, float]) -> tuple[float, ...]:
    """Bytes of what `Entry.activations` counts. `cast`: of a block's and the head's weights, see `with_casts`."""
    a = with_casts(block_bytes(job, program, activation_key(layout)), layout.recompute, *cast)
    loss, kept, after = loss_bytes(job, program, a.logits, layout)
    return (a.saved, a.boundary, a.head, kept, a.deferred, a.work, loss, after)


class Holding(NamedTuple):
    """What a rank holds: blocks of each of its stages, which of them has the embedding and the head (-1: none)."""

    blocks: tuple[int, ...]
    first: int
    last: int

    def units(self, chunk: int) -> Units:
        return (self.blocks[chunk], int(chunk == self.first), int(chunk == self.last))


def _plus(a: Units, b: Units) -> Units:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def _others(h: Holding, state: State, late: bool) -> tuple[Units, Units]:
    """Gradients of the other stages: put off while these are at work, reduced once they are done (or at once)."""
    waiting = reduced = NONE
    for chunk, phase in enumerate(state.gradients):
        if phase and chunk != state.chunk:
            if late and phase == 1:
                waiting = _plus(waiting, h.units(chunk))
            else:
                reduced = _plus(reduced, h.units(chunk))
    return waiting, reduced


def _own_gradients(h: Holding, state: State, late: bool) -> tuple[tuple[Units, Units], ...]:
    """(put off, reduced) units of this stage at the loss, after the head, at the last block, and at the embedding."""
    n, embeds, head = h.units(state.chunk)
    if late and state.last and state.kind == "B":
        # The last microbatch: from put off to reduced, unit by unit.
        return (
            ((n, embeds, head), NONE),
            ((n, embeds, 0), (0, 0, head)),
            ((1, embeds, 0), (n - 1, 0, head)),
            ((0, embeds, 0), (n, 0, head)),
        )
    if state.first and state.kind == "B":
        grown: tuple[Units, ...] = (NONE, (0, 0, head), (n - 1, 0, head), (n, 0, head))
    else:
        grown = ((n, embeds, head) if state.gradients[state.chunk] else NONE,) * 4
    return tuple((one, NONE) if late else (NONE, one) for one in grown)


def _entries(h: Holding, state: State, late: bool) -> Iterator[Entry]:
    """The moments of one backward action that can be the largest."""
    chunk = state.chunk
    n, embeds, head = h.units(chunk)
    waiting, reduced = _others(h, state, late)
    flight = sum(map(mul, state.alive, h.blocks))
    heads = state.alive[h.last] if h.last >= 0 else 0
    deferred = sum(map(mul, state.deferred, h.blocks))
    boundaries, makes = sum(state.alive), state.kind == "B"
    own = _own_gradients(h, state, late)

    # This microbatch's own logits are counted by the loss once its backward has begun.
    kept_loss = heads - head * (state.kind != "W")

    def entry(at: int, saved: int, heads: int, work: int, loss: int, after: int, place: int, sends: bool) -> Entry:
        put_off, done = own[at]
        return (
            *(saved, boundaries, heads, kept_loss, deferred, work, loss, after),
            *_plus(waiting, put_off),
            *_plus(reduced, done),
            *(int(sends), place),
        )

    if state.kind == "W":
        yield entry(0, flight, heads, 0, 0, 0, BLOCK, True)
        return
    rest_heads = heads - head
    if head:
        yield entry(0, flight, heads, 0, 1, 0, LOSS, False)
        yield entry(0, flight, heads, 0, 0, 1, HEAD, makes)
    yield entry(1, flight, rest_heads, 1, 0, 0, BLOCK, makes)
    yield entry(2, flight - n + 1, rest_heads, 1, 0, 0, BLOCK, makes)
    if embeds and makes:
        yield entry(3, flight - n, rest_heads, 0, 0, 0, EMBEDDING, True)


def _fullest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries that no other one of the same place dominates."""
    kept: dict[int, list[Entry]] = {}
    for entry in sorted(set(entries), key=sum, reverse=True):
        alike = kept.setdefault(entry[-1], [])
        for old in alike:
            if all(map(ge, old, entry)):
                break
        else:
            alike.append(entry)
    return tuple(entry for alike in kept.values() for entry in alike)


@lru_cache(maxsize=8192)
def rank_entries(
    schedule: Schedule | None, pp: int, chunks: int, microbatches: int, rank: int, h: Holding, late: bool
) -> tuple[Entry, ...]:
    """Every moment that can be the fullest of a rank, whatever the sizes."""
    listed = states(schedule, pp, chunks, microbatches, rank)
    return _fullest(entry for state in listed for entry in _entries(h, state, late))


Moment = tuple[float, Units, Units, int, int]
"""An entry with its sizes: activation bytes, units whose gradients are put off and reduced, sends, place."""


class Profile(NamedTuple):
    """What one pipeline rank needs: blocks, whether it holds embedding and head, its moments."""

    blocks: int
    first: bool
    last: bool
    moments: list[Moment]


def _sized(entries: tuple[Entry, ...], weight: tuple[float, ...]) -> list[Moment]:
    """The entries in bytes."""
    return [(sum(map(mul, e, weight)), e[8:11], e[11:14], e[14], e[15]) for e in entries]  # type: ignore[misc]


class _Profiles:
    """The profiles of the ranks that can be the fullest, each made when it is first asked for."""

    def __init__(self, weight: tuple[float, ...], key: tuple[Any, ...], late: bool) -> None:
        self.made: list[Profile] = []
        self._weight, self._key, self._late = weight, key, late

    def add(self, rank: int, h: Holding) -> Profile:
        entries = rank_entries(*self._key, rank, h, self._late)
        profile = Profile(sum(h.blocks), h.first >= 0, h.last >= 0, _sized(entries, self._weight))
        self.made.append(profile)
        return profile


class PeakModel:
    """Peak memory of layouts of one job in one program. The search makes one and asks it for every layout."""

    def __init__(self, job: Job, program: Program = SHARDWRIGHT) -> None:
        self.job, self.program = job, program
        self._profiles: dict[tuple[object, ...], _Profiles] = {}
        self._held: dict[tuple[object, ...], tuple[tuple[int, Holding], ...]] = {}
        self._parts: dict[tuple[int, int, bool, bool, bool], tuple[Elements, Elements, Elements]] = {}

    def _holdings(self, layout: Layout) -> tuple[tuple[int, Holding], ...]:
        """(rank, what it holds) of the ranks that can be the fullest: of those with equally many blocks, the ends."""
        pp = layout.axes.pp
        key = (pp, layout.schedule, layout.chunks)
        found = self._held.get(key)
        if found is None:
            every = [Holding(*holds(self.job, layout, rank)) for rank in range(pp)]
            alike: dict[tuple[int, ...], list[int]] = {}
            for rank in range(1, pp - 1):
                alike.setdefault(every[rank].blocks, []).append(rank)
            ends = (0, -1) if layout.schedule in ("zero_bubble", "zbv") else (0,)
            ranks = {0, pp - 1, *(own[end] for own in alike.values() for end in ends)}
            found = self._held[key] = tuple((rank, every[rank]) for rank in sorted(ranks))
        return found

    def ranks(self, layout: Layout) -> tuple[int, ...]:
        """The pipeline ranks of which one is the fullest, whatever the sizes."""
        return tuple(rank for rank, _ in self._holdings(layout))

    def _elements(self, layout: Layout, degree: int, first: bool, last: bool) -> tuple[Elements, Elements, Elements]:
        axes = layout.axes
        key = (axes.tp, degree, first, last, axes.pp > 1)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = rank_elements(self.job, layout, degree, first, last)
        return found

    def _profiled(self, layout: Layout, late: bool, casts: bool, microbatches: int) -> Iterator[Profile]:
        """The profile of each rank that can be the fullest."""
        axes = layout.axes
        schedule = None if axes.pp == 1 else layout.schedule or "1f1b"
        count = steady_count(schedule, axes.pp, microbatches)
        key = (*activation_key(layout), axes.pp, schedule, layout.chunks, count, late, casts)
        profiles = self._profiles.get(key)
        if profiles is None:
            cast = (0.0, 0.0)
            if casts:
                parts = self._elements(layout, 1, False, True)
                width = DTYPE_BYTES[self.job.param_dtype]
                cast = (width * parts[BLOCK].whole, width * parts[HEAD].whole)
            weight = weights(self.job, layout, self.program, cast)
            profiles = _Profiles(weight, (schedule, axes.pp, layout.chunks, count), late)
            self._profiles[key] = profiles
        made = profiles.made
        for index, (rank, h) in enumerate(self._holdings(layout)):
            yield made[index] if index < len(made) else profiles.add(rank, h)

    def peak_bytes(self, layout: Layout, limit: float = inf) -> tuple[float, float]:
        """(allocated, reserved) bytes at the peak of the fullest rank; `Program.fragmentation` says what is reserved.

        As soon as a rank reserves more than `limit` bytes, what has been seen so far is returned: that is too much already.
        """
        job, program = self.job, self.program
        microbatches = layout.microbatches(job)
        rule = rules(job, layout, program, microbatches)
        temporary = 0.0 if layout.offload != "none" else program.optimizer_temporary_bytes
        extra = 1 + program.fragmentation
        allocated = reserved = 0.0
        for profile in self._profiled(layout, rule.late, rule.casts, microbatches):
            blocks = profile.blocks
            parts = self._elements(layout, rule.degree, profile.first, profile.last)
            block, embedding, head = parts
            total = blocks * block[0] + embedding[0] + head[0]
            shard = blocks * block[1] + embedding[1] + head[1]
            exchanged = exchanged_bytes(job, layout, rule, (block[0], embedding[0], head[0]))
            states = sum(state_bytes(job, layout, program, rule, total, shard, exchanged))
            most, moving = self._fullest(layout, rule, profile, parts)
            rest, step = rule.resting * shard, temporary * shard
            allocated = max(allocated, states + most, states + rest + step)
            reserved = max(reserved, states + rest + extra * max(moving, step))
            if reserved > limit:
                break
        return allocated, reserved

    def device_bytes(self, layout: Layout) -> float:
        """Device memory that the layout needs: what the allocator reserves, and the context."""
        return self.peak_bytes(layout)[1] + self.program.context_bytes

    def _fullest(
        self, layout: Layout, rule: Rules, profile: Profile, parts: tuple[Elements, Elements, Elements]
    ) -> tuple[float, float]:
        """The fullest moment of a rank without what is always there, with and without gradients at rest."""
        blocks = profile.blocks
        (block, block_shard), (embedding, embedding_shard), (head, head_shard) = parts
        gathered, sent = travelling(self.job, layout, self.program, rule, blocks, (block, embedding, head))
        late, done = rule.accumulated, rule.resting
        most = moving = 0.0
        for activations, waiting, reduced, sends, place in profile.moments:
            total = activations + gathered[place]
            if sends:
                total += sent[place]
            if late:
                total += late * (waiting[0] * block + waiting[1] * embedding + waiting[2] * head)
            if total > moving:
                moving = total
            if done:
                total += done * (reduced[0] * block_shard + reduced[1] * embedding_shard + reduced[2] * head_shard)
            if total > most:
                most = total
        return most, moving


@lru_cache(maxsize=64)
def _model(job: Job, program: Program) -> PeakModel:
    return PeakModel(job, program)


def peak_bytes(job: Job, layout: Layout, program: Program = SHARDWRIGHT) -> tuple[float, float]:
    """(allocated, reserved) bytes at the peak of the fullest rank, without walking the update."""
    return _model(job, program).peak_bytes(layout)

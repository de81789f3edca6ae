"""The time of a pipeline, by simulating its action lists: which rank waits for which, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwright.layout.pipeline_schedules import Action


class Played(NamedTuple):
    """total: seconds from the first action to the last. busy: seconds of compute of each rank."""

    total: float
    busy: tuple[float, ...]


class StageSeconds(NamedTuple):
    """One microbatch on one stage: forward, the input's gradient, the weights' gradient. B is the sum of the
    last two.
    """

    forward: float
    inputs: float
    weights: float


class Span(NamedTuple):
    """An action that pipeline rank `rank` is at from `start` to `end`, in seconds."""

    rank: int
    action: Action
    start: float
    end: float


def play(
    lists: Sequence[Sequence[Action]],
    rank_of: Callable[[int], int],
    times: Sequence[StageSeconds],
    send: float = 0.0,
    seen: list[Span] | None = None,
) -> Played:
    """Plays the lists: an action starts when its rank is free and what it needs has arrived. `seen` gets every span.

    A forward needs the forward of the stage before, a backward that of the stage after and its own forward; a
    hop between ranks takes `send` seconds beside compute. Raises `ValueError` when the lists never finish.
    """
    stages, last = len(times), len(times) - 1
    owner = [rank_of(stage) for stage in range(stages)]
    count = 1 + max((action.microbatch for own in lists for action in own), default=0)
    # What has arrived when: forwards of all stages, then gradients handed back by all stages; -1.0 is not
    # yet.
    arrived = [-1.0] * (2 * stages * count)
    gradients = stages * count
    waiting: dict[int, int] = {}
    free, busy, position = [0.0] * len(lists), [0.0] * len(lists), [0] * len(lists)
    todo = deque(range(len(lists)))
    while todo:
        rank = todo.popleft()
        own, at, now, worked = lists[rank], position[rank], free[rank], 0.0
        while at < len(own):
            stage, kind, index = own[at]
            forward, inputs, weights = times[stage]
            if kind == "W":
                if seen is not None:
                    seen.append(Span(rank, own[at], now, now + weights))
                now += weights
                worked += weights
                at += 1
                continue
            if kind == "F":
                needs, took, done = stage - 1, forward, stage * count + index
                need = needs * count + index
            else:
                # A whole backward hands its input's gradient on at its end, as torch does.
                took = inputs if kind == "I" else inputs + weights
                done = gradients + stage * count + index
                needs = stage if stage == last else stage + 1
                need = stage * count + index if stage == last else gradients + needs * count + index
            if needs >= 0:
                ready = arrived[need]
                if ready < 0.0:
                    waiting[need] = rank
                    break
                if owner[needs] != rank:
                    ready += send
                if ready > now:
                    now = ready
            if seen is not None:
                seen.append(Span(rank, own[at], now, now + took))
            now += took
            worked += took
            at += 1
            arrived[done] = now
            if done in waiting:
                todo.append(waiting.pop(done))
        position[rank], free[rank] = at, now
        busy[rank] += worked
    if any(at < len(own) for at, own in zip(position, lists)):
        raise ValueError("these action lists never finish")
    return Played(max(free), tuple(busy))

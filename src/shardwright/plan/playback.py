"""The time of a pipeline by playing its action lists: who waits for whom, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwright.layout.schedule import Action


class Played(NamedTuple):
    """total: seconds from the first action to the last. busy: seconds of compute of each rank."""

    total: float
    busy: tuple[float, ...]


class StageSeconds(NamedTuple):
    """One microbatch on one stage: forward, the input's gradient, the weights' gradient. B is the sum of the last two."""

    forward: float
    inputs: float
    weights: float


def play(
    lists: Sequence[Sequence[Action]], rank_of: Callable[[int], int], times: Sequence[StageSeconds], send: float = 0.0
) -> Played:
    """Plays the lists: an action starts when its rank is free and what it needs has arrived.

    A forward needs the forward of the stage before, a backward that of the stage after and its own forward; a hop between
    ranks takes `send` seconds beside compute. Raises `ValueError` when the lists never finish.
    """
    last = len(times) - 1
    arrived: dict[tuple[int, str, int], float] = {}
    free, busy = [0.0] * len(lists), [0.0] * len(lists)
    position = [0] * len(lists)
    waiting: dict[tuple[int, str, int], int] = {}
    todo = deque(range(len(lists)))
    seconds = [{"F": t.forward, "I": t.inputs, "W": t.weights, "B": t.inputs + t.weights} for t in times]
    while todo:
        rank = todo.popleft()
        own, at, now = lists[rank], position[rank], free[rank]
        while at < len(own):
            stage, kind, index = own[at]
            if kind == "F":
                need = None if stage == 0 else (stage - 1, "F", index)
            elif kind == "W":
                need = None
            else:
                need = (stage, "F", index) if stage == last else (stage + 1, "G", index)
            if need is not None:
                ready = arrived.get(need)
                if ready is None:
                    waiting[need] = rank
                    break
                if rank_of(need[0]) != rank:
                    ready += send
                now = max(now, ready)
            took = seconds[stage][kind]
            now += took
            busy[rank] += took
            at += 1
            if kind != "W":
                # A whole backward hands its input's gradient on at its end, as torch does.
                done = (stage, "F" if kind == "F" else "G", index)
                arrived[done] = now
                blocked = waiting.pop(done, None)
                if blocked is not None and blocked != rank:
                    todo.append(blocked)
        position[rank], free[rank] = at, now
    if any(at < len(own) for at, own in zip(position, lists)):
        raise ValueError("these action lists never finish")
    return Played(max(free), tuple(busy))

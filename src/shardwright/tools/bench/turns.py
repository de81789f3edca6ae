"""Loops that take turns, update by update, so that load on the machine meets all alike; and what their times amount to."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from shardwright.measure import clock


@dataclass(frozen=True)
class Turn:
    """One update of one loop on this rank. seconds: all of it. waited: for data. collected: in Python's garbage collection.

    busy: what this rank did itself, without waiting for others; NaN where the kernel does not tell.
    """

    seconds: float
    waited: float
    collected: float
    busy: float


def take_turns(loops: Mapping[str, Callable[[], float]], count: int, device: torch.device) -> dict[str, list[Turn]]:
    """`count` updates of each loop, in an order that is turned round each time. Collective.

    A loop does one update and returns the seconds that it waited for data. All ranks start an update together; it ends,
    for a rank, when the device has done all of it.
    """
    found: dict[str, list[Turn]] = {name: [] for name in loops}
    with _collections() as collected:
        for number in range(count):
            for name in list(loops)[:: 1 if number % 2 else -1]:
                dist.barrier()
                before, busy, start = sum(collected), clock.busy(), clock.now()
                waited = loops[name]()
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                seconds = clock.now() - start
                found[name].append(Turn(seconds, waited, sum(collected) - before, clock.busy() - busy))
    return found


@contextmanager
def _collections() -> Iterator[list[float]]:
    """Seconds of each of Python's garbage collections while the context lasts."""
    seconds, started = [], [0.0]

    def tell(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            started[0] = clock.now()
        else:
            seconds.append(clock.now() - started[0])

    gc.callbacks.append(tell)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(tell)


def of_run(turns_of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each update of a run: its slowest rank's."""
    return [max(at) for at in zip(*turns_of_ranks)]


@dataclass(frozen=True)
class Spread:
    """A distribution in a few numbers; p95 needs twenty values, quartiles four, else they are None."""

    p50: float
    p95: float | None
    most: float
    quartiles: tuple[float, float] | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        fine = quantiles(values, n=20)[18] if len(values) >= 20 else None
        cuts = quantiles(values, n=4) if len(values) >= 4 else None
        return cls(median(values), fine, max(values), (cuts[0], cuts[2]) if cuts else None, len(values))

    @property
    def half_width(self) -> float | None:
        """Half the distance between the quartiles, as a fraction of the median."""
        return None if self.quartiles is None else (self.quartiles[1] - self.quartiles[0]) / 2 / self.p50


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Speed of `mine` relative to `theirs`, from seconds: the median over neighbouring updates, which the same load has met."""
    return median(b / a for a, b in zip(mine, theirs))

"""Loops take turns, update by update, so that other load on the machine slows all loops alike; and statistics of the times."""

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
class TimedUpdate:
    """Times of one update of one loop on this rank, in seconds."""

    seconds: float
    waited: float
    """For data."""
    collected: float
    """In Python's garbage collection."""
    busy: float
    """`clock.busy`: without the waits for other ranks."""


def take_turns(
    loops: Mapping[str, Callable[[], float]], count: int, device: torch.device
) -> dict[str, list[TimedUpdate]]:
    """`count` updates of each loop, in an order that is reversed each time. Collective.

    A loop does one update and returns the seconds that it waited for data. All ranks start an update together; a rank's
    update ends when its device has finished.
    """
    found: dict[str, list[TimedUpdate]] = {name: [] for name in loops}
    with _collections() as collected:
        for number in range(count):
            for name in list(loops)[:: 1 if number % 2 else -1]:
                dist.barrier()
                before, busy, start = sum(collected), clock.busy(), clock.now()
                waited = loops[name]()
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                seconds = clock.now() - start
                found[name].append(TimedUpdate(seconds, waited, sum(collected) - before, clock.busy() - busy))
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


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of each update, the seconds of its slowest rank; `ranks` holds the seconds of each rank."""
    return [max(at) for at in zip(*ranks)]


@dataclass(frozen=True)
class Spread:
    """A distribution in a few numbers; p95 is None below twenty values, the quartiles are None below four."""

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
    """Speed of `mine` relative to `theirs`, from seconds: the median over pairs of neighbouring updates."""
    return median(b / a for a, b in zip(mine, theirs))

"""Loss spikes and slow ranks: they are reported, or stop the run; no update is changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from shardwright.errors import SpikeError

WINDOW = 64
LEAST = 16
"""Updates since the start before the first that can count as a spike."""
LOSS_DEVIATIONS = 10.0
"""A loss this many robust standard deviations (1.4826 x median absolute deviation) above the window's median is a spike."""
LOSS_FRACTION = 0.1
"""... and at least this fraction of the median above it: where losses hardly move, their deviation is near zero."""
NORM_FACTOR = 20.0
"""A gradient norm this many times the window's median is a spike."""

SLOW_FACTOR, SLOW_ENTRIES = 1.3, 5
"""A rank is called slow when its time is this many times that of the others in as many entries of the log in a row."""


class Result(Protocol):
    """What `Spikes` reads of an update: equal on every rank, so all ranks decide alike."""

    @property
    def update(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def skipped(self) -> bool: ...


class Spikes:
    """Compares each update's loss and gradient norm with those of the 64 updates before."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def look(self, result: Result) -> str:
        """The line about a spike in this update, else empty. Raises `SpikeError` where the policy is stop."""
        if self._policy == "continue" or result.skipped:
            return ""
        found = self._describe(result)
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)
        if found and self._policy == "stop":
            raise SpikeError(
                f"{found} training.on_spike is stop.",
                "The optimizer has already taken this step. No checkpoint holds the step.",
                "Look at the rows of this update. Resume from the last checkpoint with a lower learning rate or other "
                "rows, or set training.on_spike to warn.",
            )
        return found

    def _describe(self, result: Result) -> str:
        if len(self._losses) < LEAST:
            return ""
        middle, norm = median(self._losses), median(self._norms)
        deviation = 1.4826 * median(abs(loss - middle) for loss in self._losses)
        limit = middle + max(LOSS_DEVIATIONS * deviation, LOSS_FRACTION * abs(middle))
        if result.loss > limit:
            return (
                f"Update {result.update}: the loss {result.loss:.4f} is a spike: the median of the {len(self._losses)} "
                f"updates before is {middle:.4f}, and {limit:.4f} is the limit."
            )
        if result.grad_norm > NORM_FACTOR * norm > 0:
            return (
                f"Update {result.update}: the gradient norm {result.grad_norm:.4g} is {result.grad_norm / norm:.0f} times "
                f"the median {norm:.4g} of the {len(self._norms)} updates before."
            )
        return ""


def slow_rank(seconds: Sequence[float], stages: Sequence[int]) -> tuple[int, float]:
    """(rank, factor) of the rank whose time is the largest multiple of the median of the other ranks of its pipeline stage.

    seconds: each rank's own time without waiting for others; NaN where unknown. stages: the pipeline stage of each rank. The
    factor is 1 where nothing can be compared.
    """
    worst, of_stage = (0, 1.0), dict[int, list[int]]()
    for rank, stage in enumerate(stages):
        of_stage.setdefault(stage, []).append(rank)
    for ranks in of_stage.values():
        if len(ranks) < 2 or not all(math.isfinite(seconds[rank]) for rank in ranks):
            continue
        slowest = max(ranks, key=seconds.__getitem__)
        middle = median(seconds[rank] for rank in ranks if rank != slowest)
        if middle > 0:
            worst = max(worst, (slowest, seconds[slowest] / middle), key=lambda pair: pair[1])
    return worst


class SlowRanks:
    """Reports a rank that has been slow for `SLOW_ENTRIES` entries in a row."""

    def __init__(self) -> None:
        self._rank, self._entries = -1, 0

    def look(self, rank: float | int | None, factor: float | int | None) -> str:
        """The line after an entry whose slowest rank is `rank`, else empty."""
        if rank is None or factor is None or factor < SLOW_FACTOR:
            self._entries = 0
            return ""
        self._entries = self._entries + 1 if rank == self._rank else 1
        self._rank = int(rank)
        if self._entries != SLOW_ENTRIES:
            return ""
        return (
            f"Rank {rank} is slow: its own work of an update takes {factor:.2f} times as long as that of other ranks."
        )

"""Which checkpoints stay: the newest, every N updates, the best by evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """newest: how many of the newest stay (None: all). every: those of each N updates stay. best: the best one does."""

    newest: int | None = None
    every: int | None = None
    best: bool = False


def surplus(updates: Sequence[int], newest: int, losses: Mapping[int, float], retention: Retention) -> list[int]:
    """The updates whose checkpoints go, after the one of `newest` was written.

    Those that are ahead of it (after a fall back to an older one) neither count nor go.
    """
    done = sorted(update for update in updates if update <= newest)
    if retention.newest is None:
        return []
    kept = set(done[-retention.newest :])
    if retention.every:
        kept |= {update for update in done if update % retention.every == 0}
    if retention.best and (best := best_of(losses, newest)) is not None:
        kept.add(best)
    return [update for update in done if update not in kept]


def best_of(losses: Mapping[int, float], newest: int) -> int | None:
    """The update up to `newest` with the lowest loss, the earliest of equals; None where none was evaluated."""
    known = {update: loss for update, loss in losses.items() if update <= newest}
    return min(known, key=lambda update: (known[update], update)) if known else None

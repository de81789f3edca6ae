"""From measured seconds to the constants of a hardware file. Pure arithmetic; the laws are those of `plan/`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

GRID = 24
"""Values of each constant that are tried, spread evenly in their logarithm."""


@dataclass(frozen=True)
class Product:
    """M x K times K x N took so many seconds."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Products:
    """peak, in FLOP/s, at unlimited size; wave and depth as in `plan.device.Efficiency`. off: the worst ratio of the fit."""

    peak: float
    wave: float
    depth: float
    off: float


def fit_products(measured: Sequence[Product]) -> Products:
    """The law peak x MN / (MN + wave) x K / (K + depth) that is nearest to the rates, by the median of their ratios."""
    best: tuple[float, Products] | None = None
    for wave in _grid(1, 1e7):
        for depth in _grid(1, 2048):
            shapes = [p.m * p.n / (p.m * p.n + wave) * p.k / (p.k + depth) for p in measured]
            peak = math.exp(sum(math.log(p.rate / s) for p, s in zip(measured, shapes)) / len(measured))
            errors = [abs(math.log(p.rate / (peak * s))) for p, s in zip(measured, shapes)]
            score = sum(e * e for e in errors)
            if best is None or score < best[0]:
                best = (score, Products(peak, wave, depth, math.exp(max(errors))))
    assert best is not None
    return best[1]


def _grid(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / (GRID - 1)) for i in range(GRID)]


@dataclass(frozen=True)
class Transfer:
    """A collective took so many seconds, in which a rank made `steps` steps and sent `sent_bytes`."""

    collective: str
    steps: int
    sent_bytes: float
    payload_bytes: int
    seconds: float


@dataclass(frozen=True)
class Link:
    """alpha: seconds of a step. beta: seconds of a byte."""

    alpha: float
    beta: float

    @property
    def bandwidth(self) -> float:
        return 1 / self.beta

    def seconds(self, transfer: Transfer) -> float:
        return transfer.steps * self.alpha + transfer.sent_bytes * self.beta


def fit_link(measured: Sequence[Transfer]) -> Link:
    """The latency of the smallest payload, the median, and the best rate of the larger half, each with the other one taken off.

    The best: one collective alone leaves gaps on a link that several in turn fill, as in a training step.
    """
    sizes = sorted({t.payload_bytes for t in measured})
    small = [t for t in measured if t.payload_bytes == sizes[0]]
    large = [t for t in measured if t.payload_bytes >= sizes[len(sizes) // 2]]
    alpha = beta = 0.0
    for _ in range(20):
        beta = min(max(t.seconds - t.steps * alpha, 0.01 * t.seconds) / t.sent_bytes for t in large)
        alpha = median(max(t.seconds - t.sent_bytes * beta, 0.01 * t.seconds) / t.steps for t in small)
    return Link(alpha, beta)

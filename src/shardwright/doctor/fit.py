"""From measured seconds to the constants of a hardware file. Pure arithmetic; the laws are those of `plan/`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """A collective took so many seconds, in which a rank made `steps` steps and sent `sent_bytes`.

    processor: seconds that the rank's threads ran meanwhile.
    """

    collective: str
    steps: int
    sent_bytes: float
    payload_bytes: int
    seconds: float
    processor: float = 0.0


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
    """The line steps x alpha + bytes x beta with the least sum of squared relative errors; neither is negative."""
    aa = sum((t.steps / t.seconds) ** 2 for t in measured)
    bb = sum((t.sent_bytes / t.seconds) ** 2 for t in measured)
    ab = sum(t.steps * t.sent_bytes / t.seconds**2 for t in measured)
    a1 = sum(t.steps / t.seconds for t in measured)
    b1 = sum(t.sent_bytes / t.seconds for t in measured)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha > 0 and beta > 0:
            return Link(alpha, beta)
    few = min(measured, key=lambda t: t.sent_bytes)
    much = max(measured, key=lambda t: t.sent_bytes)
    return Link(few.seconds / few.steps, much.seconds / much.sent_bytes)


def fit_load(measured: Sequence[Transfer]) -> float:
    """Core seconds of a rank for each second of a transfer: what sockets and sums take from the core that computes.

    Of the larger half of the transfers, by bytes.
    """
    much = sorted(measured, key=lambda t: t.sent_bytes)[len(measured) // 2 :]
    return min(sum(t.processor for t in much) / sum(t.seconds for t in much), 1.0)

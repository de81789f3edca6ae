"""What the doctor measures, and the constants fitted to it. Pure arithmetic; the laws are those of `planner/kernels.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

GRID = 24
"""Number of values of each constant that are tried, evenly spaced in their logarithm."""


@dataclass(frozen=True)
class Product:
    """A matrix product M x K times K x N, and its seconds."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Products:
    """The law of matrix products: peak x MN / (MN + wave) x K / (K + depth)."""

    peak: float
    """FLOP/s at unlimited size."""
    wave: float
    depth: float
    off: float
    """Worst ratio of measurement and fit."""

    def share(self, m: int, n: int, k: int) -> float:
        """The share of the peak that a product of this size reaches."""
        return m * n / (m * n + self.wave) * k / (k + self.depth)


def fit_products(measured: Sequence[Product]) -> Products:
    """The law that is nearest to the rates: least squares of the logarithms of their ratios."""

    def fitted(wave: float, depth: float) -> tuple[float, Products]:
        law = Products(1.0, wave, depth, 1.0)
        ratios = [math.log(p.rate / law.share(p.m, p.n, p.k)) for p in measured]
        peak = sum(ratios) / len(ratios)
        errors = [abs(ratio - peak) for ratio in ratios]
        return sum(e * e for e in errors), Products(math.exp(peak), wave, depth, math.exp(max(errors)))

    found = (fitted(wave, depth) for wave in _grid(1, 1e7) for depth in _grid(1, 2048))
    return min(found, key=lambda pair: pair[0])[1]


def _grid(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / (GRID - 1)) for i in range(GRID)]


@dataclass(frozen=True)
class Transfer:
    """A collective in which a rank makes `steps` steps and sends `sent_bytes`, and its seconds."""

    collective: str
    steps: int
    sent_bytes: float
    payload_bytes: int
    seconds: float


@dataclass(frozen=True)
class Link:
    """Seconds of a step (alpha) and of a byte (beta)."""

    alpha: float
    beta: float

    @property
    def bandwidth(self) -> float:
        return 1 / self.beta

    def seconds(self, transfer: Transfer) -> float:
        return transfer.steps * self.alpha + transfer.sent_bytes * self.beta


def fit_link(measured: Sequence[Transfer]) -> Link:
    """Latency: the median of the smallest payload. Rate: the best of the larger half. Each with the other's share subtracted.

    The best rate, because a single collective leaves gaps on a link; the collectives of a training step fill the gaps.
    """
    sizes = sorted({t.payload_bytes for t in measured})
    small = [t for t in measured if t.payload_bytes == sizes[0]]
    large = [t for t in measured if t.payload_bytes >= sizes[len(sizes) // 2]]
    alpha = beta = 0.0
    for _ in range(20):
        beta = min(max(t.seconds - t.steps * alpha, 0.01 * t.seconds) / t.sent_bytes for t in large)
        alpha = median(max(t.seconds - t.sent_bytes * beta, 0.01 * t.seconds) / t.steps for t in small)
    return Link(alpha, beta)


@dataclass(frozen=True)
class Block:
    """`count` blocks of a model without attention: tokens, hidden width, inner width of the MLP."""

    tokens: int
    hidden: int
    inner: int
    count: int

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Of q, k, v and o, and of gate, up and down, out x in."""
        d, f = self.hidden, self.inner
        return [(d, d)] * 4 + [(f, d)] * 2 + [(d, f)]

    @property
    def elements(self) -> int:
        """Elements that the element-wise kernels read and write: norms (square, mean, product: 6 each), two sums of three and
        two residual sums (3 each) over the hidden width, SiLU and product (5) over the inner; backward twice as many.
        """
        return 3 * self.count * self.tokens * (24 * self.hidden + 5 * self.inner)


BLOCK = {"cpu": Block(1024, 512, 1408, 4), "cuda": Block(8192, 4096, 14336, 2)}
"""What `rank.blocks` measures."""


@dataclass(frozen=True)
class Measured:
    """Measurements of the slowest rank, while all ranks work at once."""

    device: str
    name: str
    backend: str
    ranks: int
    threads: int
    """Of a rank."""
    memory_bytes: int
    """Of a rank."""
    products: dict[str, list[Product]]
    """By dtype."""
    copy_bandwidth: float
    """Bytes/s that element-wise kernels read and write."""
    attention_seconds: tuple[float, float]
    """Forward, backward."""
    attention_flops: float
    """Of the forward pass."""
    transfers: list[Transfer]
    blocks: dict[str, float]
    """Seconds of forward and backward of `BLOCK`, by dtype."""
    load: float = 0.0
    """Seconds of compute that are lost in each second of a concurrent collective."""

"""What a rank of the doctor measures, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.tools.doctor.fit import Product, Transfer


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
        """Elements that its element-wise kernels read and write, forward and backward: norms (square, mean, product: 6 each),
        two sums of three and two residual sums (3 each) over the hidden width, SiLU and product (5) over the inner; twice
        that in backward.
        """
        return 3 * self.count * self.tokens * (24 * self.hidden + 5 * self.inner)


BLOCK = {"cpu": Block(1024, 512, 1408, 4), "cuda": Block(8192, 4096, 14336, 2)}
"""What `rank.blocks` measures."""


@dataclass(frozen=True)
class Measured:
    """Of the slowest rank, all ranks at work at once.

    products: dtype -> matrix products. copy_bandwidth: bytes/s that element-wise kernels read and write. attention: fraction of
    the peak that fused attention reaches in (forward, backward). transfers: collectives. blocks: seconds of
    forward and backward of `Block`, by dtype. load: seconds of compute that are lost
    for each second of a collective beside it.
    """

    device: str
    name: str
    backend: str
    ranks: int
    threads: int
    memory_bytes: int
    products: dict[str, list[Product]]
    copy_bandwidth: float
    attention_seconds: tuple[float, float]
    attention_flops: float
    transfers: list[Transfer]
    blocks: dict[str, float]
    load: float = 0.0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        products = {dtype: [Product(**p) for p in found] for dtype, found in data["products"].items()}
        transfers = [Transfer(**t) for t in data["transfers"]]
        attention = (data["attention_seconds"][0], data["attention_seconds"][1])
        return cls(**{**data, "products": products, "transfers": transfers, "attention_seconds": attention})

"""What a rank of the doctor measures, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.doctor.fit import Product, Transfer


@dataclass(frozen=True)
class Measured:
    """Of the slowest rank, all ranks at work at once.

    products: dtype -> matrix products. copy_bandwidth: bytes/s that element-wise kernels read and write. attention: fraction of
    the peak that fused attention reaches in (forward, backward). transfers: collectives. load: seconds of compute that are lost
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
    load: float = 0.0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        products = {dtype: [Product(**p) for p in found] for dtype, found in data["products"].items()}
        transfers = [Transfer(**t) for t in data["transfers"]]
        attention = (data["attention_seconds"][0], data["attention_seconds"][1])
        return cls(**{**data, "products": products, "transfers": transfers, "attention_seconds": attention})

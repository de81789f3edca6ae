"""The hardware file of a measured machine, for `plan --device FILE` and `bench --device FILE`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from shardwright.planner.kernels import HEAD_RAMP
from shardwright.tools.doctor.fit import BLOCK, Block, Link, Measured, Products, fit_link, fit_products

RAMP = 16
"""Number of keys at which attention reaches half its rate: the catalogue's value for a CPU."""


@dataclass(frozen=True)
class Constants:
    """The fitted constants: matrix products by dtype, the link between ranks (None for one rank)."""

    products: dict[str, Products]
    link: Link | None


def fitted(measured: Measured) -> Constants:
    """The constants of a machine."""
    products = {dtype: fit_products(found) for dtype, found in measured.products.items()}
    return Constants(products, fit_link(measured.transfers) if measured.transfers else None)


def hardware(measured: Measured, constants: Constants, date: str) -> dict[str, Any]:
    """The keys of a hardware file. Rates are of one rank while all ranks work; `efficiency.matmul` is the share of a product's
    rate that remains in a training step.

    The doctor measures the ranks of one machine, so links and network get the same values.
    """
    main = "bf16" if measured.device == "cuda" else "fp32"
    product = constants.products[main]
    forward, backward = measured.attention_seconds
    shape = measured_head_shape()
    kept = kept_in_steps(measured, constants)
    link = constants.link or Link(1e-4, 1e-9)
    return {
        "name": f"{measured.name} x {measured.ranks}".lower().replace(" ", "-"),
        "kind": measured.device,
        "source": f"shardwright doctor, {date}, {measured.ranks} ranks with {measured.threads} threads",
        "memory_bytes": measured.memory_bytes,
        "memory_bandwidth": measured.copy_bandwidth,
        "peak_flops": {dtype: found.peak for dtype, found in constants.products.items()},
        "matmul_measured": max(p.rate for p in measured.products[main]),
        "host_bandwidth": measured.copy_bandwidth,
        "node": {
            "devices": measured.ranks,
            "link_bandwidth": link.bandwidth,
            "network_bandwidth": link.bandwidth,
            "link_latency": link.alpha,
            "network_latency": link.alpha,
            **({"transfer_load": measured.load} if measured.load > 0 else {}),
        },
        "efficiency": {
            "matmul": kept[main],
            "matmul_16bit": kept["bf16"] / kept[main],
            "wave": product.wave,
            "depth": product.depth,
            "attention_forward": measured.attention_flops / forward / product.peak / shape,
            "attention_backward": 2.5 * measured.attention_flops / backward / product.peak / shape,
            "attention_ramp": RAMP,
            "attention_peak": product.peak,
            "bandwidth": 1.0,
            "link": 1.0,
            "network": 1.0,
        },
    }


def kept_in_steps(measured: Measured, constants: Constants) -> dict[str, float]:
    """`in_a_step` by dtype. A CPU's element-wise kernels take as long for two bytes as for four."""
    block, narrow = BLOCK[measured.device], 4 if measured.device == "cpu" else 2
    return {
        dtype: in_a_step(
            constants.products[dtype], block, seconds, 4 if dtype == "fp32" else narrow, measured.copy_bandwidth
        )
        for dtype, seconds in measured.blocks.items()
    }


def in_a_step(product: Products, block: Block, seconds: float, width: int, bandwidth: float) -> float:
    """Share of the speed of products alone that remains in a training step, where other kernels use the caches in between.

    seconds: of forward and backward of `block`. width: bytes of an element. bandwidth: of element-wise kernels, bytes/s.
    """
    alone = 0.0
    for n, k in block.weights:
        for size in ((block.tokens, n, k), (block.tokens, k, n), (n, k, block.tokens)):
            alone += 2.0 * math.prod(size) / (product.peak * product.share(*size))
    left = seconds - block.elements * width / bandwidth
    return min(1.0, block.count * alone / max(left, 0.5 * seconds))


def measured_head_shape(head_dim: int = 64, keys: int = 512) -> float:
    """The planner's factor for attention's rate at the measured head width and length."""
    return (head_dim / (head_dim + HEAD_RAMP)) * ((128 + HEAD_RAMP) / 128) * (keys / (keys + RAMP))


def to_yaml(values: dict[str, Any]) -> str:
    """The file's text; numbers to four digits."""
    return yaml.safe_dump(_rounded(values), sort_keys=False, width=110)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value

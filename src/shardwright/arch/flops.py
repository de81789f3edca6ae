"""FLOPs of one update.

A multiply-add is 2 FLOPs. Backward costs twice the forward. The output head is a matrix product, tied or not; the input
embedding is a lookup and costs none. Attention's two products have query heads, whatever the number of KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardwright.arch.parameters import block_products, matmuls
from shardwright.arch.shape import Shape

FORWARD_AND_BACKWARD = 3
UTILISATION = (
    "MFU counts the FLOPs of the model's matrix products, forward and backward: the blocks, the output head, and attention "
    "over all keys of a token's own row or document, not halved for the causal mask. The embedding is a lookup: no FLOPs. "
    "HFU adds the FLOPs of recomputation. Both are shares of the peak of all devices together."
)
"""What MFU and HFU mean wherever they are shown."""


@lru_cache(maxsize=256)
def block_matmul_weights(shape: Shape) -> float:
    """Weights of one block that multiply every token; in a model that was counted, the mean over its blocks."""
    if shape.counted:
        return (shape.counted.products - head_matmul_weights(shape)) / shape.layers
    return sum(product.fan_in * product.fan_out for product in matmuls(shape))


def head_matmul_weights(shape: Shape) -> int:
    """Weights of the output head, also when it is the embedding."""
    return shape.vocab * shape.hidden


def visible_keys(length: float, window: int | None, causal: bool) -> float:
    """Keys that a query multiplies, on average: `length`, half of it when causal, fewer under a window.

    The causal count is length / 2 (not (length + 1) / 2), the convention of FlashAttention and Megatron-LM.
    """
    if window is None or window >= length:
        return length / 2 if causal else float(length)
    return window - window**2 / (2 * length) if causal else float(window)


@lru_cache(maxsize=4096)
def attention_keys(shape: Shape, length: float, causal: bool) -> float:
    """Visible keys summed over all layers."""
    whole = shape.layers - shape.window_layers
    return whole * visible_keys(length, None, causal) + shape.window_layers * visible_keys(length, shape.window, causal)


def attention_forward_flops(shape: Shape, length: float, causal: bool) -> float:
    """FLOPs of QK^T and of the product with V, per token over all layers, forward only."""
    return 4 * shape.attention_width * attention_keys(shape, length, causal)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token of forward and backward, without recomputation."""

    blocks: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.blocks + self.attention + self.head


def model_flops(shape: Shape, length: float, causal: bool = False) -> ModelFlops:
    """FLOPs per token at rows of `length` tokens, the numerator of MFU; `causal` counts only visible keys."""
    return ModelFlops(
        blocks=2.0 * FORWARD_AND_BACKWARD * shape.layers * block_matmul_weights(shape),
        attention=FORWARD_AND_BACKWARD * attention_forward_flops(shape, length, causal),
        head=2.0 * FORWARD_AND_BACKWARD * head_matmul_weights(shape),
    )


def recompute_flops(shape: Shape, length: float, mode: str, causal: bool = False) -> float:
    """FLOPs per token of recomputation, which HFU counts and MFU does not.

    mode: `none`; `selective`: attention's core again (matrix products are kept); `alternate`: every second product besides,
    but for the last of a block, which nothing needs; `full`: every block's forward again.
    """
    attention = attention_forward_flops(shape, length, causal)
    if mode == "none":
        return 0.0
    if mode == "selective":
        return attention
    if mode == "alternate":
        again = sum(fan_in * fan_out for fan_in, fan_out, _ in block_products(shape)[1:-1:2])
        return 2.0 * shape.layers * again + recompute_flops(shape, length, "selective", causal)
    if mode == "full":
        return 2.0 * shape.layers * block_matmul_weights(shape) + attention
    raise ValueError(f"no recomputation mode {mode!r}")


def document_flops(
    shape: Shape, documents: Mapping[int, int], mode: str = "none", causal: bool = False
) -> tuple[float, float]:
    """(FLOPs of forward and backward, of recomputation) of documents: {tokens: how many of that length}.

    A token multiplies the keys of its own document, whatever else stands in its row.
    """
    useful = sum(count * n * model_flops(shape, n, causal).total for n, count in documents.items())
    again = sum(count * n * recompute_flops(shape, n, mode, causal) for n, count in documents.items())
    return useful, again


def utilisation(flops_per_token: float, tokens_per_second: float, devices: int, peak_flops_per_second: float) -> float:
    """Share of the peak of ALL devices: flops per token x tokens per second of all devices / (devices x peak)."""
    return flops_per_token * tokens_per_second / (devices * peak_flops_per_second)

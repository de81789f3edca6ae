"""What decides a decoder-only model's parameters, activations and FLOPs, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Part = Literal["embedding", "positions", "attention", "mlp", "norm", "head"]
Split = Literal["column", "row", "vocabulary"]


@dataclass(frozen=True)
class Group:
    """Parameters that are alike: one name pattern, one size.

    name: fully qualified, `{}` where the block's number stands. count: how many there are (layers, or 1).
    split: how tensor parallelism cuts it: `column` (output dim), `row` (input dim), `vocabulary` (rows of the embedding
    or head), None: every tensor-parallel rank holds all of it. split_units: the whole pieces along that dim (heads for
    attention, so that no head is cut).
    """

    name: str
    size: tuple[int, ...]
    count: int
    part: Part
    split: Split | None = None
    split_units: int = 0

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return prod(self.size)


@dataclass(frozen=True)
class Counted:
    """What was counted of a model that was built, in place of what follows from a family.

    groups: its parameters. products: weights that multiply every token, the head's among them. attention_width: of queries
    and values, the mean of both, summed over the layers.
    """

    groups: tuple[Group, ...]
    products: float
    attention_width: float


@dataclass(frozen=True)
class Shape:
    """What decides a decoder-only model's parameters, activations and FLOPs.

    ffn is the inner width of the MLP; gated: two matrices go up (gate and up). vocab is the number of rows of the
    embedding as stored. learned_positions is the number of rows of the position table, 0 with rotary or ALiBi.
    window: keys that a windowed layer sees; window_layers: how many layers are windowed. counted: of a model that was built
    for it.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    norm_bias: bool = False
    norms_per_block: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: int = 0
    window: int | None = None
    window_layers: int = 0
    parallel_block: bool = False
    max_positions: int = 0
    name: str = ""
    counted: Counted | None = None

    @property
    def query_width(self) -> int:
        """heads x head_dim: the width of the attention's output, which need not be `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """kv_heads x head_dim: the width of K, and of V."""
        return self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> float:
        """What a key costs a token in a layer, in multiply-adds for each of attention's two products."""
        return self.counted.attention_width / self.layers if self.counted else self.query_width


@dataclass(frozen=True)
class Matmul:
    """One matrix product of a block or the head: tokens x fan_in times fan_in x fan_out."""

    name: str
    fan_in: int
    fan_out: int
    split: Split

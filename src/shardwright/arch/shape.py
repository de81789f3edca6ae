"""The sizes that decide a decoder-only model's parameters, activations and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwright.errors import ConfigError

Part = Literal["embedding", "positions", "attention", "mlp", "norm", "head"]
Split = Literal["column", "row", "vocabulary"]
"""The dim that tensor parallelism cuts: the output dim, the input dim, or the rows of embedding and head."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one name pattern and one size."""

    name: str  # fully qualified; `{}` stands for the number of the block
    size: tuple[int, ...]
    count: int  # how many parameters: the number of layers, or 1
    part: Part
    split: Split | None = None  # None: every tensor-parallel rank holds the whole parameter
    split_units: int = 0  # pieces along the split dim that stay whole: heads in attention, so that no head is cut

    @property
    def numel(self) -> int:
        """Elements of one parameter of the group."""
        return prod(self.size)


@dataclass(frozen=True)
class Counted:
    """Counts of a model that was built, in place of those that follow from a family."""

    groups: tuple[ParameterGroup, ...]
    products: float  # weights that multiply every token, the head's among them
    attention_width: float  # mean width of queries and values, summed over the layers


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model."""

    family: str  # a name of `families.FAMILIES`
    layers: int
    hidden: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    ffn: int  # inner width of the MLP
    vocab: int  # rows of the embedding as stored
    gated: bool = True  # two matrices go up: gate and up
    tied: bool = False  # the output head is the embedding
    norm_bias: bool = False
    norms_per_block: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: int = 0  # rows of the position table; 0 with rotary or ALiBi
    window: int | None = None  # keys that a layer with sliding window sees
    window_layers: int = 0  # layers with sliding window
    parallel_block: bool = False  # attention and MLP read the same input
    max_positions: int = 0  # 0: not known
    name: str = ""
    counted: Counted | None = None  # of a model that was built in order to be counted

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
        """Multiply-adds that a token spends on a key in a layer, for each of attention's two products."""
        return self.counted.attention_width / self.layers if self.counted else self.query_width


@dataclass(frozen=True)
class Matmul:
    """One matrix product of a block or the head: tokens x fan_in times fan_in x fan_out."""

    name: str
    fan_in: int
    fan_out: int
    split: Split


def generic_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = False,
    tied: bool = True,
    biases: bool = True,
    learned_positions: int = 0,
    name: str = "",
) -> Shape:
    """A GPT of these sizes: pre-norm blocks of attention and MLP; ffn defaults to 4 x hidden, head_dim to hidden / heads."""
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"hidden = {hidden} is not divisible by heads = {heads}.",
            "All heads are equally wide.",
            "Change one of the two.",
        )
    return Shape(
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn or 4 * hidden,
        vocab=vocab,
        gated=gated,
        tied=tied,
        norm_bias=biases,
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=biases,
        learned_positions=learned_positions,
        max_positions=learned_positions,
        name=name,
    )

"""Every parameter of a model by name and size, and its matrix products, from its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwright.arch.families import Family, family_of
from shardwright.arch.shape import Matmul, ParameterGroup, Part, Shape, Split


def _norm(name: str, width: int, bias: bool, count: int) -> Iterator[ParameterGroup]:
    yield ParameterGroup(f"{name}.weight", (width,), count, "norm")
    if bias:
        yield ParameterGroup(f"{name}.bias", (width,), count, "norm")


def _block(s: Shape, family: Family) -> Iterator[ParameterGroup]:
    def linear(
        name: str, fan_in: int, fan_out: int, bias: bool, part: Part, split: Split, units: int
    ) -> Iterator[ParameterGroup]:
        size = (fan_in, fan_out) if family.transposed_weights else (fan_out, fan_in)
        yield ParameterGroup(f"{family.block}.{name}.weight", size, s.layers, part, split, units)
        if bias:
            # The bias of a row-parallel product is added once, after the sum: every rank holds it.
            cut = None if split == "row" else split
            yield ParameterGroup(f"{family.block}.{name}.bias", (fan_out,), s.layers, part, cut, units)

    for name in family.norms:
        yield from _norm(f"{family.block}.{name}", s.hidden, s.norm_bias, s.layers)
    widths: tuple[int, ...] = (s.query_width, s.kv_width, s.kv_width)
    pieces: tuple[int, ...] = (s.heads, s.kv_heads, s.kv_heads)
    if len(family.qkv) == 1:
        widths, pieces = (sum(widths),), (s.kv_heads,)
    for name, width, units in zip(family.qkv, widths, pieces):
        yield from linear(name, s.hidden, width, s.qkv_bias, "attention", "column", units)
    for name in family.qk_norms if s.qk_norm else ():
        yield from _norm(f"{family.block}.{name}", s.head_dim, s.norm_bias, s.layers)
    yield from linear(family.out, s.query_width, s.hidden, s.out_bias, "attention", "row", s.heads)
    for name in family.up:
        width = 2 * s.ffn if s.gated and len(family.up) == 1 else s.ffn
        yield from linear(name, s.hidden, width, s.mlp_bias, "mlp", "column", s.ffn)
    yield from linear(family.down, s.ffn, s.hidden, s.mlp_bias, "mlp", "row", s.ffn)


@lru_cache(maxsize=256)
def parameters(shape: Shape) -> tuple[ParameterGroup, ...]:
    """Every parameter of the model; the same parameter of all blocks is one group. A tied head is not listed again.

    Names and sizes equal those of the Transformers model.
    """
    if shape.counted is not None:
        return shape.counted.groups
    s, family, table = shape, family_of(shape.family), (shape.vocab, shape.hidden)
    groups = [ParameterGroup(f"{family.embedding}.weight", table, 1, "embedding", "vocabulary", s.vocab)]
    if s.learned_positions:
        groups.append(ParameterGroup(f"{family.positions}.weight", (s.learned_positions, s.hidden), 1, "positions"))
    groups += _block(s, family)
    groups += _norm(family.final_norm, s.hidden, s.norm_bias, 1)
    if not s.tied:
        groups.append(ParameterGroup(f"{family.head}.weight", table, 1, "head", "vocabulary", s.vocab))
    if s.head_bias:
        groups.append(ParameterGroup(f"{family.head}.bias", (s.vocab,), 1, "head", "vocabulary", s.vocab))
    return tuple(groups)


def named_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """{fully qualified name: size} of every parameter, blocks written out."""
    return {group.name.format(index): group.size for group in parameters(shape) for index in range(group.count)}


@dataclass(frozen=True)
class Counts:
    """Elements of a model's parameters, by place."""

    embedding: int
    positions: int
    block_split: int  # of one block: the elements that tensor parallelism divides
    block_whole: int  # of one block: the elements that every tensor-parallel rank holds
    final_norm: int
    head: int  # 0 where the head is tied to the embedding
    total: int

    @property
    def block(self) -> int:
        return self.block_split + self.block_whole


@lru_cache(maxsize=256)
def counts(shape: Shape) -> Counts:
    """Elements of the model's parameters; `total` counts a tied matrix once."""
    place = dict.fromkeys(("embedding", "positions", "block_split", "block_whole", "final_norm", "head"), 0)
    block = family_of(shape.family).block + "."
    for group in parameters(shape):
        if group.name.startswith(block):
            place["block_split" if group.split else "block_whole"] += group.numel
        elif group.part == "norm":
            place["final_norm"] += group.numel
        else:
            place[group.part] += group.numel
    total = sum(group.numel * group.count for group in parameters(shape))
    return Counts(**place, total=total)


@lru_cache(maxsize=256)
def matrix_weights(shape: Shape) -> tuple[int, int]:
    """(matrix elements of a block, of the head): the weights that multiply every token. A tied head counts too."""
    block = family_of(shape.family).block + "."
    inside = [g for g in parameters(shape) if g.name.startswith(block) and len(g.size) > 1]
    return sum(g.numel * g.count for g in inside) // shape.layers, shape.vocab * shape.hidden


@lru_cache(maxsize=256)
def block_products(shape: Shape) -> tuple[tuple[int, int, Split | None], ...]:
    """(fan in, fan out, how tensor parallelism splits it) of the weight products of one block, in the order of forward.

    Projections that one parameter holds are one product. Of a model that was counted, the products of `matmuls`.
    """
    family = family_of(shape.family)
    if shape.counted is not None:
        return tuple((m.fan_in, m.fan_out, m.split) for m in matmuls(shape))
    inside = [g for g in parameters(shape) if g.name.startswith(family.block + ".") and len(g.size) == 2]
    first, second = (0, 1) if family.transposed_weights else (1, 0)
    return tuple((g.size[first], g.size[second], g.split) for g in inside)


@lru_cache(maxsize=256)
def matmuls(shape: Shape) -> tuple[Matmul, ...]:
    """The weight products of one block, each on all tokens; attention's own two products are not here."""
    s = shape
    qkv = s.query_width + 2 * s.kv_width
    return (
        Matmul("qkv", s.hidden, qkv, "column"),
        Matmul("out", s.query_width, s.hidden, "row"),
        Matmul("up", s.hidden, (2 if s.gated else 1) * s.ffn, "column"),
        Matmul("down", s.ffn, s.hidden, "row"),
    )

"""Bytes of parameters, gradients and optimizer states on one rank, while nothing runs.

Two accounts: the ideal one of the ZeRO paper (P parameters over N ranks), and the exact one (every parameter divided by tp and
by the sharding degree along its first dim, rounded up, as `fully_shard` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.arch.shape import ParameterGroup, Shape
from shardwright.layout.zero import STAGES


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's model states."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def ideal_states(
    parameter_count: float,
    data_parallel: str,
    degree: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> StateBytes:
    """Model states per rank by the ZeRO paper's account: each kind divides what `layout/zero.py` says by `degree`.

    The defaults are mixed-precision Adam: 2 + 2 + 12 bytes per parameter (Rajbhandari et al. 2019, section 3.1).
    """
    stage = STAGES[data_parallel]

    def part(size: float, sharded: bool) -> float:
        return parameter_count * size / (degree if sharded else 1)

    return StateBytes(
        part(parameter_bytes, stage.shards_parameters),
        part(gradient_bytes, stage.shards_gradients),
        part(optimizer_bytes, stage.shards_optimizer),
    )


class Elements(NamedTuple):
    """Elements of one part of the model on one rank: `whole` after tensor parallelism, `shard` after sharding too."""

    whole: int
    shard: int


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def split_dim(group: ParameterGroup, tp: int, in_first: bool) -> int | None:
    """The dim along which tensor parallelism cuts a parameter, None where every rank holds all of it."""
    if group.split is None or tp == 1:
        return None
    if len(group.size) == 1:
        return 0
    rows = group.split != "row"
    return 0 if rows != (in_first and group.split != "vocabulary") else 1


def local_size(group: ParameterGroup, tp: int, in_first: bool) -> tuple[int, ...]:
    """The size of one parameter on one tensor-parallel rank, rounded up."""
    dim = split_dim(group, tp, in_first)
    return tuple(_ceil(size, tp) if axis == dim else size for axis, size in enumerate(group.size))


@dataclass(frozen=True)
class LocalElements:
    """Elements on one rank of a block, of the embedding (with positions), and of final norm and head.

    matrix: of the largest parameter of a block.
    """

    block: Elements
    embedding: Elements
    head: Elements
    matrix: int


@lru_cache(maxsize=4096)
def local_elements(shape: Shape, tp: int, degree: int) -> LocalElements:
    """Elements by part, at `tp` and a sharding `degree` along the first dim.

    A tied head is the embedding: under a pipeline the last stage holds a copy, which the caller adds.
    """
    family = family_of(shape.family)
    matrix = 0
    sums = {"block": [0, 0], "embedding": [0, 0], "head": [0, 0]}
    for group in parameters(shape):
        size = local_size(group, tp, family.transposed_weights)
        if group.name.startswith(family.block + "."):
            part, matrix = "block", max(matrix, prod(size))
        else:
            part = "embedding" if group.part in ("embedding", "positions") else "head"
        sums[part][0] += prod(size)
        sums[part][1] += _ceil(size[0], degree) * prod(size[1:])
    block, embedding, head = (Elements(*sums[part]) for part in ("block", "embedding", "head"))
    return LocalElements(block, embedding, head, matrix)

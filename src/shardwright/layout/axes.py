"""Sizes of the mesh axes, and where a rank stands on them.

Axes, outer to inner: pp, dp_replicate, dp_shard, cp, tp. The innermost varies fastest with the rank, so tensor-parallel
peers are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardwright.errors import ConfigError

if TYPE_CHECKING:
    # Only for the type: `plan` without a run file does not pay for pydantic.
    from shardwright.config.schema import Parallelism

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Axes:
    """Sizes of the five axes; their product is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different rows: dp_replicate x dp_shard. tp, cp and pp peers share theirs."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis; the inverse of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size}")
        place = {}
        for axis, size in reversed(list(zip(AXES, self.sizes))):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place: int) -> int:
        """The rank at these coordinates; axes not named are 0."""
        result = 0
        for axis, size in zip(AXES, self.sizes):
            result = result * size + place.get(axis, 0)
        return result

    def data_rank(self, rank: int) -> int:
        """Which slice of an update's rows `rank` takes, from 0 to `data_ranks` - 1."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes) if size > 1]
        return " x ".join(named) or "1 rank"


def resolve_axes(parallelism: Parallelism, world_size: int) -> Axes:
    """The axes of `parallelism` on `world_size` ranks, with dp_shard_size = -1 filled in.

    Raises `ConfigError` when the product is not the world size.
    """
    p = parallelism
    others = {"pp_size": p.pp_size, "dp_replicate_size": p.dp_replicate_size, "cp_size": p.cp_size, "tp_size": p.tp_size}
    taken = prod(others.values())
    shown = " x ".join(f"{name} {size}" for name, size in others.items() if size > 1) or "the other axes 1"
    if p.dp_shard_size == -1:
        if world_size % taken:
            raise ConfigError(
                f"{shown} = {taken} does not divide the world size {world_size}.",
                "Each rank needs one place on the mesh.",
                f"Start a multiple of {taken} processes or change a size.",
            )
        shard = world_size // taken
    else:
        shard = p.dp_shard_size
        if taken * shard != world_size:
            raise ConfigError(
                f"{shown} x dp_shard_size {shard} = {taken * shard}, but the world size is {world_size}.",
                "The product of the axes must be the number of ranks; none may stand idle.",
                f"Start {taken * shard} processes, or set dp_shard_size to -1 for the rest.",
            )
    return Axes(p.pp_size, p.dp_replicate_size, shard, p.cp_size, p.tp_size)

"""Sizes of the mesh axes, and where a rank stands on them.

Axes, outer to inner: pp, dp_replicate, dp_shard, cp, tp. The innermost varies fastest with the rank, so tensor-parallel
peers are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
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
    """The axes of `parallelism` on `world_size` ranks, with the data-parallel remainder filled in.

    The remainder is dp_replicate for ddp (which shards nothing) and dp_shard for zero*, where dp_shard_size is -1.
    Raises `ConfigError` when the product is not the world size.
    """
    p = parallelism
    sizes = {
        "pp_size": p.pp_size,
        "dp_replicate_size": p.dp_replicate_size,
        "cp_size": p.cp_size,
        "tp_size": p.tp_size,
    }
    if p.data_parallel == "ddp":
        if p.dp_shard_size not in (-1, 1):
            raise ConfigError(
                f"dp_shard_size {p.dp_shard_size} with data_parallel ddp.",
                "ddp shards nothing: every data-parallel rank is a replica.",
                "Leave dp_shard_size out, or set data_parallel to zero1, zero2 or zero3.",
            )
        fixed = None if p.dp_replicate_size == 1 else p.dp_replicate_size
        rest_name = "dp_replicate_size"
    else:
        fixed = None if p.dp_shard_size == -1 else p.dp_shard_size
        rest_name = "dp_shard_size"
    sizes.pop(rest_name, None)
    taken = prod(sizes.values())
    if fixed is None:
        fixed = max(1, world_size // taken)
        advice = f"Start a multiple of {taken} processes or change a size."
    else:
        advice = f"Start {taken * fixed} processes, or leave {rest_name} out to take the rest."
    sizes[rest_name] = fixed
    if taken * fixed != world_size:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every axis 1"
        raise ConfigError(
            f"{shown} = {taken * fixed}, but the world size is {world_size}.",
            "The product of the axes must be the number of ranks; none may stand idle.",
            advice,
        )
    replicate, shard = (fixed, 1) if rest_name == "dp_replicate_size" else (p.dp_replicate_size, fixed)
    return Axes(p.pp_size, replicate, shard, p.cp_size, p.tp_size)

"""The registry of mesh axes, their sizes, and the coordinates of a rank.

The order of `AXES` is outer to inner: the last axis varies fastest with the rank, so tensor-parallel peers are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardwright.errors import ConfigError

if TYPE_CHECKING:
    # Only for the type: `plan` without a run file does not pay for pydantic.
    from shardwright.config.schema import Parallelism


class Axis(NamedTuple):
    """One axis of the mesh; `docs/glossary.md` says what each divides.

    name: of the mesh dimension, of the field of `Axes`, and in reports of traffic.
    key: its size in section `parallelism` of the run file.
    part: its prefix in layout names, `tp` in `tp2`.
    options: keys of `parallelism` that have an effect only where the size is above 1.
    choice: the one of `options` that may stand behind a colon in a layout name, what it is, and its default.
    divides_model: a rank holds a part of a copy of the model, or of its rows; ranks of the other axes hold copies.
    divides_rows: ranks hold the same parameters and different tokens of the same rows. Gradients are summed over such an
    axis too, and zero* shards over it.
    """

    name: str
    key: str
    part: str = ""
    options: tuple[str, ...] = ()
    choice: tuple[str, str, str] | None = None
    divides_model: bool = False
    divides_rows: bool = False


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            "pp",
            "pp_size",
            "pp",
            options=("pp_schedule",),
            choice=("pp_schedule", "pipeline schedule", "1f1b"),
            divides_model=True,
        ),
        Axis("dp_replicate", "dp_replicate_size", "hsdp"),
        Axis("dp_shard", "dp_shard_size"),
        Axis(
            "cp",
            "cp_size",
            "cp",
            options=("cp_attention", "cp_load_balance"),
            choice=("cp_attention", "context-parallel attention", "all_gather"),
            divides_model=True,
            divides_rows=True,
        ),
        Axis("tp", "tp_size", "tp", options=("sequence_parallel", "tp_plan"), divides_model=True),
    )
}
MODEL_AXES = tuple(name for name, axis in AXES.items() if axis.divides_model)
ROW_AXES = tuple(name for name, axis in AXES.items() if axis.divides_rows)


@dataclass(frozen=True)
class Axes:
    """The size of each axis; their product is the world size."""

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

    @property
    def row_ranks(self) -> int:
        """Ranks that hold different tokens of one row."""
        return self.cp

    @property
    def shard_ranks(self) -> int:
        """Ranks over which zero* shards a parameter."""
        return self.dp_shard * self.row_ranks

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one microbatch together."""
        return self.pp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: coordinate} of `rank`; the inverse of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size}")
        found = {}
        for axis, size in reversed(list(zip(AXES, self.sizes))):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes not named are 0."""
        result = 0
        for axis, size in zip(AXES, self.sizes):
            result = result * size + coordinates.get(axis, 0)
        return result

    def data_rank(self, rank: int) -> int:
        """Which slice of an update's rows `rank` takes, from 0 to `data_ranks` - 1."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes) if size > 1]
        return " x ".join(named) or "1 rank"


def model_axes(p: Parallelism) -> Axes:
    """The axes of `MODEL_AXES` alone: those of one model copy, before the number of ranks is known."""
    return Axes(**{name: getattr(p, AXES[name].key) for name in MODEL_AXES})


def resolve_axes(parallelism: Parallelism, world_size: int) -> Axes:
    """The axes of `parallelism` on `world_size` ranks, with the data-parallel remainder filled in.

    The remainder is dp_replicate for ddp (which shards nothing) and dp_shard for zero*, where dp_shard_size is -1.
    Raises `ConfigError` when the product is not the world size.
    """
    p, rest = parallelism, "dp_shard"
    if p.data_parallel == "ddp":
        if p.dp_shard_size not in (-1, 1):
            raise ConfigError(
                f"dp_shard_size {p.dp_shard_size} with data_parallel ddp.",
                "ddp shards nothing: every data-parallel rank is a replica.",
                "Leave dp_shard_size out, or set data_parallel to zero1, zero2 or zero3.",
            )
        rest = "dp_replicate"
    left_open = getattr(p, AXES[rest].key) == (1 if rest == "dp_replicate" else -1)
    ignored = "dp_shard" if rest == "dp_replicate" else ""
    sizes = {name: getattr(p, axis.key) for name, axis in AXES.items() if name not in (rest, ignored)}
    taken = prod(sizes.values())
    sizes[rest] = max(1, world_size // taken) if left_open else getattr(p, AXES[rest].key)
    product = taken * sizes[rest]
    if product != world_size:
        shown = " x ".join(f"{AXES[name].key} {size}" for name, size in sizes.items() if size > 1) or "every axis 1"
        raise ConfigError(
            f"{shown} = {product}, but the world size is {world_size}.",
            "The product of the axes must be the number of ranks; no rank may be idle.",
            f"Start a multiple of {taken} processes or change a size."
            if left_open
            else f"Start {product} processes, or leave {AXES[rest].key} out to take the remaining ranks.",
        )
    return Axes(**sizes)

"""What tensor and sequence parallelism ask of sizes; pure arithmetic, for planner, gate and ranks alike."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Protocol

from shardwright.errors import ConfigError

if TYPE_CHECKING:  # the planner reads the rules and loads no pydantic
    from shardwright.config.schema import RunFile
    from shardwright.layout.axes import Axes

WHOLE_ATTENTION = ("flex_olmo", "gpt2", "olmo2", "olmo3", "phi3")
"""Families whose attention every tensor-parallel rank computes whole, because of fused or normed queries and keys."""


class TensorShape(Protocol):
    """What the rules need to know of a model (`arch.shape.Shape` knows it)."""

    @property
    def family(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...


def check_sequence(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` where sequence parallelism cannot give each rank equally many positions."""
    p, length = run.parallelism, run.data.max_length // axes.cp
    if axes.tp == 1 or p.sequence_parallel is False or length % axes.tp == 0:
        return
    unit = axes.cp * axes.tp
    near = sorted({run.data.max_length // unit * unit, -(-run.data.max_length // unit) * unit} - {0})
    raise ConfigError(
        f"data.max_length = {run.data.max_length} is not divisible by "
        + (f"cp_size x tp_size = {unit}." if axes.cp > 1 else f"tp_size = {axes.tp}."),
        "sequence_parallel gives each rank equally many positions.",
        f"Set data.max_length to {' or '.join(map(str, near))}, or parallelism.sequence_parallel to false.",
    )


def check_tensor(run: RunFile, axes: Axes, shape: TensorShape) -> None:
    """Raises `ConfigError` where a model of `shape` cannot be divided over tp_size ranks by its own plan."""
    check_sequence(run, axes)
    if axes.tp == 1 or run.parallelism.tp_plan:
        return
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    sizes = {} if shape.family in WHOLE_ATTENTION else heads
    for name, size in {**sizes, "intermediate_size": shape.ffn}.items():
        if size % axes.tp == 0:
            continue
        part = "heads" if name in heads else "features of each MLP matrix, equally many"
        together = gcd(*sizes.values(), shape.ffn)
        valid = [str(n) for n in range(1, together + 1) if together % n == 0]
        shown = valid[:6]
        choice = f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
        raise ConfigError(
            f"{name} = {size} is not divisible by tp_size = {axes.tp}.",
            f"Each rank must hold whole {part}.",
            f"Set tp_size to {choice}.",
        )

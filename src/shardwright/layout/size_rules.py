"""The rules of each axis for batch and row sizes, and the chunks of a row: pure arithmetic for planner, `check_run` and ranks.

What a layout asks of the model's own sizes stands in `check_tensor` and in `parallel/`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, lcm
from typing import TYPE_CHECKING, Protocol

from shardwright.errors import ConfigError
from shardwright.layout.pipeline_schedules import chunks_of, legality

if TYPE_CHECKING:  # the planner reads the rules and loads no pydantic
    from shardwright.config.schema import Parallelism, RunFile, Schedule
    from shardwright.layout.axes import Axes

WHOLE_ATTENTION = ("flex_olmo", "gpt2", "olmo2", "olmo3", "phi3")
"""Families whose attention every tensor-parallel rank computes whole, because of fused or normed queries and keys."""


class TensorShape(Protocol):
    """What `check_tensor` needs to know of a model (`arch.shape.Shape` knows it)."""

    @property
    def family(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...


def accumulation_steps(global_batch_size: int, per_device_train_batch_size: int, data_ranks: int) -> int:
    """Microbatches of each data rank in one update: global = microbatch x accumulation x data ranks, exactly.

    Raises `ConfigError` with the nearest valid values when the global batch does not divide. It is never
    rounded, so no layout changes the objective.
    """
    rows = per_device_train_batch_size * data_ranks
    steps, rest = divmod(global_batch_size, rows)
    if steps and not rest:
        return steps
    fix = f"Set training.global_batch_size to {_near(global_batch_size, rows)}"
    share, uneven = divmod(global_batch_size, data_ranks)
    if share and not uneven:
        smaller = max(size for size in range(1, share + 1) if share % size == 0 and size <= per_device_train_batch_size)
        fix += f", or training.per_device_train_batch_size to {smaller}"
    raise ConfigError(
        f"training.global_batch_size = {global_batch_size} is not a multiple of {rows} = "
        f"per_device_train_batch_size {per_device_train_batch_size} x {data_ranks} data ranks.",
        "Every data rank takes the same number of whole microbatches of each update.",
        fix + ".",
    )


def row_multiple(run: RunFile, axes: Axes) -> int:
    """What the width of every microbatch is a multiple of: the equal parts of a row that cp and sequence parallelism make."""
    p = run.parallelism
    parts = 1 if axes.cp == 1 else 2 * axes.cp if is_balanced(p) else axes.cp
    return lcm(parts, 1 if axes.tp == 1 or p.sequence_parallel is False else axes.cp * axes.tp)


def schedule_of(p: Parallelism) -> Schedule:
    """The pipeline schedule of a layout."""
    return p.pp_schedule or "1f1b"


def stage_count(p: Parallelism) -> int:
    """Pipeline stages: one for each pipeline rank, or as many more as the schedule is made for."""
    return p.pp_size * chunks_of(schedule_of(p))


def check_pipeline(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` for a pipeline that this version or torch cannot run, with the reason."""
    t, schedule = run.training, schedule_of(run.parallelism)
    count = accumulation_steps(t.global_batch_size, t.per_device_train_batch_size, axes.data_ranks)
    if reason := legality(schedule, axes.pp, chunks_of(schedule), count):
        raise ConfigError(
            f"parallelism.pp_schedule {schedule} cannot run: {reason}.",
            f"Each data rank has {count} microbatches: global_batch_size {t.global_batch_size} / "
            f"(per_device_train_batch_size {t.per_device_train_batch_size} x {axes.data_ranks} data ranks).",
            "Change training.per_device_train_batch_size, or set parallelism.pp_schedule to gpipe, which runs any number.",
        )


def is_balanced(p: Parallelism) -> bool:
    """Whether a context-parallel rank holds a chunk of a row's head and one of its tail: the default."""
    return p.cp_load_balance is not False


def chunks(length: int, cp: int, cp_rank: int, balanced: bool) -> tuple[range, ...]:
    """The positions of a row of `length` tokens that rank `cp_rank` of `cp` holds, as ranges in ascending order.

    balanced: of 2 cp equal chunks, chunk cp_rank from the head and chunk 2 cp - 1 - cp_rank from the tail, so that under a
    causal mask every rank has the same work (Llama 3, arXiv:2407.21783, section 3.3.2). Otherwise one contiguous part.
    """
    parts = 2 * cp if balanced else cp
    size, rest = divmod(length, parts)
    if rest:
        raise ValueError(f"a row of {length} tokens does not divide into {parts} chunks")
    numbers = (cp_rank, 2 * cp - 1 - cp_rank) if balanced else (cp_rank,)
    return tuple(range(number * size, (number + 1) * size) for number in numbers)


def check_context(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` where context parallelism cannot give each rank equally many positions."""
    length, cp, balanced = run.data.max_length, axes.cp, is_balanced(run.parallelism)
    parts, name = (2 * cp, "2 x cp_size") if balanced else (cp, "cp_size")
    if length % parts:
        raise ConfigError(
            f"max_length = {length} is not divisible by {name} = {parts}.",
            f"Each of {cp} ranks holds one chunk from the head and one from the tail of a row: {parts} equal chunks."
            if balanced
            else f"Each of {cp} ranks holds an equal part of a row.",
            f"Set data.max_length to {_near(length, parts)}. Rows are padded to max_length, and padding has no target.",
        )


def check_sequence(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` where sequence parallelism cannot give each rank equally many positions."""
    length, unit = run.data.max_length, axes.cp * axes.tp
    if run.parallelism.sequence_parallel is False or length // axes.cp % axes.tp == 0:
        return
    raise ConfigError(
        f"data.max_length = {length} is not divisible by "
        + (f"cp_size x tp_size = {unit}." if axes.cp > 1 else f"tp_size = {axes.tp}."),
        "sequence_parallel gives each rank equally many positions.",
        f"Set data.max_length to {_near(length, unit)}, or parallelism.sequence_parallel to false.",
    )


def check_tensor(run: RunFile, axes: Axes, shape: TensorShape) -> None:
    """Raises `ConfigError` where a model of `shape` cannot be divided over tp_size ranks by its own plan."""
    if axes.tp == 1:
        return
    check_sequence(run, axes)
    if run.parallelism.tp_plan:
        return
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    sizes = {} if shape.family in WHOLE_ATTENTION else heads
    for name, size in {**sizes, "intermediate_size": shape.ffn}.items():
        if size % axes.tp == 0:
            continue
        part = "heads" if name in heads else "features of each MLP matrix, equally many"
        together = gcd(*sizes.values(), shape.ffn)
        shown = [str(n) for n in range(1, together + 1) if together % n == 0][:6]
        raise ConfigError(
            f"{name} = {size} is not divisible by tp_size = {axes.tp}.",
            f"Each rank must hold whole {part}.",
            f"Set tp_size to {' or '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}.",
        )


SIZE_RULES: dict[str, Callable[[RunFile, Axes], None]] = {
    "pp": check_pipeline,
    "cp": check_context,
    "tp": check_sequence,
}
"""Axis -> what refuses a run whose sizes the axis cannot divide; called where the axis is larger than 1."""


def _near(size: int, multiple: int) -> str:
    """The multiples just below and above `size`, as `8 or 12`."""
    return " or ".join(str(n) for n in (size // multiple * multiple, (size // multiple + 1) * multiple) if n)

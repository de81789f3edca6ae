"""How the rows of an update, which the objective fixes, are divided into microbatches by the layout."""

from __future__ import annotations

from math import lcm

from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes


def row_multiple(run: RunFile, axes: Axes) -> int:
    """What the width of every microbatch is a multiple of: the equal parts of a row that cp and sequence parallelism make."""
    p = run.parallelism
    parts = 1 if axes.cp == 1 else axes.cp if p.cp_load_balance is False else 2 * axes.cp
    return lcm(parts, 1 if axes.tp == 1 or p.sequence_parallel is False else axes.cp * axes.tp)


def accumulation_steps(global_batch_size: int, per_device_train_batch_size: int, data_ranks: int) -> int:
    """Microbatches of each data rank in one update: global = microbatch x accumulation x data ranks, exactly.

    Raises `ConfigError` with the nearest valid values when the global batch does not divide. It is never
    rounded, so no layout changes the objective.
    """
    rows = per_device_train_batch_size * data_ranks
    steps, rest = divmod(global_batch_size, rows)
    if steps and not rest:
        return steps
    valid = [size for size in (steps * rows, (steps + 1) * rows) if size]
    fix = f"Set training.global_batch_size to {' or '.join(map(str, valid))}"
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

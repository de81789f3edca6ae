"""How an update's rows are split into microbatches: the layout may choose how, never how many rows."""

from __future__ import annotations

from shardwright.errors import ConfigError


def accumulation_steps(global_batch_size: int, per_device_train_batch_size: int, data_ranks: int) -> int:
    """Microbatches of each data rank in one update: global / (per device x data ranks).

    Raises `ConfigError` with the nearest values that divide; the global batch is never rounded.
    """
    rows = per_device_train_batch_size * data_ranks
    if global_batch_size % rows == 0:
        return global_batch_size // rows
    below, above = global_batch_size // rows * rows, -(-global_batch_size // rows) * rows
    fitting = [b for b in range(1, global_batch_size + 1) if global_batch_size % (b * data_ranks) == 0]
    nearest = ", ".join(str(value) for value in (below, above) if value)
    raise ConfigError(
        f"training.global_batch_size {global_batch_size} is not a multiple of "
        f"per_device_train_batch_size {per_device_train_batch_size} x {data_ranks} data ranks = {rows}.",
        "Every rank must run the same number of equal microbatches, and the global batch is part of the objective.",
        f"Set global_batch_size to {nearest}"
        + (f", or per_device_train_batch_size to {', '.join(map(str, fitting))}." if fitting else "."),
    )

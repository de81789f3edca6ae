"""Known faults A23 A122: the global batch is the objective; it is met exactly or refused with the numbers."""

from __future__ import annotations

import pytest

from shardwright.errors import ConfigError
from shardwright.layout.batch import accumulation_steps


@pytest.mark.parametrize(
    ("global_batch", "microbatch", "data_ranks", "steps"),
    [(8, 1, 2, 4), (8, 1, 1, 8), (8, 2, 4, 1), (64, 4, 2, 8), (1, 1, 1, 1)],
)
def test_global_is_microbatch_times_accumulation_times_data_ranks(
    global_batch: int, microbatch: int, data_ranks: int, steps: int
) -> None:
    """A122: the same rows per update whatever the layout, for example dp=2,tp=1 and dp=1,tp=2."""
    assert accumulation_steps(global_batch, microbatch, data_ranks) == steps


@pytest.mark.parametrize(
    ("global_batch", "microbatch", "data_ranks", "fix"),
    [
        (10, 1, 4, "Set training.global_batch_size to 8 or 12."),
        (10, 2, 4, "Set training.global_batch_size to 8 or 16."),
        (5, 1, 4, "Set training.global_batch_size to 4 or 8."),
        (3, 1, 4, "Set training.global_batch_size to 4."),
        (
            12,
            4,
            2,
            "Set training.global_batch_size to 8 or 16, or training.per_device_train_batch_size to 3.",
        ),
        (4, 8, 2, "Set training.global_batch_size to 16, or training.per_device_train_batch_size to 2."),
    ],
)
def test_what_does_not_divide_is_refused(global_batch: int, microbatch: int, data_ranks: int, fix: str) -> None:
    """A23 A122: global 10, 5 and 3 on 4 ranks are refused with the nearest valid values, never floored."""
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(global_batch, microbatch, data_ranks)
    assert caught.value.fix == fix
    assert f"global_batch_size = {global_batch} is not a multiple of {microbatch * data_ranks}" in caught.value.what

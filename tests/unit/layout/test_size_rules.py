"""What layouts ask of sizes: the global batch is met exactly (A23, A122), and pipelines (A80, A81)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gloo.engine import run_file

from shardwright.errors import ConfigError
from shardwright.layout.legality import check_run
from shardwright.layout.size_rules import accumulation_steps


def refusal(world_size: int = 2, **keys: Any) -> str:
    """The text of the refusal, or nothing."""
    given: dict[str, Any] = {"parallelism__data_parallel": "ddp", "training__global_batch_size": 8, **keys}
    try:
        check_run(run_file(**{key: value for key, value in given.items() if value is not None}), world_size)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("schedule", "pp", "rows", "refused"),
    [
        ("1f1b", 2, 1, "1f1b needs at least as many microbatches as stages: 1 < 2"),
        ("1f1b", 4, 2, "1f1b needs at least as many microbatches as stages: 2 < 4"),
        ("1f1b", 4, 4, ""),
        ("gpipe", 2, 1, ""),
        ("gpipe", 4, 2, ""),
        ("interleaved_1f1b", 2, 1, ""),
        ("interleaved_1f1b", 2, 5, "5 microbatches are not a multiple of the 2 rounds"),
        ("zero_bubble", 4, 2, ""),
        ("zero_bubble", 2, 5, "5 microbatches are not a multiple of the 2 rounds"),
        ("zbv", 2, 1, ""),
    ],
)
def test_microbatches_that_a_schedule_cannot_run(schedule: str, pp: int, rows: int, refused: str) -> None:
    """A80: fewer microbatches than stages; each schedule's own rule, with the numbers."""
    text = refusal(pp, parallelism__pp_size=pp, parallelism__pp_schedule=schedule, training__global_batch_size=rows)
    assert bool(text) == bool(refused) and refused in text
    if refused:
        assert (
            f"Each data rank has {rows} microbatches: global_batch_size {rows} / (per_device_train_batch_size 1 x 1"
            in text
        )


def test_a_batch_that_does_not_divide() -> None:
    """A81: 8 rows in microbatches of 3, with the numbers and a way out."""
    text = refusal(parallelism__pp_size=2, training__per_device_train_batch_size=3)
    assert "8 is not a multiple of 3" in text and "6 or 9" in text


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"parallelism__data_parallel": "zero1"}, "compute the gradients of weights later"),
        ({"parallelism__data_parallel": "zero3"}, "with data_parallel zero3"),
        ({"memory__activation_checkpointing": "selective"}, "can be read only once"),
        ({"memory__compile": True}, "one backward for inputs and weights together"),
        ({"memory__activation_checkpointing": "full"}, "run the block's forward again"),
    ],
)
def test_split_backward(schedule: str, keys: dict[str, Any], reason: str) -> None:
    """zero_bubble and zbv with what cannot compute weight gradients apart."""
    text = refusal(parallelism__pp_size=2, parallelism__pp_schedule=schedule, **keys)
    assert reason in text


def test_a_function_has_no_known_parts() -> None:
    text = refusal(model="tests.odd_models:odd_model", parallelism__pp_size=2)
    assert "pp_size 2 with the model function tests.odd_models:odd_model" in text


def test_the_data_parallel_kinds_are_allowed() -> None:
    for kind in ("ddp", "zero1", "zero2", "zero3"):
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
            keys = {"parallelism__data_parallel": kind, "parallelism__pp_schedule": schedule}
            assert not refusal(4, parallelism__pp_size=2, **keys)


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

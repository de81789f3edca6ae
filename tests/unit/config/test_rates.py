"""One rule for schedules that a run cannot hold, by steps and by epochs, and arguments that a schedule does not know."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tests import tolerance

from shardwright.config.rates import check_length
from shardwright.config.schema import Training
from shardwright.errors import ConfigError
from shardwright.train.optimizer import learning_rate_factor

WSD = "warmup_stable_decay"


def training(kind: str = "cosine", warmup: int = 0, epochs: float | None = None, **kwargs: Any) -> Training:
    values: dict[str, Any] = {"global_batch_size": 1, "lr_scheduler_type": kind, "warmup_steps": warmup}
    length = {"max_steps": 10} if epochs is None else {"num_train_epochs": epochs}
    return Training.model_validate({**values, **length, "lr_scheduler_kwargs": kwargs})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (training("linear", 100), ["training.warmup_steps 100, but the run has 10 updates", "below 10"]),
        (training("constant_with_warmup", 10), ["training.warmup_steps 10, but the run has 10 updates"]),
        (training("inverse_sqrt", 11), ["warmup_steps 11, but", "would never reach training.learning_rate"]),
        (training("polynomial", 11, 2.0), ["has 10 updates (training.num_train_epochs 2)."]),
        (training(WSD, 5, num_decay_steps=50), ["warmup_steps 5 + lr_scheduler_kwargs num_decay_steps 50 = 55, but"]),
        (training(WSD, num_decay_steps=11), ["num_decay_steps 11, but", "to the end of its schedule"]),
        (training(WSD, 3, num_decay_steps=4, num_stable_steps=9), ["num_stable_steps 9", "4 = 16, but"]),
        (training(WSD, 3, num_decay_steps=4, num_stable_steps=1), ["8, but the run has 10", "The last 2 updates would have"]),
        (training(WSD, num_decay_steps="4"), ["num_decay_steps = '4'"]),
        (training(WSD, num_decay_steps=-1), ["num_decay_steps = -1"]),
        (training("cosine_with_restarts", 2, num_cycles=5), ["num_cycles 5 in 8 updates", "to at most 4"]),
        (training("cosine", num_cycles=0), ["num_cycles = 0.", "would not change"]),
        (training("cosine_with_min_lr", num_cycles=5.5, min_lr=0.0), ["num_cycles 5.5 in 10 updates"]),
        (training(WSD, num_decay_steps=4, num_cycles=2.5), ["num_cycles 2.5 in 4 updates"]),
    ],
)  # fmt: skip
def test_a_schedule_that_the_run_cannot_hold_is_refused(given: Training, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_length(given, 10)
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    "given",
    [
        training("constant"),
        training("linear", 9),
        training(WSD, 6, num_decay_steps=4),
        training(WSD, 3, num_decay_steps=4, num_stable_steps=3),
        training(WSD, 3, num_decay_steps=4, num_stable_steps=1, min_lr_ratio=0.1),
        training("cosine_with_restarts", 2, num_cycles=4),
        training("cosine", num_cycles=1.5),
        training("linear", num_decay_steps=50),  # not this schedule's: refused by name
    ],
)
def test_a_schedule_that_fits_is_taken(given: Training) -> None:
    check_length(given, 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (training("cosine", eta_min=1e-6), "cosine does not know `eta_min`. The arguments of cosine are: num_cycles. Remove"),
        (training("linear", num_cycles=1), "linear does not know `num_cycles`. The arguments of linear are: none."),
        (training("cosine", last_epoch=3), "cosine does not know `last_epoch`"),
        (training("cosine", num_training_steps=3), "cosine does not know `num_training_steps`"),
        (training(WSD), "missing 1 required positional argument: 'num_decay_steps'"),
        (training(WSD, num_decay_steps=2, decay_type="exp"), "Unknown decay type: exp"),
        (training("inverse_sqrt", timescale=0), "training.lr_scheduler_kwargs for inverse_sqrt: "),
        (training("inverse_sqrt", 2, timescale="a"), "training.lr_scheduler_kwargs for inverse_sqrt: "),
        (training("cosine_with_min_lr", min_lr=1.0), "update 1 would have 82.55 times training.learning_rate"),
        (training("polynomial", lr_end=1.0), "lr_end (1.0) must be smaller than initial lr"),
    ],
)  # fmt: skip
def test_arguments_that_a_schedule_cannot_use_are_refused(given: Training, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        learning_rate_factor(given, 10)


def test_rates_of_a_schedule_in_three_parts() -> None:
    """By hand: up in 3, level for 3, down in 4; with a lowest rate the warm-up begins there."""
    factor = learning_rate_factor(training(WSD, 3, num_decay_steps=4, decay_type="linear"), 10)
    assert [factor(u) for u in range(10)] == [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    factor = learning_rate_factor(training(WSD, 3, num_decay_steps=4, min_lr_ratio=0.1), 10)
    down = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    right = [0.1 + 0.9 * x for x in (0, 1 / 3, 2 / 3, 1, 1, 1, *down)]
    assert all(math.isclose(factor(u), right[u], rel_tol=tolerance.few(8)) for u in range(10))

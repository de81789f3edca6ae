"""Checks that a run is long enough for its learning rate schedule."""

from __future__ import annotations

from typing import Any

from shardwright.config.schema import Training
from shardwright.errors import ConfigError

OPEN_ENDED = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""
_STEPS = {"warmup_stable_decay": ("num_stable_steps", "num_decay_steps")}
"""Arguments of schedules that are numbers of updates, beside training.warmup_steps."""


def check_length(training: Training, updates: int) -> None:
    """Raises `ConfigError` where a run of `updates` updates cannot hold the schedule: its warm-up, other phases, or cycles.

    A warm-up reaches training.learning_rate in the update after it, so the warm-up must be shorter than the run.
    """
    phases = {"training.warmup_steps": training.warmup_steps} if training.warmup_steps else {}
    phases |= {f"lr_scheduler_kwargs {name}": steps for name, steps in _steps(training).items()}
    needed = sum(phases.values())
    given = " + ".join(f"{name} {steps}" for name, steps in phases.items())
    given += f" = {needed}" if len(phases) > 1 else ""
    length = f"the run has {_length(training, updates)}"
    if phases and (needed > updates or training.warmup_steps == updates):
        raise ConfigError(
            f"training.lr_scheduler_type {training.lr_scheduler_type}: {given}, but {length}.",
            "The learning rate would never reach training.learning_rate."
            if training.warmup_steps >= updates
            else "The learning rate would not come to the end of its schedule.",
            f"Lower training.warmup_steps below {updates}, or train longer."
            if training.warmup_steps >= updates
            else "Lower these numbers of updates, or train longer.",
        )
    kwargs = training.lr_scheduler_kwargs
    if "num_stable_steps" in _steps(training) and needed < updates and not kwargs.get("min_lr_ratio"):
        raise ConfigError(
            f"training.lr_scheduler_type {training.lr_scheduler_type}: {given}, but {length}.",
            f"The last {updates - needed} updates would have a learning rate of 0 and train nothing.",
            "Remove num_stable_steps: the stable phase then fills what warm-up and decay leave.",
        )
    _check_cycles(training, updates, length)


def _length(training: Training, updates: int) -> str:
    text = f"{updates:,} update{'s' if updates != 1 else ''}"
    epochs = training.num_train_epochs
    return text if epochs is None else f"{text} (training.num_train_epochs {epochs:g})"


def _steps(training: Training) -> dict[str, int]:
    """The arguments of the schedule that are numbers of updates."""
    kwargs, found = training.lr_scheduler_kwargs, {}
    for name in _STEPS.get(training.lr_scheduler_type, ()):
        if kwargs.get(name) is not None:
            found[name] = _whole_number(name, kwargs[name])
    return found


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"training.lr_scheduler_kwargs: {name} = {value!r}.", "", "Give a number of updates, 0 or more."
        )
    return value


def _check_cycles(training: Training, updates: int, length: str) -> None:
    """Raises `ConfigError` for cycles of no length, or of fewer than two updates: no rate would show such a cycle."""
    cycles = training.lr_scheduler_kwargs.get("num_cycles")
    if cycles is None:
        return
    if isinstance(cycles, bool) or not isinstance(cycles, int | float) or cycles <= 0:
        raise ConfigError(
            f"training.lr_scheduler_kwargs: num_cycles = {cycles!r}.",
            "The learning rate would not change.",
            "Give a number above 0.",
        )
    span = _steps(training).get("num_decay_steps", updates - training.warmup_steps)
    if cycles > 1 and 2 * cycles > span:
        raise ConfigError(
            f"training.lr_scheduler_kwargs: num_cycles {cycles:g} in {span} updates; {length}.",
            "A cycle of fewer than 2 updates cannot change the learning rate.",
            f"Lower num_cycles to at most {max(1, span // 2)}.",
        )

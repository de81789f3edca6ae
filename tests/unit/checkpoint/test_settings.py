"""Settings that differ between a checkpoint and the run that resumes it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.checkpoint.settings import changes, refuse_unaccepted
from shardwright.config.load import Loaded, load_run_file, read_settings
from shardwright.errors import CheckpointError, ConfigError


def _run(**overrides: Any) -> Loaded:
    values: dict[str, Any] = {
        "model.model_name_or_path": "./model", "data.train": ["a"], "training.max_steps": 10,
        "training.global_batch_size": 8,
    }  # fmt: skip
    return load_run_file(None, values | {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.mark.parametrize(
    ("key", "value", "objective"),
    (
        ("training__learning_rate", 0.1, True),
        ("training__max_steps", 20, True),
        ("training__no_decay", [], True),
        ("training__max_grad_norm", None, True),
        ("model__freeze", ["a*"], True),
        ("data__max_length", 12, True),
        ("data__train", ["moved"], False),
        ("training__per_device_train_batch_size", 2, False),
        ("training__eval_steps", 2, False),
        ("parallelism__tp_size", 2, False),
        ("precision__param_dtype", "bf16", False),
        ("checkpoint__save_steps", 3, False),
    ),
)
def test_what_changes_the_objective(key: str, value: Any, objective: bool) -> None:
    saved, now = _run(), _run(**{key: value})
    (change,) = changes(saved.to_yaml(), now)
    dotted = key.replace("__", ".")
    assert (change.key, change.now, change.objective) == (dotted, value, objective)
    assert change.before == saved.settings()[dotted]
    if objective:
        with pytest.raises(CheckpointError, match=f"accept_changes .{dotted}"):
            refuse_unaccepted("checkpoint-1", [change], [])
    refuse_unaccepted("checkpoint-1", [change], [dotted])


def test_a_longer_run_at_a_constant_rate_is_the_same_objective() -> None:
    saved = _run(training__lr_scheduler_type="constant")
    (change,) = changes(saved.to_yaml(), _run(training__lr_scheduler_type="constant", training__max_steps=20))
    assert not change.objective


def test_where_to_write_and_resume_is_no_change() -> None:
    assert changes(_run().to_yaml(), _run(checkpoint__output_dir="b", checkpoint__resume="c")) == []
    assert changes("model: {unknown: 1}\nother: {a: 2}\n", _run()) == []


def test_a_file_that_is_none() -> None:
    for text in ("a: [", "- 1\n", "a: 3"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_settings(text)

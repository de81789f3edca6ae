"""What differs between the run file that a checkpoint was saved with and the one that resumes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardwright.config.load import Loaded, read_settings
from shardwright.config.rates import OPEN_ENDED
from shardwright.errors import CheckpointError

NOT_THE_OBJECTIVE = {
    "model.init", "data.train", "data.validation", "data.num_proc", "data.cache_dir", "model.tokenizer_name_or_path",
    "training.per_device_train_batch_size", "training.per_device_eval_batch_size", "training.eval_steps",
    "training.on_non_finite", "training.until_eval_loss",
}  # fmt: skip
"""Keys of model, data and training that change no later update, or whose effect the data fingerprint shows."""
LENGTHS = ("training.max_steps", "training.num_train_epochs")
IGNORED = ("checkpoint.output_dir", "checkpoint.resume", "checkpoint.accept_changes", "checkpoint.partial")


@dataclass(frozen=True)
class Change:
    """A setting that differs. objective: later updates would not be those of the run that was saved."""

    key: str
    before: Any
    now: Any
    objective: bool

    def __str__(self) -> str:
        return f"{self.key} {self.before!r} -> {self.now!r}"


def changes(saved_yaml: str, loaded: Loaded) -> list[Change]:
    """Every setting that differs from the run file of a checkpoint; keys that one side lacks are left out."""
    saved, now = read_settings(saved_yaml), loaded.settings()
    open_ended = loaded.run.training.lr_scheduler_type in OPEN_ENDED
    found = []
    for key in saved.keys() & now.keys() - set(IGNORED):
        if saved[key] != now[key]:
            section = key.split(".")[0]
            objective = section in ("model", "data", "training") and key not in NOT_THE_OBJECTIVE
            found.append(Change(key, saved[key], now[key], objective and not (open_ended and key in LENGTHS)))
    return sorted(found, key=lambda change: change.key)


def refuse_unaccepted(name: str, found: Iterable[Change], accepted: Iterable[str]) -> None:
    """Raises `CheckpointError` listing the changes of the objective that `checkpoint.accept_changes` does not name."""
    known = set(accepted)
    wrong = [change for change in found if change.objective and change.key not in known]
    if wrong:
        keys = ", ".join(change.key for change in wrong)
        raise CheckpointError(
            f"{name} was saved with other settings: {'; '.join(map(str, wrong))}.",
            "Later updates would train another objective.",
            f"Restore these settings, or confirm the changes with checkpoint.accept_changes [{keys}].",
        )

"""From the run file to the run that is checked: exact dtypes, accumulation, unequal targets, a size that fits this machine.

Each change has a line that reports it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from shardwright.config.rates import check_length
from shardwright.config.schema import Precision, RunFile
from shardwright.layout.import_path import is_import_path
from shardwright.models import build_model
from shardwright.models.build import read_config
from shardwright.models.dropout import has_dropout
from shardwright.tools.check.float32_inside import float32_inside
from shardwright.tools.check.rows import Changes, CheckedRows
from shardwright.tools.check.shrink import (
    SHARE,
    Limits,
    Size,
    activation_width,
    describe_shrinking,
    refuse,
    shrunk_config,
    shrunk_rows,
)
from shardwright.train.optimizer import learning_rate_factor
from shardwright.train.positions import check_positions


@dataclass(frozen=True)
class Adjusted:
    """The run that is checked, what both sides change in rows and dropout, the number of updates, and the report."""

    run: RunFile
    changes: Changes
    updates: int
    lines: tuple[str, ...]


def adjust(
    run: RunFile, *, dtype: str, data_ranks: int, device: str, updates: int, layouts: int = 1, split: bool = False
) -> Adjusted:
    """What is checked of `run` on `data_ranks` data ranks. dtype: fp64, or run for the run file's own.

    layouts: number of layouts that are recorded. split: some layout splits the model or its rows (pp, cp, tp).
    """
    lines = []
    learning_rate_factor(run.training, run.training.max_steps or 1)
    if dtype == "fp64":
        run = run.model_copy(
            update={"precision": Precision(param_dtype="fp64", reduce_dtype="fp64", master_dtype="fp64")}
        )
    run, vocabulary, shrunk = _fitting(run, data_ranks, updates, 1 + layouts)
    lines += shrunk
    if dtype == "fp64" and run.memory.compile and (module := float32_inside(run.model)):
        run = run.model_copy(update={"memory": run.memory.model_copy(update={"compile": False})})
        lines.append(
            f"memory.compile is off: {module} computes in float32 whatever the dtype, and a compiled block sums in another "
            "order (3e-7 of a gradient, measured). `--dtype run` compares compiled blocks."
        )
    changes = Changes(vocabulary=vocabulary)
    run, accumulated = _accumulating(run, data_ranks)
    lines += accumulated
    rows = CheckedRows(run, changes, data_rank=0, data_ranks=1)
    check_length(run.training, rows.order.total_updates)
    lines += check_positions(build_model(run.model, torch.float32), run, [rows.table])
    if updates > rows.order.total_updates:
        updates = rows.order.total_updates
        lines.append(f"The run has {updates} updates only; all of them are compared.")
    if _equal_targets(rows, updates):
        changes = replace(changes, mask_labels=True)
        lines.append(
            "All microbatches have the same number of targets: some labels are masked, so that a mean of means would show."
        )
    if reason := _no_dropout(run, device, split):
        changes = replace(changes, no_dropout=True)
        lines.append(f"Dropout is off: {reason}.")
    return Adjusted(run, changes, updates, tuple(lines))


def _no_dropout(run: RunFile, device: str, split: bool) -> str:
    """Why the two sides would draw other dropout masks, or empty."""
    if device != "cpu":
        return f"{device} and the reference on the CPU draw different random numbers"
    if not (split or run.data.batching != "pad") or not has_dropout(build_model(run.model, torch.float32)):
        return ""
    if run.data.batching != "pad":
        return "rows and documents alone draw different random numbers"
    return "layouts with pp, cp or tp draw other random numbers than a single process"


def _config(run: RunFile) -> dict[str, Any] | None:
    """The Transformers config with overrides, None for a model made by a function."""
    return None if is_import_path(run.model.model_name_or_path) else read_config(run.model).to_dict()


def _size(run: RunFile, config: dict[str, Any] | None) -> Size:
    t, length = run.training, run.data.max_length
    parameters = sum(p.numel() for p in build_model(run.model, torch.float64).parameters())
    width = activation_width(config, length) if config is not None else 0
    return Size(parameters, width, t.per_device_train_batch_size * length, t.global_batch_size * length)


def _limits() -> Limits:
    free_disk = shutil.disk_usage(tempfile.gettempdir()).free
    return Limits(int(SHARE * psutil.virtual_memory().available), int(SHARE * free_disk))


def _fitting(run: RunFile, data_ranks: int, updates: int, records: int) -> tuple[RunFile, int | None, list[str]]:
    """(run, size of a shrunk vocabulary or None, lines): first fewer and shorter rows, then a smaller model."""
    config, limits = _config(run), _limits()
    size, lines = _size(run, config), []
    reason = limits.exceeded(size, data_ranks, updates, records)
    if not reason:
        return run, None, []
    smaller = shrunk_rows(run, data_ranks)
    if smaller != run:
        t = smaller.training
        lines.append(
            f"Fewer and shorter rows ({reason}): {t.global_batch_size} rows of at most {smaller.data.max_length} tokens an "
            f"update, {t.per_device_train_batch_size} a microbatch."
        )
        run, size = smaller, _size(smaller, config)
    reason = limits.exceeded(size, data_ranks, updates, records)
    if not reason:
        return run, None, lines
    if config is None:
        raise refuse(reason)
    overrides = shrunk_config(config)
    model = run.model.model_copy(
        update={"config_overrides": {**run.model.config_overrides, **overrides}, "init": "random"}
    )
    tokenizer = run.model.tokenizer_name_or_path or run.model.model_name_or_path
    run = run.model_copy(update={"model": model.model_copy(update={"tokenizer_name_or_path": tokenizer})})
    small = _size(run, {**config, **overrides})
    if still := limits.exceeded(small, data_ranks, updates, records):
        raise refuse(still)
    lines.append(describe_shrinking(config, overrides, size.parameters, small.parameters, reason))
    vocabulary = next((overrides[key] for key in ("vocab_size",) if key in overrides), None)
    return run, vocabulary, lines


def _accumulating(run: RunFile, data_ranks: int) -> tuple[RunFile, list[str]]:
    """`run` with smaller microbatches where each rank would have one only."""
    t = run.training
    share, uneven = divmod(t.global_batch_size, data_ranks)
    if uneven or share != t.per_device_train_batch_size:
        return run, []
    if share == 1:
        return run, [
            "Each rank has one microbatch of one row: accumulation is not shown. Raise training.global_batch_size."
        ]
    # another number than the ranks, where there is a choice: a wrong factor then shows which of the two numbers it is
    sizes = [size for size in range(share - 1, 0, -1) if share % size == 0]
    rows = next((size for size in sizes if share // size != data_ranks), sizes[0])
    training = t.model_copy(update={"per_device_train_batch_size": rows})
    line = f"per_device_train_batch_size {share} -> {rows}, so that {share // rows} microbatches are accumulated."
    return run.model_copy(update={"training": training}), [line]


def _equal_targets(rows: CheckedRows, updates: int) -> bool:
    """Whether all microbatches of all updates have equally many targets."""
    counts = {
        int((microbatch.labels >= 0).sum())
        for number in range(updates)
        for microbatch in rows.update(number).microbatches
    }
    return len(counts) == 1

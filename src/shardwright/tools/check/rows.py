"""The rows of an update as both sides of a check read them: the rows of training, with small changes that a line reports.

The changes are pure functions of a row's id and contents, so that reference and candidate see the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shardwright.config.schema import RunFile
from shardwright.data.loader import Loader, Microbatch, UpdateBatch
from shardwright.data.prepare import open_updates
from shardwright.layout.axes import Axes
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.train.run_data import widths


@dataclass(frozen=True)
class Changes:
    """What both sides change alike, so that a check shows more or fits the machine."""

    vocabulary: int | None = None
    """Token ids are taken modulo this number: the vocabulary of a shrunk model."""
    mask_labels: bool = False
    """Some labels of most rows are masked, so that rows differ in targets."""
    no_dropout: bool = False
    """Dropout is off, because the two sides would draw other random numbers."""


def masked_labels(labels: Tensor, row: int) -> Tensor:
    """`labels` [T] of row `row` without the first row % 4 of every 4; the very first label stays."""
    place = torch.arange(len(labels))
    return torch.where((place % 4 < row % 4) & (place > 0), IGNORE_INDEX, labels)


class CheckedRows:
    """The updates of a run as data rank `data_rank` of `data_ranks` sees them, with `changes`. axes: None for one process."""

    def __init__(
        self, run: RunFile, changes: Changes, *, data_rank: int, data_ranks: int, axes: Axes | None = None
    ) -> None:
        train = open_updates(_with_own_vocabulary(run) if changes.vocabulary is not None else run)
        t = run.training
        self.changes, self.table, self.order = changes, train.rows, train.order
        self.loader = Loader(
            self.table,
            self.order,
            data_rank=data_rank,
            data_ranks=data_ranks,
            microbatch_rows=t.per_device_train_batch_size,
            pad_id=train.pad_id,
            **widths(run, axes or Axes()),
        )

    def update(self, number: int) -> UpdateBatch:
        """Update `number` (0-based)."""
        batch = self.loader.update(number)
        microbatches = tuple(self._changed(microbatch) for microbatch in batch.microbatches)
        targets, weight = batch.target_tokens, batch.target_weight
        if self.changes.mask_labels:
            counts = [self._counts(row) for row in batch.row_ids if row >= 0]
            targets = sum(count for count, _ in counts)
            weight = None if weight is None else sum(own for _, own in counts)
        return replace(batch, microbatches=microbatches, target_tokens=targets, target_weight=weight)

    def _counts(self, row: int) -> tuple[int, float]:
        """(targets that are left of a row, the sum of their weights)."""
        block = self.table.block([row], int(self.table.real_tokens(np.array([row]))[0]), 0)
        kept = masked_labels(torch.from_numpy(block.labels[0]), row).numpy() != IGNORE_INDEX
        weights = kept if block.weights is None else block.weights[0][kept]
        return int(kept.sum()), float(weights.sum(dtype=np.float64))

    def _changed(self, microbatch: Microbatch) -> Microbatch:
        ids, labels = microbatch.input_ids, microbatch.labels
        if self.changes.vocabulary is not None:
            ids = ids % self.changes.vocabulary
            labels = torch.where(labels == IGNORE_INDEX, labels, labels % self.changes.vocabulary)
        if self.changes.mask_labels:
            labels = torch.stack([masked_labels(own, row) for own, row in zip(labels, microbatch.row_ids)])
        return replace(microbatch, input_ids=ids, labels=labels)


def _with_own_vocabulary(run: RunFile) -> RunFile:
    """`run` without the shrunk vocabulary: the data keeps its ids, which are mapped afterwards."""
    overrides = {key: value for key, value in run.model.config_overrides.items() if key != "vocab_size"}
    return run.model_copy(update={"model": run.model.model_copy(update={"config_overrides": overrides})})

"""The data of a run for one rank: its part of each update, the validation split, and fingerprints of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch

from shardwright.config.schema import RunFile
from shardwright.data.loader import Loader, UpdateBatch, evaluation_order, prefetch
from shardwright.data.order import RowOrder
from shardwright.data.prepare import open_updates, prepare
from shardwright.layout.axes import Axes
from shardwright.layout.size_rules import row_multiple
from shardwright.train.rows_done import SavedPosition, resume_rows

Ready = Callable[[UpdateBatch], UpdateBatch]


@dataclass(frozen=True)
class RunData:
    """The data of one rank. fingerprint, eval_fingerprint: of training and validation rows. updates: length of the run."""

    run: RunFile
    order: RowOrder
    loader: Loader
    validation: Loader | None
    fingerprint: str
    eval_fingerprint: str = ""

    @property
    def updates(self) -> int:
        return self.order.total_updates

    def resume_rows(self, saved: SavedPosition) -> list[str]:
        """Lets the rows begin after those that a checkpoint has done; see `rows_done.resume_rows`."""
        return resume_rows(self.order, saved, self.run, self.fingerprint)

    def updates_from(self, first: int, device: torch.device, ready: Ready | None = None) -> Iterator[UpdateBatch]:
        """This rank's part of update `first` (0-based) and of later updates, prepared while earlier updates run on `device`.

        ready: what the thread that prepares does with each, for example `UpdateEngine.inputs.ready`.
        """
        return prefetch(self.loader, first, device=device, ready=ready)

    def evaluation(self, device: torch.device, ready: Ready) -> Iterator[UpdateBatch]:
        """This rank's part of the validation split; for a GPU prepared ahead, as in `updates_from`."""
        if self.validation is None:
            return iter(())
        return prefetch(self.validation, device=device, ready=ready) if device.type == "cuda" else iter(self.validation)


class Widths(TypedDict):
    """Arguments of `Loader` that decide the width of microbatches."""

    bucket_multiple: int | None
    one_width: bool


def widths(run: RunFile, axes: Axes) -> Widths:
    """The widths of microbatches under a layout; the objective does not depend on them."""
    bucket = run.data.batching == "bucket"
    return {"bucket_multiple": row_multiple(run, axes) if bucket else None, "one_width": axes.pp > 1}


def open_data(run: RunFile, axes: Axes, rank: int) -> RunData:
    """Opens the data that `prepare` has written, and writes it where that has not happened yet."""
    train, validation = open_updates(run), prepare(run, "validation")
    t, rows = run.training, run.training.per_device_train_batch_size
    place, shape = {"data_rank": axes.data_rank(rank), "data_ranks": axes.data_ranks}, widths(run, axes)
    loader = Loader(train.rows, train.order, microbatch_rows=rows, pad_id=train.pad_id, **place, **shape)
    evaluation = None
    if validation is not None:
        rows = t.per_device_eval_batch_size or rows
        order = evaluation_order(validation.table, rows * axes.data_ranks, run.data.batching == "bucket")
        evaluation = Loader(validation.table, order, microbatch_rows=rows, pad_id=validation.pad_id, **place, **shape)
    eval_fingerprint = validation.fingerprint if validation is not None else ""
    return RunData(run, train.order, loader, evaluation, train.fingerprint, eval_fingerprint)

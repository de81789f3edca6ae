"""The data of a run as one rank sees it: updates, the validation split, and their fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.schema import RunFile
from shardwright.data.loader import Loader, UpdateBatch, evaluation_loader, prefetch
from shardwright.data.order import Order
from shardwright.data.prepare import Prepared, prepare
from shardwright.layout.axes import Axes


@dataclass(frozen=True)
class RunData:
    """What the loop needs of the data. `updates` is the length of the run."""

    order: Order
    loader: Loader
    validation: Loader | None
    fingerprint: str

    @property
    def updates(self) -> int:
        return self.order.total_updates

    def updates_from(self, first: int) -> Iterator[UpdateBatch]:
        """This rank's part of update `first` (0-based) and of those after it, each made while the one before runs."""
        return prefetch(self.loader, first)


def make_order(run: RunFile, train: Prepared) -> Order:
    """Which rows each update of this run trains on."""
    t = run.training
    return Order(
        len(train.table),
        global_batch_size=t.global_batch_size,
        seed=t.seed,
        shuffle=run.data.shuffle,
        max_steps=t.max_steps,
        num_train_epochs=t.num_train_epochs,
    )


def open_data(run: RunFile, axes: Axes, rank: int) -> RunData:
    """Opens what `prepare` has made (or makes it, where nobody has yet)."""
    train, validation = prepare(run, "train"), prepare(run, "validation")
    assert train is not None, "data.train names at least one file"
    t, rows = run.training, run.training.per_device_train_batch_size
    place = {
        "data_rank": axes.data_rank(rank),
        "data_ranks": axes.data_ranks,
        "pad_id": train.pad_id,
        "max_length": run.data.max_length,
    }
    order = make_order(run, train)
    evaluation = None
    if validation is not None:
        evaluation = evaluation_loader(
            validation.table, microbatch_rows=t.per_device_eval_batch_size or rows, **place
        )
    return RunData(
        order, Loader(train.table, order, microbatch_rows=rows, **place), evaluation, train.fingerprint
    )

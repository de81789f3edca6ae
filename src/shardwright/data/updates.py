"""The rows of a run and their order: mixture of sources, shuffling, bucketing, or a stream. Torch is not needed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.config.schema import RunFile
from shardwright.data.bucketing import bucketed
from shardwright.data.mixture import Mixture, mixed
from shardwright.data.order import Int64, Order
from shardwright.data.prepare import Prepared, check_vocabulary, open_windows, pad_of, prepare
from shardwright.data.streaming.stream_rows import StreamOrder, StreamRows
from shardwright.data.table import Table


@dataclass(frozen=True)
class Updates:
    """The rows of a run, and which of them each update trains on. fingerprint: of the rows, or of a stream's settings."""

    rows: Table | StreamRows
    order: Order
    pad_id: int
    fingerprint: str


def open_updates(run: RunFile) -> Updates:
    """The rows of data.train, found or made now, or the stream that gives them."""
    if run.data.streaming:
        return _of_stream(run)
    train = prepare(run)
    assert train is not None, "data.train names at least one file"
    return Updates(train.table, make_order(run, train), train.pad_id, train.fingerprint)


def _of_stream(run: RunFile) -> Updates:
    windows, t = open_windows(run), run.training

    def check(table: Table) -> None:
        check_vocabulary(run, windows.tokenizer_path, table.documents.meta)

    assert t.max_steps is not None, "the gate refuses a stream of a number of epochs"
    rows = StreamRows(windows, t.seed if run.data.shuffle else None, check)
    order = StreamOrder(rows, global_batch_size=t.global_batch_size, max_steps=t.max_steps)
    return Updates(rows, order, pad_of(run, windows.special()), windows.fingerprint)


def make_order(run: RunFile, train: Prepared) -> Order:
    """Which rows each update of this run trains on."""
    return order_over(run, len(train.table), train.table.real_tokens, train.mixture)


def order_over(run: RunFile, rows: int, real_tokens: Callable[[Int64], Int64], mixture: Mixture | None) -> Order:
    """The same for `rows` rows made in any way; `real_tokens` gives the tokens of some of them."""
    t, data = run.training, run.data
    order = Order(
        rows if mixture is None else len(mixture),
        bucket_updates=data.bucket_updates,
        global_batch_size=t.global_batch_size,
        seed=t.seed,
        shuffle=data.shuffle,
        max_steps=t.max_steps,
        num_train_epochs=t.num_train_epochs,
        drop_last=data.drop_last,
    )
    return bucketed(mixed(order, mixture), real_tokens)

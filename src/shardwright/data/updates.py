"""The order of a run's rows: mixture of sources, shuffling and bucketing put together. Torch is not needed for it."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.config.schema import RunFile
from shardwright.data.bucketing import bucketed
from shardwright.data.mixture import Mixture, mixed
from shardwright.data.order import Int64, Order
from shardwright.data.prepare import Prepared


def make_order(run: RunFile, train: Prepared) -> Order:
    """Which rows each update of this run trains on."""
    return order_over(run, len(train.table), train.table.real_tokens, train.mixture)


def order_over(
    run: RunFile, rows: int, real_tokens: Callable[[Int64], Int64], mixture: Mixture | None
) -> Order:
    """The same for `rows` rows made in any way; `real_tokens` gives the tokens of some of them."""
    t, data = run.training, run.data
    order = Order(
        rows if mixture is None else len(mixture),
        global_batch_size=t.global_batch_size,
        seed=t.seed,
        shuffle=data.shuffle,
        max_steps=t.max_steps,
        num_train_epochs=t.num_train_epochs,
        drop_last=data.drop_last,
    )
    return bucketed(mixed(order, mixture), real_tokens, data.bucket_updates)

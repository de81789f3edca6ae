"""Known fault A50 and siblings: a run that goes on with another batch size, length, megabatch or order takes the rows left."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardwright.config import load_run_file
from shardwright.data.mixture import Mixture
from shardwright.data.order import FILLER, Int64, RowOrder
from shardwright.train.rows_done import SavedPosition, resume_rows

SETTINGS = {
    "training.global_batch_size": 4, "training.max_steps": None, "training.num_train_epochs": 1.0, "training.seed": 5,
    "data.shuffle": True, "data.drop_last": False, "data.bucket_updates": 1,
}  # fmt: skip


def lengths(rows: Int64) -> Int64:
    return rows * 7919 % 97 + 1


def order_of(rows: int, size: int, megabatch: int = 1, mixture: Mixture | None = None, **options: Any) -> RowOrder:
    options = {"seed": 5} | options
    return RowOrder(rows, global_batch_size=size, bucket_updates=megabatch, mixture=mixture, lengths=lengths, **options)


def after(order: RowOrder, former: RowOrder, update: int, trusted: bool = False) -> RowOrder:
    """`order`, which goes on where `former` was before `update`, through a checkpoint."""
    order.seek(update, json.loads(json.dumps(former.cursor(update))), trusted)
    return order


def rows_of(order: RowOrder, first: int, end: int | None = None) -> list[int]:
    updates = range(first, order.total_updates if end is None else end)
    return [row for u in updates for row in order.update_rows(u).tolist() if row != FILLER]


def test_another_batch_size_goes_on_behind_the_rows_that_are_done() -> None:
    """10 rows in order: two updates of 4, then updates of 3. The next rows are 8 and 9 of the epoch, then 0."""
    order = after(order_of(10, 3, shuffle=False, max_steps=4), order_of(10, 4, shuffle=False, max_steps=9), 2)
    assert [order.update_rows(u).tolist() for u in (2, 3)] == [[8, 9, 0], [1, 2, 3]]
    assert order.total_updates == 4 and [order.epoch(u) for u in (2, 3, 4)] == [0.8, 1.1, 1.4]
    with pytest.raises(IndexError, match="update 1 of a run of 4"):
        order.update_rows(1)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"max_steps": 6}])
def test_a_run_whose_last_update_was_part_filled_is_made_longer(length: dict[str, Any], drop: bool) -> None:
    """10 rows, 4 an update: 4, 4 and 2 (dropped: 4 and 4), then another epoch, each row once in it."""
    first = order_of(10, 4, num_train_epochs=1, drop_last=drop)
    order = after(order_of(10, 4, **length), first, first.total_updates)
    seen = rows_of(first, 0) + rows_of(order, first.total_updates)
    assert Counter(seen[:10]) == Counter(range(10))
    assert Counter(seen[10:20]) == Counter(range(10)) or (len(seen) > 20 and set(seen[10:20]) == set(range(10)))
    assert order.total_updates == (5 if drop and "num_train_epochs" in length else 6)
    assert order.epoch(order.total_updates) == (2.0 if "num_train_epochs" in length else 2.4 if drop else 2.2)


def test_half_epochs_and_steps_add_up() -> None:
    """1 epoch, 1.5, a number of steps and 3 epochs, 4 and 2 rows an update: three epochs of whole rows."""
    seen: list[int] = []
    order, update = order_of(10, 4, num_train_epochs=1), 0
    for size, length in ((4, {"num_train_epochs": 1.5}), (2, {"max_steps": 9}), (4, {"num_train_epochs": 3})):
        seen += rows_of(order, update)
        update = order.total_updates
        order = after(order_of(10, size, **length), order, update)
    seen += rows_of(order, update)
    assert [sorted(seen[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3 and len(seen) == 30


def test_fewer_epochs_than_are_done_leave_nothing_to_do() -> None:
    order = after(order_of(10, 4, num_train_epochs=0.5), order_of(10, 4, num_train_epochs=2), 4)
    assert order.total_updates == 4 and order.epoch(4) == 1.6


@pytest.mark.parametrize("trial", [pytest.param(n, marks=[pytest.mark.slow] if n >= 12 else []) for n in range(60)])
def test_rows_come_once_in_each_epoch_whatever_changes(trial: int) -> None:
    """Batch sizes, megabatches and lengths drawn anew at up to five resumes, within megabatches, epochs and last updates."""
    draw = random.Random(trial)
    rows, seen, update, epochs = draw.choice([3, 7, 10, 24, 50]), [], 0, 0.0
    former: RowOrder | None = None
    for _ in range(draw.choice([2, 3, 5])):
        size, megabatch = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([1, 2, 3, 5])
        epochs += draw.choice([0.5, 1, 2])
        order = order_of(rows, size, megabatch, num_train_epochs=epochs)
        order = order if former is None else after(order, former, update)
        stop = draw.randint(update, order.total_updates)
        again = draw.randint(update, stop)  # an unchanged resume gives the updates of a run that was not stopped
        same = after(order_of(rows, size, megabatch, num_train_epochs=epochs), order, again)
        assert rows_of(same, again) == rows_of(order, again)
        seen += rows_of(order, update, stop)
        former, update = order, stop
    assert former is not None
    whole = int(epochs) + 2
    seen += rows_of(after(order_of(rows, 3, 2, num_train_epochs=whole), former, update), update)
    assert all(sorted(seen[e * rows : (e + 1) * rows]) == list(range(rows)) for e in range(whole))
    assert len(seen) == whole * rows


def test_sources_with_weights_keep_their_counts() -> None:
    """Rows 0 to 3 half as often, 4 to 9 twice: 2 + 12 rows an epoch, with the batch size changed in the first of two."""
    mixture = Mixture([0, 4, 10], [0.5, 2], seed=5)
    first = order_of(14, 4, mixture=mixture, num_train_epochs=2)
    second = after(order_of(14, 3, mixture=mixture, num_train_epochs=2), first, 2)
    seen = rows_of(first, 0, 2) + rows_of(second, 2)
    for epoch in (seen[:14], seen[14:]):
        assert [Counter(epoch)[row] for row in range(4, 10)] == [2] * 6 and sum(row < 4 for row in epoch) == 2
    assert sorted(row for row in seen if row < 4) == [0, 1, 2, 3]


def _former(order: RowOrder, update: int, cursor: Any = "its own", **settings: Any) -> SavedPosition:
    own = order.cursor(update) if cursor == "its own" else cursor
    return SavedPosition(update, own, "rows", SETTINGS | settings)


def _run(**training: Any) -> Any:
    values = {"training.num_train_epochs": 2.0, "training.max_steps": None, "training.global_batch_size": 4}
    values |= {f"training.{key}": value for key, value in training.items()}
    return load_run_file("examples/tiny.yaml", values).run


def test_nothing_is_said_of_a_run_that_goes_on_unchanged() -> None:
    former = order_of(10, 4, 2, num_train_epochs=2)
    assert resume_rows(order_of(10, 4, 2, num_train_epochs=2), _former(former, 3), _run(), "rows") == []


def test_what_has_changed_is_said_with_numbers() -> None:
    former = _former(order_of(10, 4, num_train_epochs=1), 2)
    lines = resume_rows(order_of(10, 2, num_train_epochs=2), former, _run(lr_scheduler_type="cosine"), "rows")
    assert lines == [
        "8 rows are done, and update 2 begins with row 9 of 10 of epoch 1; no row is repeated or skipped.",
        "The run now has 8 updates instead of 3, and lr_scheduler_type cosine follows the new number.",
    ]
    former = _former(order_of(10, 4, num_train_epochs=1), 3)
    lines = resume_rows(order_of(10, 4, num_train_epochs=2), former, _run(lr_scheduler_type="constant"), "rows")
    assert lines == [
        "10 rows are done, and update 3 begins with epoch 2.",
        "The run now has 6 updates instead of 3.",
    ]
    former = _former(order_of(10, 4, num_train_epochs=2), 1)
    (line,) = resume_rows(order_of(12, 4, max_steps=5), former, _run(), "other rows")
    assert "row 5 of 12 of epoch 1. The data has changed: some rows may be repeated or skipped." in line


@pytest.mark.parametrize("megabatch", [1, 3])
@pytest.mark.parametrize("change", [{"seed": 6}, {"shuffle": False}])
def test_rows_that_another_order_repeats_are_counted(change: dict[str, Any], megabatch: int) -> None:
    """Counted here by training the rest of the epoch: as many rows come twice in it as do not come."""
    first = order_of(30, 4, megabatch, num_train_epochs=1)
    done = rows_of(first, 0, 4)
    second = order_of(30, 4, megabatch, num_train_epochs=1, **change)
    (line,) = resume_rows(second, _former(first, 4), _run(), "rows")
    counts = Counter(done + rows_of(second, 4))
    twice = sum(count == 2 for count in counts.values())
    assert 0 < twice == 30 - len(counts)
    assert (
        f"row 17 of 30 of epoch 1. The order of its rows has changed: {twice} rows are repeated, and {twice} are"
        in line
    )


def test_a_checkpoint_without_the_number_of_rows_is_read_as_it_was_meant() -> None:
    """Its updates times its batch size; the same rows where nothing has changed, within a megabatch too."""
    whole = order_of(24, 4, 3, num_train_epochs=2)
    order = order_of(24, 4, 3, num_train_epochs=2)
    old = {"training.num_train_epochs": 2.0, "data.bucket_updates": 3}
    assert resume_rows(order, _former(whole, 4, None, **old), _run(), "rows") == []
    assert rows_of(order, 4) == rows_of(whole, 4)
    order = order_of(24, 6, 2, num_train_epochs=2)
    lines = resume_rows(order, _former(whole, 4, None, **old), _run(), "rows")
    assert (
        "16 rows are done, and update 4 begins with row 17 of 24 of epoch 1; no row is repeated or skipped" in lines[0]
    )
    assert "is computed as updates times batch size: checkpoints of old versions" in lines[1]
    assert sorted((rows_of(whole, 0, 4) + rows_of(order, 4))[:24]) == list(range(24))


def test_the_checkpoint_of_a_stream_says_how_many_rows_are_done() -> None:
    cursor = {"position": 13, "window": 1, "first": 8, "place": {}, "fingerprint": "f", "passed": "p"}
    order = order_of(10, 4, num_train_epochs=2)
    (line,) = resume_rows(order, _former(order, 3, cursor), _run(), "rows")
    assert "13 rows are done, and update 3 begins with row 4 of 10 of epoch 2. The data has changed" in line
    assert order.epoch(order.total_updates) == 2.0
    assert np.array_equal(order.update_rows(3), order.rows_at(np.arange(13, 17), order.segment))

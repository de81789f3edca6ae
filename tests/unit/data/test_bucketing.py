"""Known faults A22 A23 A24 A25 A120: rows of similar lengths together, the same updates on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.tables import numbered, table

from shardwright.config import load_run_file
from shardwright.data.arrays import FILLER
from shardwright.data.loader import Loader, evaluation_order
from shardwright.data.order import RowOrder
from shardwright.data.packing import RowRules
from shardwright.data.table import Table
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.layout.legality import check_run
from shardwright.layout.size_rules import row_multiple


def rows_of(count: int, seed: int = 0, longest: int = 96) -> Table:
    lengths = np.random.default_rng(seed).integers(2, longest + 1, count).tolist()
    return table(numbered(lengths), RowRules(longest, "split"))


def order_of(rows: int, batch: int, **options: Any) -> RowOrder:
    options = {"num_train_epochs": 1} | options  # with `lengths`, rows are sorted in megabatches
    return RowOrder(rows, global_batch_size=batch, seed=5, **options)


def loaders(found: Table, order: RowOrder, ranks: int, rows: int = 1, **widths: Any) -> list[Loader]:
    widths = {"bucket_multiple": 1} | widths
    return [
        Loader(found, order, data_rank=r, data_ranks=ranks, microbatch_rows=rows, pad_id=0, **widths)
        for r in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (1, 4), (2, 2), (3, 1), (4, 1), (3, 4)])
@pytest.mark.parametrize("megabatch", [1, 3])
def test_an_update_holds_the_same_rows_on_every_layout(ranks: int, rows: int, megabatch: int) -> None:
    """A22 A23: the rows and targets of an update do not depend on ranks, microbatches or widths; all have equally many."""
    found = rows_of(100)
    order = order_of(100, 12, bucket_updates=megabatch, lengths=found.real_tokens)
    (reference,) = loaders(found, order, 1, 12)
    parts = loaders(found, order, ranks, rows, bucket_multiple=8)
    for number in range(len(reference)):
        expected, batches = reference.update(number), [loader.update(number) for loader in parts]
        assert {(b.row_ids, b.target_tokens, b.real_tokens) for b in batches} == {
            (expected.row_ids, expected.target_tokens, expected.real_tokens)
        }
        assert {len(b.microbatches) for b in batches} == {12 // (ranks * rows)}
        held = sorted((m.index, m.row_ids) for b in batches for m in b.microbatches)
        assert tuple(row for _, ids in held for row in ids) == expected.row_ids
        for m in (m for b in batches for m in b.microbatches):
            for b, row in enumerate(m.row_ids):
                tokens, labels = found.row(row) if row != FILLER else (np.empty(0), np.empty(0))
                assert m.input_ids[b, : len(tokens)].tolist() == tokens.tolist()
                assert m.labels[b, : len(tokens)].tolist() == labels.tolist()
                assert (m.labels[b, len(tokens) :] == -100).all()


def test_one_update_megabatch_changes_no_objective() -> None:
    """With bucket_updates 1 an update holds exactly the rows that it has under pad."""
    found, order = rows_of(50), order_of(50, 8)
    (plain,) = loaders(found, order, 1, bucket_multiple=None)
    (sorted_rows,) = loaders(found, order_of(50, 8, lengths=found.real_tokens), 1)
    for number in range(len(plain)):
        a, b = plain.update(number), sorted_rows.update(number)
        assert sorted(a.row_ids) == sorted(b.row_ids) and a.divisor == b.divisor
        assert b.slots < a.slots == 8 * 96


@pytest.mark.parametrize("multiple", [1, 6, 32])
def test_widths_are_the_longest_row_rounded_up(multiple: int) -> None:
    """A120: slots are those of all ranks' microbatches, whatever their widths; they are never wider than max_length."""
    found = rows_of(64)
    parts = loaders(found, order_of(64, 16), 2, 2, bucket_multiple=multiple)
    for number in range(4):
        batches = [loader.update(number) for loader in parts]
        made = sorted((m for b in batches for m in b.microbatches), key=lambda m: m.index)
        widths = [m.input_ids.shape[1] for m in made]
        longest = [max(len(found.row(row)[0]) for row in m.row_ids) for m in made]
        assert widths == [-(-n // multiple) * multiple for n in longest]
        assert max(widths) <= 96
        assert {b.slots for b in batches} == {2 * sum(widths)}
        assert {b.real_tokens for b in batches} == {sum(len(found.row(r)[0]) for r in batches[0].row_ids)}
        assert longest == sorted(longest, reverse=True)
        # microbatches of the two ranks that run at the same time are neighbours in the sorted update
        gaps = [abs(a.input_ids.shape[1] - b.input_ids.shape[1]) for a, b in zip(*(b.microbatches for b in batches))]
        assert sum(gaps) <= max(widths) - min(widths)


def test_a_pipeline_has_one_width() -> None:
    found = rows_of(32)
    for loader in loaders(found, order_of(32, 8), 2, 2, bucket_multiple=4, one_width=True):
        for number in range(4):
            batch = loader.update(number)
            longest = max(len(found.row(row)[0]) for row in batch.row_ids)
            assert {m.input_ids.shape[1] for m in batch.microbatches} == {-(-longest // 4) * 4}


@pytest.mark.parametrize("megabatch", [1, 2, 5, 50])
def test_epochs_hold_every_row_once_in_other_updates(megabatch: int) -> None:
    """A24 A25: three epochs of 24 rows, 4 an update: every row once in each; other updates in each; again the same."""
    found = rows_of(24)
    order = order_of(24, 4, num_train_epochs=3, bucket_updates=megabatch, lengths=found.real_tokens)
    updates = [frozenset(order.update_rows(u).tolist()) for u in range(18)]
    epochs = [updates[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(row for u in epoch for row in u) == list(range(24)) for epoch in epochs)
    assert set(epochs[0]) != set(epochs[1]) != set(epochs[2])
    again = order_of(24, 4, num_train_epochs=3, bucket_updates=megabatch, lengths=found.real_tokens)
    assert [frozenset(again.update_rows(u).tolist()) for u in range(18)] == updates


@pytest.mark.parametrize("rows", [3, 21, 22])
def test_no_row_meets_itself_where_epochs_do_not_end_with_updates(rows: int) -> None:
    """A24: every row as often as there are epochs; where an update holds two epochs its rows are those without megabatches."""
    found, options = rows_of(rows), {"num_train_epochs": 4, "bucket_updates": 3}
    plain, order = order_of(rows, 4, **options), order_of(rows, 4, **options, lengths=found.real_tokens)
    updates = [order.update_rows(u).tolist() for u in range(order.total_updates)]
    assert sorted(row for u in updates for row in u if row != FILLER) == sorted(list(range(rows)) * 4)
    for number, update in enumerate(updates):
        crosses = number * 4 // rows != (number * 4 + 3) // rows
        assert not crosses or update == plain.update_rows(number).tolist()
        assert crosses or FILLER in update or len(set(update)) == 4


def test_megabatches_save_padding_and_long_rows_come_at_any_time() -> None:
    found = rows_of(512)
    slots = {}
    for megabatch in (1, 16):
        order = order_of(512, 8, bucket_updates=megabatch, lengths=found.real_tokens)
        (loader,) = loaders(found, order, 1, 4)
        slots[megabatch] = sum(loader.counts(u)[0].slots for u in range(len(loader)))
        longest = [max(found.real_tokens(order.update_rows(u))) for u in range(16)]
        assert megabatch == 1 or longest != sorted(longest, reverse=True)
    real = found.counts["row_tokens"]
    assert 1 - real / slots[16] < 0.05 < 0.15 < 1 - real / slots[1]


def test_a_part_filled_last_update_keeps_its_rows() -> None:
    """A10: 21 rows, 4 an update: the sixth holds the row that it would hold without megabatches, and three fillers."""
    found = rows_of(21)
    plain = order_of(21, 4, bucket_updates=4)
    order = order_of(21, 4, bucket_updates=4, lengths=found.real_tokens)
    assert order.update_rows(5).tolist() == plain.update_rows(5).tolist()
    (loader,) = loaders(found, order, 1, 2)
    last = loader.update(5)
    assert last.row_ids[1:] == (FILLER,) * 3
    assert [m.input_ids.shape for m in last.microbatches] == [(2, last.real_tokens), (2, 1)]
    assert sorted(r for u in range(6) for r in order.update_rows(u).tolist() if r != FILLER) == list(range(21))


def test_a_last_update_can_be_dropped() -> None:
    """A10: 21 rows, 4 an update: five updates, one row said to be dropped; nothing left is refused."""
    order = order_of(21, 4, drop_last=True)
    assert (order.total_updates, order.dropped, order.epoch(5)) == (5, 1, 20 / 21)
    assert all(FILLER not in order.update_rows(u) for u in range(5))
    assert order_of(20, 4, drop_last=True).dropped == 0
    with pytest.raises(ConfigError, match=r"drop_last leaves no update: 3 rows, training.global_batch_size 4"):
        order_of(3, 4, drop_last=True)


def test_a_late_update_reads_the_lengths_of_its_megabatch_only() -> None:
    """Resume in O(1): update 10 million of a billion rows asks for one megabatch's lengths."""
    asked: list[int] = []

    def lengths(rows: np.ndarray) -> np.ndarray:
        asked.append(len(rows))
        return rows % 97

    order = order_of(10**9, 64, num_train_epochs=None, max_steps=10**8, bucket_updates=16, lengths=lengths)
    assert len(set(order.update_rows(10**7).tolist())) == 64
    assert asked == [16 * 64]


def test_evaluation_rows_are_sorted_and_counted_once() -> None:
    """A99: each row once on 1, 2 and 3 ranks, with the padding of sorted rows."""
    found = rows_of(45)
    for ranks in (1, 2, 3):
        order = evaluation_order(found, 2 * ranks, bucket=True)
        made = [list(loader) for loader in loaders(found, order, ranks, 2, bucket_multiple=4)]
        assert len({len(batches) for batches in made}) == 1
        rows = [row for batches in made for b in batches for m in b.microbatches for row in m.row_ids]
        assert sorted(row for row in rows if row != FILLER) == list(range(45))
        assert sum(b.target_tokens for b in made[0]) == found.counts["targets"]
        assert sum(b.slots for b in made[0]) < 1.25 * found.counts["row_tokens"]


@pytest.mark.parametrize(
    ("options", "axes", "multiple"),
    [
        ({}, Axes(), 1),
        ({}, Axes(pp=2, dp_shard=2), 1),
        ({}, Axes(cp=2), 4),
        ({"parallelism.cp_load_balance": False}, Axes(cp=2), 2),
        ({}, Axes(tp=3), 3),
        ({"parallelism.sequence_parallel": False}, Axes(tp=3), 1),
        ({}, Axes(cp=2, tp=3), 12),
        ({}, Axes(cp=2, tp=4), 8),
    ],
)
def test_widths_divide_by_what_the_layout_cuts(options: dict[str, Any], axes: Axes, multiple: int) -> None:
    run = load_run_file("examples/tiny.yaml", options).run
    assert row_multiple(run, axes) == multiple


def test_a_max_length_that_the_layout_cannot_cut_is_refused() -> None:
    """No width exceeds max_length, because it is a multiple itself: the gate says so before ranks start."""
    for batching in ("bucket", "pack"):
        options = {"data.batching": batching, "data.max_length": 90, "parallelism.cp_size": 4}
        with pytest.raises(ConfigError, match=r"max_length = 90 is not divisible by 2 x cp_size = 8"):
            check_run(load_run_file("examples/tiny.yaml", options), 4)

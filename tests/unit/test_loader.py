"""Known faults A06 A07 A09 A10 A22 A23 A24 A48 A51 A99 A116 A120: batches, counts, slices by data rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shardwright.data.loader import Loader, UpdateBatch, evaluation_loader, prefetch
from shardwright.data.order import Order
from shardwright.errors import ConfigError, DataError

Int64 = npt.NDArray[np.int64]
PAD = 99


class Lists:
    """A table of rows given as lists of tokens; `masked` rows have no targets."""

    def __init__(self, rows: list[list[int]], masked: frozenset[int] = frozenset()) -> None:
        self.rows, self.masked = rows, masked

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, row: int) -> tuple[Int64, Int64]:
        tokens = self.rows[row]
        labels = [-100] * len(tokens) if row in self.masked else [*tokens[1:], -100]
        return np.array(tokens), np.array(labels)

    def real_tokens(self, rows: Int64) -> Int64:
        return np.array([len(self.rows[row]) for row in rows])

    def target_tokens(self, rows: Int64) -> Int64:
        return np.array([0 if row in self.masked else len(self.rows[row]) - 1 for row in rows])


def uneven(count: int) -> Lists:
    """Rows of 2 to 8 tokens; token = 10 * row + position, so every token names its row."""
    return Lists([[10 * row + position for position in range(2 + row * 5 % 7)] for row in range(count)])


def make(
    table: Lists,
    *,
    rank: int = 0,
    ranks: int = 1,
    rows: int = 1,
    global_batch: int = 4,
    length: int = 8,
    shuffle: bool = True,
    **run: float,
) -> Loader:
    run = run or {"num_train_epochs": 1}
    order = Order(len(table), global_batch_size=global_batch, seed=5, shuffle=shuffle, **run)  # type: ignore[arg-type]
    return Loader(
        table, order, data_rank=rank, data_ranks=ranks, microbatch_rows=rows, pad_id=PAD, max_length=length
    )


def whole(batches: list[UpdateBatch]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The update put together again from all data ranks, in the order of the microbatches' indices."""
    parts = sorted((part for batch in batches for part in batch.microbatches), key=lambda part: part.index)
    ids = torch.cat([part.input_ids for part in parts])
    return (
        ids,
        torch.cat([part.labels for part in parts]),
        tuple(row for part in parts for row in part.row_ids),
    )


def test_a_row_of_five_tokens_has_four_targets() -> None:
    """A06: two rows of 5 without padding have 8 targets, not 10."""
    batch = make(Lists([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), rows=2, global_batch=2, length=5).update(0)
    assert batch.target_tokens == 8
    assert int((batch.microbatches[0].labels != -100).sum()) == 8


def test_labels_are_shifted_once_and_within_their_row() -> None:
    """A07: label t is token t + 1 of the same row; another row's first token is nobody's label."""
    table = Lists([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
    part = make(table, rows=2, global_batch=2, length=8, shuffle=False).update(0).microbatches[0]
    assert part.input_ids.tolist() == [[11, 12, 13, 14, 15, 16, PAD, PAD], [21, 22, 23, 24, 25, 26, PAD, PAD]]
    assert part.labels.tolist() == [
        [12, 13, 14, 15, 16, -100, -100, -100],
        [22, 23, 24, 25, 26, -100, -100, -100],
    ]
    table.rows[1][0] = 77
    again = make(table, rows=2, global_batch=2, length=8, shuffle=False).update(0).microbatches[0]
    assert again.labels[0].tolist() == part.labels[0].tolist()
    assert part.input_ids.dtype == part.labels.dtype == torch.int64


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_an_update_is_the_same_at_every_world_size(ranks: int, rows: int) -> None:
    """A22 A24 A48 A51: same rows, tensors and counts, and the same number of microbatches on each rank."""
    table = uneven(19)
    loaders = [make(table, rank=rank, ranks=ranks, rows=rows, global_batch=8) for rank in range(ranks)]
    reference = make(table, rows=8, global_batch=8)
    assert len(reference) == 3
    for number in range(3):
        batches = [loader.update(number) for loader in loaders]
        expected = reference.update(number)
        ids, labels, row_ids = whole(batches)
        assert torch.equal(ids, expected.microbatches[0].input_ids)
        assert torch.equal(labels, expected.microbatches[0].labels)
        assert row_ids == expected.row_ids
        for batch in batches:
            assert len(batch.microbatches) == 8 // (ranks * rows)
            assert (batch.row_ids, batch.target_tokens) == (expected.row_ids, expected.target_tokens)
            assert (batch.real_tokens, batch.slots) == (expected.real_tokens, 64)


def test_microbatch_k_of_rank_d_has_index_k_times_ranks_plus_d() -> None:
    indices = [
        [part.index for part in make(uneven(8), rank=d, ranks=2, global_batch=8).update(0).microbatches]
        for d in (0, 1)
    ]
    assert indices == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_targets_are_counted_over_the_whole_update() -> None:
    """The count from the table equals the labels that all ranks hold, though no rank holds them all."""
    table = uneven(19)
    for number in range(3):
        batches = [make(table, rank=rank, ranks=4, global_batch=8).update(number) for rank in range(4)]
        held = [sum(int((part.labels != -100).sum()) for part in batch.microbatches) for batch in batches]
        assert len(set(held)) > 1
        assert {batch.target_tokens for batch in batches} == {sum(held)}


def test_three_counters_have_three_names() -> None:
    """A120: rows of 8 and 4 tokens in 8 slots each: slots 16, real 12, targets 7 + 3."""
    batch = make(Lists([list(range(8)), list(range(4))]), global_batch=2, rows=1, ranks=2).update(0)
    assert (batch.slots, batch.real_tokens, batch.target_tokens) == (16, 12, 10)


def test_the_last_update_weighs_what_its_targets_weigh() -> None:
    """A09 A10 A23: 5 rows, 4 an update: the second holds one row and three fillers and counts one row."""
    table = uneven(5)
    batches = [make(table, rank=rank, ranks=4).update(1) for rank in range(4)]
    present = [row for row in batches[0].row_ids if row != -1]
    assert len(present) == 1 and batches[0].row_ids.count(-1) == 3
    assert {batch.target_tokens for batch in batches} == {len(table.rows[present[0]]) - 1}
    assert {batch.real_tokens for batch in batches} == {len(table.rows[present[0]])}
    assert {batch.slots for batch in batches} == {32}
    filler = batches[3].microbatches[0]
    assert filler.row_ids == (-1,)
    assert filler.input_ids.tolist() == [[PAD] * 8] and filler.labels.tolist() == [[-100] * 8]
    seen = [row for number in (0, 1) for row in make(table).update(number).row_ids if row != -1]
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("rows", "ranks"), [(5, 2), (3, 4), (8, 2), (1, 3)])
def test_evaluation_counts_each_row_once(rows: int, ranks: int) -> None:
    """A99 A116: equally many microbatches on every rank, each row once, fillers count nothing."""
    table = uneven(rows)
    loaders = [
        evaluation_loader(
            table, data_rank=rank, data_ranks=ranks, microbatch_rows=2, pad_id=PAD, max_length=8
        )
        for rank in range(ranks)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(found) for found in batches} == {-(-rows // (2 * ranks))}
    assert all(len(batch.microbatches) == 1 for found in batches for batch in found)
    seen = [row for step in zip(*batches) for row in whole(list(step))[2]]
    assert [row for row in seen if row != -1] == list(range(rows))
    targets = sum(
        int((part.labels != -100).sum())
        for found in batches
        for batch in found
        for part in batch.microbatches
    )
    assert (
        targets == sum(len(row) - 1 for row in table.rows) == sum(batch.target_tokens for batch in batches[0])
    )


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    """A23: 5 rows on 4 ranks, when the loader is made."""
    with pytest.raises(ConfigError, match="global_batch_size = 5 is not a multiple of 4"):
        make(uneven(9), ranks=4, global_batch=5)


def test_an_update_without_targets_names_itself() -> None:
    table = Lists(uneven(6).rows, masked=frozenset({2, 3}))
    loader = make(table, global_batch=2, shuffle=False)
    assert loader.update(0).target_tokens == 1 + 6
    with pytest.raises(DataError, match=r"Update 1 has no target token \(rows 2, 3\)"):
        loader.update(1)


def test_prefetch_gives_the_updates_in_order_and_stops() -> None:
    loader = make(uneven(19), global_batch=4, max_steps=9)
    assert [batch.row_ids for batch in prefetch(loader, 2)] == [
        loader.update(number).row_ids for number in range(2, 9)
    ]
    stream = prefetch(loader, depth=2)
    assert next(stream).update == 0
    stream.close()


def test_prefetch_raises_where_the_update_would_have_come() -> None:
    stream = prefetch(make(Lists(uneven(6).rows, masked=frozenset({2, 3})), global_batch=2, shuffle=False))
    assert next(stream).update == 0
    with pytest.raises(DataError, match="Update 1"):
        next(stream)

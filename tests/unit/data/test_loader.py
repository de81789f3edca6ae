"""Known faults A06 A07 A09 A10 A22 A23 A24 A48 A51 A99 A116 A120: batches, counts, slices by data rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.started import LIMIT
from tests.unit.tables import table

from shardwright.data.loader import Loader, UpdateBatch, evaluation_order, prefetch
from shardwright.data.order import RowOrder
from shardwright.data.packing import RowRules
from shardwright.data.table import Table
from shardwright.errors import ConfigError

Rows = list[list[int]]
PAD = 99


def plain(rows: Rows, length: int = 8) -> Table:
    return table(rows, RowRules(length, "split"))


def uneven(count: int) -> Rows:
    """Rows of 2 to 8 tokens; token = 10 * row + position, so every token names its row."""
    return [[10 * row + position for position in range(2 + row * 5 % 7)] for row in range(count)]


def make(
    rows_or_table: Rows | Table,
    *,
    rank: int = 0,
    ranks: int = 1,
    rows: int = 1,
    global_batch: int = 4,
    length: int = 8,
    shuffle: bool = True,
    run: dict[str, Any] | None = None,
    **widths: Any,
) -> Loader:
    found = rows_or_table if isinstance(rows_or_table, Table) else plain(rows_or_table, length)
    run = run or {"num_train_epochs": 1}
    order = RowOrder(len(found), global_batch_size=global_batch, seed=5, shuffle=shuffle, **run)
    return Loader(found, order, data_rank=rank, data_ranks=ranks, microbatch_rows=rows, pad_id=PAD, **widths)


def evaluation_batches(found: Table, ranks: int) -> list[list[UpdateBatch]]:
    """The evaluation of each rank, two rows a microbatch."""
    order, place = evaluation_order(found, 2 * ranks, bucket=False), {"data_ranks": ranks, "microbatch_rows": 2}
    return [list(Loader(found, order, data_rank=rank, pad_id=PAD, **place)) for rank in range(ranks)]


def whole(batches: list[UpdateBatch]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The update put together again from all data ranks, in the order of the microbatches' indices."""
    parts = sorted((part for batch in batches for part in batch.microbatches), key=lambda part: part.index)
    ids = torch.cat([part.input_ids for part in parts])
    return (ids, torch.cat([part.labels for part in parts]), tuple(row for part in parts for row in part.row_ids))


def test_a_row_of_five_tokens_has_four_targets() -> None:
    """A06: two rows of 5 without padding have 8 targets, not 10."""
    batch = make([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], rows=2, global_batch=2, length=5).update(0)
    assert batch.target_tokens == 8
    assert int((batch.microbatches[0].labels != -100).sum()) == 8


def test_labels_are_shifted_once_and_within_their_row() -> None:
    """A07: label t is token t + 1 of the same row; another row's first token is nobody's label."""
    rows = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]]
    part = make(rows, rows=2, global_batch=2, length=8, shuffle=False).update(0).microbatches[0]
    assert part.input_ids.tolist() == [[11, 12, 13, 14, 15, 16, PAD, PAD], [21, 22, 23, 24, 25, 26, PAD, PAD]]
    assert part.labels.tolist() == [[12, 13, 14, 15, 16, -100, -100, -100], [22, 23, 24, 25, 26, -100, -100, -100]]
    rows[1][0] = 77
    again = make(rows, rows=2, global_batch=2, length=8, shuffle=False).update(0).microbatches[0]
    assert again.labels[0].tolist() == part.labels[0].tolist()
    assert part.input_ids.dtype == part.labels.dtype == torch.int64


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_an_update_is_the_same_at_every_world_size(ranks: int, rows: int) -> None:
    """A22 A24 A48 A51: same rows, tensors and counts, and the same number of microbatches on each rank."""
    data = uneven(19)
    loaders = [make(data, rank=rank, ranks=ranks, rows=rows, global_batch=8) for rank in range(ranks)]
    reference = make(data, rows=8, global_batch=8)
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
        [part.index for part in make(uneven(8), rank=d, ranks=2, global_batch=8).update(0).microbatches] for d in (0, 1)
    ]
    assert indices == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_targets_are_counted_over_the_whole_update() -> None:
    """The count from the table equals the labels that all ranks hold, though no rank holds them all."""
    data = uneven(19)
    for number in range(3):
        batches = [make(data, rank=rank, ranks=4, global_batch=8).update(number) for rank in range(4)]
        held = [sum(int((part.labels != -100).sum()) for part in batch.microbatches) for batch in batches]
        assert len(set(held)) > 1
        assert {batch.target_tokens for batch in batches} == {sum(held)}


def test_three_counters_have_three_names() -> None:
    """A120: rows of 8 and 4 tokens in 8 slots each: slots 16, real 12, targets 7 + 3."""
    batch = make([list(range(8)), list(range(4))], global_batch=2, rows=1, ranks=2).update(0)
    assert (batch.slots, batch.real_tokens, batch.target_tokens) == (16, 12, 10)


def test_the_last_update_weighs_what_its_targets_weigh() -> None:
    """A09 A10 A23: 5 rows, 4 an update: the second holds one row and three fillers and counts one row."""
    data = uneven(5)
    batches = [make(data, rank=rank, ranks=4).update(1) for rank in range(4)]
    present = [row for row in batches[0].row_ids if row != -1]
    assert len(present) == 1 and batches[0].row_ids.count(-1) == 3
    assert {batch.target_tokens for batch in batches} == {len(data[present[0]]) - 1}
    assert {batch.real_tokens for batch in batches} == {len(data[present[0]])}
    assert {batch.slots for batch in batches} == {32}
    filler = batches[3].microbatches[0]
    assert filler.row_ids == (-1,)
    assert filler.input_ids.tolist() == [[PAD] * 8] and filler.labels.tolist() == [[-100] * 8]
    seen = [row for number in (0, 1) for row in make(data).update(number).row_ids if row != -1]
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("rows", "ranks"), [(5, 2), (3, 4), (8, 2), (1, 3)])
def test_evaluation_counts_each_row_once(rows: int, ranks: int) -> None:
    """A99 A116: equally many microbatches on every rank, each row once, fillers count nothing."""
    data = uneven(rows)
    batches = evaluation_batches(plain(data), ranks)
    assert {len(found) for found in batches} == {-(-rows // (2 * ranks))}
    assert all(len(batch.microbatches) == 1 for found in batches for batch in found)
    seen = [row for step in zip(*batches) for row in whole(list(step))[2]]
    assert [row for row in seen if row != -1] == list(range(rows))
    targets = sum(
        int((part.labels != -100).sum()) for found in batches for batch in found for part in batch.microbatches
    )
    assert targets == sum(len(row) - 1 for row in data) == sum(batch.target_tokens for batch in batches[0])


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    """A23: 5 rows on 4 ranks, when the loader is made."""
    with pytest.raises(ConfigError, match="global_batch_size = 5 is not a multiple of 4"):
        make(uneven(9), ranks=4, global_batch=5)


def test_prefetch_gives_the_updates_in_order_and_stops() -> None:
    loader = make(uneven(19), global_batch=4, run={"max_steps": 9})
    assert [batch.row_ids for batch in prefetch(loader, 2)] == [loader.update(number).row_ids for number in range(2, 9)]
    stream = prefetch(loader, depth=2)
    assert next(stream).update == 0
    stream.close()


def test_prefetch_raises_where_the_update_would_have_come() -> None:
    loader = make(uneven(6), global_batch=2)
    made = loader.update

    def update(number: int) -> UpdateBatch:
        if number == 1:
            raise OSError("gone")
        return made(number)

    loader.update = update  # type: ignore[method-assign]
    stream = prefetch(loader)
    assert next(stream).update == 0
    with pytest.raises(OSError, match="gone"):
        next(stream)


def _batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_the_thread_receives_no_request_to_stop() -> None:
    """The signals of training are blocked in the thread; its handler runs in the main thread, whatever that waits for."""
    stream = prefetch(make(uneven(19)))
    next(stream)
    (thread,) = _batch_threads()
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    blocked = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    assert all(blocked >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    seen: list[threading.Thread] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread()))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [threading.main_thread()]
    stream.close()
    assert not _batch_threads()


def test_prefetch_works_ahead_while_the_caller_computes() -> None:
    """Three updates are made before they are asked for, and no more: nothing is waited for, and memory is bounded."""
    loader, made = make(uneven(40), global_batch=1), []
    update = loader.update
    loader.update = lambda number: (made.append(number), update(number))[1]  # type: ignore[method-assign]
    stream = prefetch(loader)
    next(stream)
    deadline = time.monotonic() + LIMIT
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # in which a fifth would be made
    assert made == [0, 1, 2, 3]
    stream.close()


# Several documents in a row


def test_documents_of_a_row_are_numbered_and_their_targets_stay_within() -> None:
    """A17 A18: [1 2 3] and [4 5] share a row: targets 2, 3, 5, not 4; padding belongs to no document."""
    packed = table([[1, 2, 3], [4, 5]], RowRules(8, "split", "bfd"))
    assert len(packed) == 1
    batch = make(packed, global_batch=1).update(0)
    part = batch.microbatches[0]
    assert part.input_ids.tolist() == [[1, 2, 3, 4, 5, PAD, PAD, PAD]]
    assert part.labels.tolist() == [[2, 3, -100, 5, -100, -100, -100, -100]]
    assert part.documents is not None and part.documents.dtype == torch.int32
    assert part.documents.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert (batch.slots, batch.real_tokens, batch.target_tokens, batch.divisor) == (8, 5, 3, 3)
    assert part.weights is None and batch.target_weight is None


def test_the_separator_belongs_to_the_document_that_it_ends() -> None:
    """A18: [a b SEP] [c d SEP] and two slots of padding: 0 0 0 1 1 1 - -."""
    part = make(table([[1, 2, 9], [3, 4, 9]], RowRules(8, "split", "bfd")), global_batch=1).update(0).microbatches[0]
    assert part.documents is not None
    assert part.documents.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1]]


def test_padded_rows_need_no_documents() -> None:
    assert make(uneven(4)).update(0).microbatches[0].documents is None


def test_masked_tokens_are_no_targets_and_need_no_weights() -> None:
    """A120: rows of 8 and 4 tokens of which 3 are supervised, alone and packed: slots, real 12, targets 3."""
    rows, weights = [list(range(10, 18)), list(range(20, 24))], [[0.0] * 5 + [1.0] * 3, [1.0] + [0.0] * 3]
    assert len(table(rows, RowRules(8, "split"), weights)) == 1  # the second has no target: its first token is none
    weights[1] = [1.0, 0.0, 0.0, 1.0]
    weights[0][5] = 0.0
    for rules, slots in ((RowRules(8, "split"), 16), (RowRules(16, "split", "bfd"), 16)):
        found = table(rows, rules, weights)
        batch = make(found, rows=len(found), global_batch=len(found)).update(0)
        assert (batch.slots, batch.real_tokens, batch.target_tokens) == (slots, 12, 3)
        assert batch.target_weight is None and batch.microbatches[0].weights is None
        labels = batch.microbatches[0].labels
        assert sorted(labels[labels != -100].tolist()) == [16, 17, 23]


def test_weights_stand_beside_their_targets() -> None:
    """The weight of a token is that of the label at the position before it; the divisor is their sum over all ranks."""
    rows = [[1, 2, 3, 4], [5, 6, 7]]
    weights = [[9.0, 0.5, 0.0, 2.0], [9.0, 1.0, 0.25]]
    packed = make(table(rows, RowRules(8, "split", "bfd"), weights), global_batch=1).update(0)
    part = packed.microbatches[0]
    assert part.labels.tolist() == [[2, -100, 4, -100, 6, 7, -100, -100]]
    assert part.weights is not None and part.weights.dtype == torch.float32
    assert part.weights.tolist() == [[0.5, 0.0, 2.0, 0.0, 1.0, 0.25, 0.0, 0.0]]
    assert packed.target_tokens == 4 and packed.divisor == 3.75
    for rank in (0, 1):
        padded = make(table(rows, RowRules(8, "split"), weights), rank=rank, ranks=2, global_batch=2).update(0)
        assert padded.target_tokens == 4 and padded.divisor == 3.75


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_a_packed_update_is_the_same_at_every_world_size(ranks: int, strategy: Any) -> None:
    """A22: one plan for all; documents, tokens, labels and counts of an update do not depend on the ranks."""
    packed = table(uneven(60), RowRules(16, "split", strategy, 3))
    loaders = [make(packed, rank=rank, ranks=ranks, global_batch=12) for rank in range(ranks)]
    reference = make(packed, rows=12, global_batch=12)
    assert {len(loader) for loader in loaders} == {len(reference)}
    for number in range(len(reference)):
        batches, expected = [loader.update(number) for loader in loaders], reference.update(number)
        one = expected.microbatches[0]
        ids, labels, row_ids = whole(batches)
        parts = sorted((p for b in batches for p in b.microbatches), key=lambda p: p.index)
        documents = torch.cat([p.documents for p in parts if p.documents is not None])
        assert one.documents is not None and torch.equal(documents, one.documents)
        assert torch.equal(ids, one.input_ids) and torch.equal(labels, one.labels)
        assert row_ids == expected.row_ids
        assert {len(b.microbatches) for b in batches} == {12 // ranks}
        assert {(b.target_tokens, b.real_tokens, b.slots) for b in batches} == {
            (expected.target_tokens, expected.real_tokens, 12 * 16)
        }
        assert int((labels != -100).sum()) == expected.target_tokens
        assert int((documents >= 0).sum()) == expected.real_tokens


def test_evaluation_of_packed_rows_counts_each_document_once() -> None:
    """A99: the same targets whether documents share rows or not, on 1 and on 3 ranks."""
    data = uneven(23)
    targets = sum(len(row) - 1 for row in data)
    for rules in (RowRules(16, "split"), RowRules(16, "split", "bfd")):
        for ranks in (1, 3):
            found = evaluation_batches(table(data, rules), ranks)
            assert len({len(batches) for batches in found}) == 1
            assert sum(batch.target_tokens for batch in found[0]) == targets
            held = [(m.labels != -100).sum() for batches in found for b in batches for m in b.microbatches]
            assert sum(map(int, held)) == targets

"""The batches of each update, made by the rank that needs them from the memory-mapped table.

G rows of an update, B rows of a microbatch, D data ranks, K microbatches per data rank (G = B K D), T the width of a
microbatch. Microbatch k of data rank d has index k * D + d and holds rows [index * B, (index + 1) * B) of the
update.

T is max_length, or with bucketing the longest row of the microbatch, rounded up to what the layout divides. For that the
rows of the update are sorted from long to short, so that rows of similar lengths meet in a microbatch, and in the D
microbatches that the data ranks run at the same time. Which rows an update holds is not the loader's matter.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shardwright.data.bucketing import bucketed
from shardwright.data.order import FILLER, Cursor, Int64, Order
from shardwright.data.streaming.stream_rows import StreamRows
from shardwright.data.table import Table
from shardwright.layout.size_rules import accumulation_steps
from shardwright.mesh.cluster_environment import stop_signals

EVALUATION_BATCHES = 64
"""Evaluation batches whose rows are sorted by length together."""
AHEAD = 3
"""Updates made ahead of the one that is trained on."""


@dataclass(frozen=True)
class Microbatch:
    """B rows for one forward and backward.

    index: number of the microbatch within the update, over all data ranks.
    input_ids, labels: [B, T] int64. Labels are already shifted: labels[b, t] is the target of position t,
    and -100 where there is none.
    row_ids: row ids in the table; -1 is a filler row, all padding and without targets.
    documents: [B, T] int32, for each position the number of its document within its row, counted from 0, and -1 for
    padding. None: a row is one document from its start, padded on the right.
    weights: [B, T] float32, what the loss of each target is multiplied with. None: 1.
    lengths: tokens of each row that are not padding. None: not known.
    """

    index: int
    input_ids: Tensor
    labels: Tensor
    row_ids: tuple[int, ...]
    documents: Tensor | None = None
    weights: Tensor | None = None
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class UpdateBatch:
    """One data rank's microbatches of an update, and the counts of the whole update over all data ranks.

    target_tokens: tokens that enter the loss. real_tokens: tokens that are not padding. slots: rows x T, summed over the
    microbatches of all data ranks.
    row_ids: the rows of the whole update in order, the same on every rank.
    target_weight: sum of the weights of the update's targets. None: all are 1.
    cursor: where the next update begins in the data. None: not told.
    """

    update: int
    microbatches: tuple[Microbatch, ...]
    target_tokens: int
    real_tokens: int
    slots: int
    row_ids: tuple[int, ...]
    target_weight: float | None = None
    cursor: Cursor | None = None

    @property
    def divisor(self) -> float:
        """What the update's loss sum is divided by: the sum of the weights of its targets."""
        return self.target_tokens if self.target_weight is None else self.target_weight


class Loader:
    """The updates of a run as one data rank sees them. Any `update(number)` costs the same, but of a stream those
    that lie one after the other.

    bucket_multiple: None: every microbatch has the table's max_length. Else bucketing: the width of a microbatch is the next
    multiple of this. one_width: bucketing with one width for all microbatches of an update, as a pipeline needs it.
    Raises `ConfigError` when the order's global batch is no whole number of microbatches on each data rank.
    """

    def __init__(
        self,
        table: Table | StreamRows,
        order: Order,
        *,
        data_rank: int,
        data_ranks: int,
        microbatch_rows: int,
        pad_id: int,
        bucket_multiple: int | None = None,
        one_width: bool = False,
    ) -> None:
        self.table, self.order = table, order
        self.data_rank, self.data_ranks, self.microbatch_rows = data_rank, data_ranks, microbatch_rows
        self.pad_id, self.bucket_multiple, self.one_width = pad_id, bucket_multiple, one_width
        self.accumulation_steps = accumulation_steps(order.global_batch_size, microbatch_rows, data_ranks)

    def __len__(self) -> int:
        return self.order.total_updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return (self.update(number) for number in range(len(self)))

    def update(self, number: int) -> UpdateBatch:
        """Update `number` (0-based)."""
        counts, widths = self.counts(number)
        own, size = range(self.data_rank, len(widths), self.data_ranks), self.microbatch_rows
        parts = (self._microbatch(k, counts.row_ids[k * size : (k + 1) * size], widths[k]) for k in own)
        return replace(counts, microbatches=tuple(parts))

    def counts(self, number: int) -> tuple[UpdateBatch, list[int]]:
        """Update `number` without contents, and the width of each microbatch of all data ranks."""
        ids, table = self.order.update_rows(number), self.table
        present = ids[ids != FILLER]
        tokens = table.real_tokens(present)
        widths = [table.max_length] * (len(ids) // self.microbatch_rows)
        if self.bucket_multiple is not None:
            by_length = np.argsort(-tokens, kind="stable")
            ids[: len(present)], ids[len(present) :] = present[by_length], FILLER
            widths = self._widths(tokens[by_length], len(widths))
        batch = UpdateBatch(
            update=number,
            microbatches=(),
            target_tokens=int(table.target_tokens(present).sum()),
            real_tokens=int(tokens.sum()),
            slots=sum(widths) * self.microbatch_rows,
            row_ids=tuple(ids.tolist()),
            target_weight=float(table.target_weights(present).sum()) if table.weighs(present) else None,
            cursor=self.order.cursor(number + 1),
        )
        return batch, widths

    def _widths(self, tokens: Int64, count: int) -> list[int]:
        """Widths of `count` microbatches that are filled with rows of `tokens`, from long to short."""
        assert self.bucket_multiple is not None
        longest = np.zeros(count, np.int64)
        found = tokens[:: self.microbatch_rows]
        longest[: len(found)] = found
        if self.one_width:
            longest[:] = longest[0]
        multiples = np.maximum(1, -(-longest // self.bucket_multiple))
        return [int(width) for width in multiples * self.bucket_multiple]

    def _microbatch(self, index: int, rows: tuple[int, ...], width: int) -> Microbatch:
        block = self.table.block(rows, width, self.pad_id)
        tokens = self.table.real_tokens(np.array([row for row in rows if row != FILLER], np.int64)).tolist()
        return Microbatch(
            index,
            torch.from_numpy(block.input_ids),
            torch.from_numpy(block.labels),
            rows,
            None if block.documents is None else torch.from_numpy(block.documents),
            None if block.weights is None else torch.from_numpy(block.weights),
            tuple(0 if row == FILLER else tokens.pop(0) for row in rows),
        )


def evaluation_loader(
    table: Table,
    *,
    data_rank: int,
    data_ranks: int,
    microbatch_rows: int,
    pad_id: int,
    bucket_multiple: int | None = None,
    one_width: bool = False,
) -> Loader:
    """Every row of `table` once; each "update" is one microbatch on each data rank.

    Rows come in file order, with bucketing sorted by length within `EVALUATION_BATCHES` batches. All ranks run the same number
    of microbatches: filler rows, without targets, complete the last ones. Sum the loss over all of them and divide by the sum
    of the divisors.
    """
    return Loader(
        table,
        bucketed(
            Order(
                len(table),
                global_batch_size=microbatch_rows * data_ranks,
                shuffle=False,
                num_train_epochs=1,
                bucket_updates=1 if bucket_multiple is None else EVALUATION_BATCHES,
            ),
            table.real_tokens,
        ),
        data_rank=data_rank,
        data_ranks=data_ranks,
        microbatch_rows=microbatch_rows,
        pad_id=pad_id,
        bucket_multiple=bucket_multiple,
        one_width=one_width,
    )


def prefetch(
    loader: Loader, first: int = 0, depth: int = AHEAD, device: torch.device | None = None
) -> Iterator[UpdateBatch]:
    """Updates `first`, `first` + 1, ... of `loader`, made in a thread while earlier ones are trained on.

    `depth` are held ahead, in pinned memory where `device` is a GPU. The thread receives no request to stop, so a signal
    always interrupts the main thread. An error is raised where its update would have come. `close()` stops the thread.
    """
    pinned = device is not None and device.type == "cuda"

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        if pinned:  # a thread starts on GPU 0, where pinning memory would make a context
            torch.cuda.set_device(device)

    def make(number: int) -> UpdateBatch:
        batch = loader.update(number)
        return _pinned(batch) if pinned else batch

    ahead: deque[Future[UpdateBatch]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=begin)
    try:
        for number in range(first, len(loader)):
            ahead.append(pool.submit(make, number))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        loader.order.close()


def _pinned(batch: UpdateBatch) -> UpdateBatch:
    def pin(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.pin_memory()

    parts = (
        replace(
            part,
            input_ids=part.input_ids.pin_memory(),
            labels=part.labels.pin_memory(),
            documents=pin(part.documents),
            weights=pin(part.weights),
        )
        for part in batch.microbatches
    )
    return replace(batch, microbatches=tuple(parts))

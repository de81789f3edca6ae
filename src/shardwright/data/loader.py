"""From rows to the microbatches of each update, made by the rank that needs them from the memory-mapped table.

G rows of an update, B rows of a microbatch, D data ranks, K microbatches per data rank (G = B K D), T the width of a
microbatch. Microbatch k of data rank d has index k * D + d and holds rows [index * B, (index + 1) * B) of the update.

T is max_length, or with bucketing the longest row of the microbatch, rounded up to a multiple that the layout divides. For that
the rows of the update are sorted from long to short, so that rows of similar lengths meet in a microbatch, and in the D
microbatches that the data ranks run at the same time. Which rows an update holds is decided in `order.py`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.data.arrays import FILLER, Int64
from shardwright.data.order import Cursor, RowOrder
from shardwright.data.streaming.rows import StreamTable
from shardwright.data.table import Table
from shardwright.layout.size_rules import accumulation_steps
from shardwright.mesh.cluster_environment import stop_signals

EVALUATION_BATCHES = 64
"""Evaluation batches whose rows are sorted by length together."""
AHEAD = 3
"""Updates that are made ahead of the update in training."""


@dataclass(frozen=True)
class Microbatch:
    """B rows for one forward and backward."""

    index: int  # within the update, over all data ranks
    input_ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, shifted already: labels[b, t] is the target of position t, -100 where there is none
    row_ids: tuple[int, ...]  # rows of the table; -1 is a filler row: padding only, no targets
    documents: Tensor | None = None  # [B, T] int32: number of the document in its row, padding -1; None: one document
    weights: Tensor | None = None  # [B, T] float32: factor of the loss of each target; None: all 1
    lengths: tuple[int, ...] | None = None  # tokens of each row without padding; None: not known


@dataclass(frozen=True)
class UpdateBatch:
    """One data rank's microbatches of an update, and the counts of the whole update over all data ranks."""

    update: int
    microbatches: tuple[Microbatch, ...]
    target_tokens: int  # tokens that enter the loss
    real_tokens: int  # tokens that are not padding
    slots: int  # rows x T, summed over all microbatches
    row_ids: tuple[int, ...]  # the rows of the whole update in order, the same on every rank
    target_weight: float | None = None  # sum of the weights of the targets; None: all 1
    cursor: Cursor | None = None  # where the next update begins in the data; None: not known

    @property
    def divisor(self) -> float:
        """The sum of the weights of the update's targets, by which the sum of its losses is divided."""
        return self.target_tokens if self.target_weight is None else self.target_weight


class Loader:
    """The updates of a run as one data rank sees them.

    Any `update(number)` costs the same, but the updates of a stream must be asked for in order. bucket_multiple: with
    bucketing, the width of a microbatch is the next multiple of this; None: every microbatch is max_length wide. one_width:
    bucketing with one width for all microbatches of an update, as a pipeline needs. Raises `ConfigError` when the global batch
    is not a whole number of microbatches on each data rank.
    """

    def __init__(
        self,
        table: Table | StreamTable,
        order: RowOrder,
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
        """Update `number` without microbatches, and the width of each microbatch of all data ranks."""
        ids, table = self.order.update_rows(number), self.table
        present = ids[ids != FILLER]
        tokens = table.real_tokens(present)
        widths = [table.max_length] * (len(ids) // self.microbatch_rows)
        if self.bucket_multiple is not None:
            by_length = np.argsort(-tokens, kind="stable")
            ids[: len(present)], ids[len(present) :] = present[by_length], FILLER
            widths = self._widths(tokens[by_length], len(widths), self.bucket_multiple)
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

    def _widths(self, tokens: Int64, count: int, multiple: int) -> list[int]:
        """Widths of `count` microbatches that are filled with rows of `tokens`, from long to short."""
        longest = np.zeros(count, np.int64)
        found = tokens[:: self.microbatch_rows]
        longest[: len(found)] = found
        if self.one_width:
            longest[:] = longest[0]
        return [int(width) for width in np.maximum(1, -(-longest // multiple)) * multiple]

    def _microbatch(self, index: int, rows: tuple[int, ...], width: int) -> Microbatch:
        block = self.table.block(rows, width, self.pad_id)
        tokens = self.table.real_tokens(np.array([row for row in rows if row != FILLER], np.int64)).tolist()
        lengths = tuple(0 if row == FILLER else tokens.pop(0) for row in rows)
        tensors: Any = {name: torch.from_numpy(array) for name, array in vars(block).items() if array is not None}
        return Microbatch(index, row_ids=rows, lengths=lengths, **tensors)


def evaluation_order(table: Table, rows: int, bucket: bool) -> RowOrder:
    """Every row of `table` once, `rows` at a time, in file order; with `bucket` sorted by length within some batches.

    Filler rows complete the last batch, so that all ranks run the same number of microbatches. Sum the loss over all of them
    and divide by the sum of the divisors.
    """
    return RowOrder(
        len(table),
        global_batch_size=rows,
        shuffle=False,
        num_train_epochs=1,
        bucket_updates=EVALUATION_BATCHES if bucket else 1,
        lengths=table.real_tokens,
    )


def prefetch(
    loader: Loader,
    first: int = 0,
    depth: int = AHEAD,
    device: torch.device | None = None,
    ready: Callable[[UpdateBatch], UpdateBatch] | None = None,
) -> Iterator[UpdateBatch]:
    """Updates `first`, `first` + 1, ... of `loader`, made in a thread while earlier updates are trained.

    `depth` updates are made ahead. ready: what the thread does with each; None: pins its memory where `device` is a GPU.
    The thread blocks the stop signals, so that a
    signal always interrupts the main thread. An error is raised where its update would have come. `close()` stops the thread.
    """
    pinned = device is not None and device.type == "cuda"

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        if pinned:  # a new thread is on GPU 0, where pinning memory would create a CUDA context
            torch.cuda.set_device(device)

    def make(number: int) -> UpdateBatch:
        batch = loader.update(number)
        if ready is not None:
            return ready(batch)
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
    def pin(part: Microbatch) -> Microbatch:
        tensors: Any = {name: value.pin_memory() for name, value in vars(part).items() if isinstance(value, Tensor)}
        return replace(part, **tensors)

    return replace(batch, microbatches=tuple(map(pin, batch.microbatches)))

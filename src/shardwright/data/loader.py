"""The batches of each update, made by the rank that needs them from the memory-mapped table.

G rows of an update, B rows of a microbatch, D data ranks, K microbatches per data rank (G = B K D), T =
max_length. Microbatch k of data rank d has index k * D + d and holds rows [index * B, (index + 1) * B) of the
update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.data.order import FILLER, Int64, Order
from shardwright.errors import DataError
from shardwright.layout.batch import accumulation_steps

IGNORE = -100


class Rows(Protocol):
    """What a loader needs of a table: row contents, and their counts without reading the contents."""

    def __len__(self) -> int: ...

    def row(self, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(input ids, labels shifted by one with -100 where there is no target), each of the row's length."""
        ...

    def real_tokens(self, rows: Int64) -> Int64:
        """Tokens of each of `rows`."""
        ...

    def target_tokens(self, rows: Int64) -> Int64:
        """Targets of each of `rows`."""
        ...


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
    """

    index: int
    input_ids: Tensor
    labels: Tensor
    row_ids: tuple[int, ...]
    documents: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class UpdateBatch:
    """One data rank's microbatches of an update, and the counts of the whole update over all data ranks.

    target_tokens: tokens that enter the loss. real_tokens: tokens that are not padding. slots: rows x T.
    row_ids: the rows of the whole update in order, the same on every rank.
    target_weight: sum of the weights of the update's targets. None: all are 1.
    """

    update: int
    microbatches: tuple[Microbatch, ...]
    target_tokens: int
    real_tokens: int
    slots: int
    row_ids: tuple[int, ...]
    target_weight: float | None = None

    @property
    def divisor(self) -> float:
        """What the update's loss sum is divided by: the sum of the weights of its targets."""
        return self.target_tokens if self.target_weight is None else self.target_weight


class Loader:
    """The updates of a run as one data rank sees them. Stateless: any `update(number)` costs the same.

    Raises `ConfigError` when the order's global batch is no whole number of microbatches on each data rank.
    """

    def __init__(
        self,
        table: Rows,
        order: Order,
        *,
        data_rank: int,
        data_ranks: int,
        microbatch_rows: int,
        pad_id: int,
        max_length: int,
    ) -> None:
        self.table, self.order = table, order
        self.data_rank, self.data_ranks, self.microbatch_rows = data_rank, data_ranks, microbatch_rows
        self.pad_id, self.max_length = pad_id, max_length
        self.accumulation_steps = accumulation_steps(order.global_batch_size, microbatch_rows, data_ranks)

    def __len__(self) -> int:
        return self.order.total_updates

    def __iter__(self) -> Iterator[UpdateBatch]:
        return (self.update(number) for number in range(len(self)))

    def update(self, number: int) -> UpdateBatch:
        """Update `number` (0-based). Raises `DataError` when it holds no target at all."""
        ids = self.order.update_rows(number)
        present = ids[ids != FILLER]
        targets = int(self.table.target_tokens(present).sum())
        if not targets:
            shown = ", ".join(map(str, present[:8])) + (", ..." if len(present) > 8 else "")
            raise DataError(
                f"Update {number} has no target token (rows {shown}).",
                "Its loss would be 0 / 0.",
                "Remove such rows from the data, or raise training.global_batch_size.",
            )
        indices = range(self.data_rank, self.accumulation_steps * self.data_ranks, self.data_ranks)
        size = self.microbatch_rows
        return UpdateBatch(
            update=number,
            microbatches=tuple(self._microbatch(k, ids[k * size : (k + 1) * size].tolist()) for k in indices),
            target_tokens=targets,
            real_tokens=int(self.table.real_tokens(present).sum()),
            slots=len(ids) * self.max_length,
            row_ids=tuple(ids.tolist()),
        )

    def _microbatch(self, index: int, row_ids: Sequence[int]) -> Microbatch:
        shape = (len(row_ids), self.max_length)
        input_ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORE, np.int64)
        for b, row in enumerate(row_ids):
            if row != FILLER:
                tokens, targets = self.table.row(row)
                input_ids[b, : len(tokens)] = tokens
                labels[b, : len(targets)] = targets
        return Microbatch(index, torch.from_numpy(input_ids), torch.from_numpy(labels), tuple(row_ids))


def evaluation_loader(
    table: Rows, *, data_rank: int, data_ranks: int, microbatch_rows: int, pad_id: int, max_length: int
) -> Loader:
    """Every row of `table` once, in file order; each "update" is one microbatch on each data rank.

    All ranks run the same number of microbatches: filler rows, without targets, complete the last ones. Sum
    the loss over all of them and divide by the sum of `target_tokens`.
    """
    order = Order(
        len(table), global_batch_size=microbatch_rows * data_ranks, shuffle=False, num_train_epochs=1
    )
    return Loader(
        table,
        order,
        data_rank=data_rank,
        data_ranks=data_ranks,
        microbatch_rows=microbatch_rows,
        pad_id=pad_id,
        max_length=max_length,
    )


def prefetch(loader: Loader, first: int = 0, depth: int = 1) -> Iterator[UpdateBatch]:
    """Updates `first`, `first` + 1, ... of `loader`, made in a thread while earlier ones are trained on.

    `depth` are held ahead. An error is raised where its update would have come. `close()` stops the thread.
    """
    ahead: deque[Future[UpdateBatch]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        for number in range(first, len(loader)):
            ahead.append(pool.submit(loader.update, number))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

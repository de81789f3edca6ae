"""Updates of rows of similar lengths: the rows of a few updates sorted together, and the updates shuffled again.

A window of W updates holds the rows that those W updates would hold without bucketing. They are sorted by length and dealt
out G at a time, and the order of the W updates is shuffled, so that updates of long and of short rows come mixed. A rank
reads the lengths of one window, whatever the update: nothing is passed over on resume. Windows begin anew with each epoch. An
update that holds rows of two epochs, or is part-filled, is in no window and keeps its rows, so that no row meets itself. A
window is at most half an epoch: all rows of an epoch sorted together would make the same updates in each.
With W = 1 there is nothing to sort here: the loader sorts within the update, and the objective is that of padded rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.data.order import Int64, Order, Stretch, permute

_STREAM = 2**33
"""Epoch numbers from here on shuffle windows: no run reaches them."""


def bucketed(order: Order, lengths: Callable[[Int64], Int64]) -> Order:
    """`order` with windows of its `bucket_updates` updates; with 1 it is as it was. `lengths` gives the tokens of rows."""
    return _Bucketed(order, lengths)


class _Bucketed(Order):
    def __init__(self, order: Order, lengths: Callable[[Int64], Int64]) -> None:
        vars(self).update(vars(order))
        self._plain, self._lengths = order, lengths

    def rows_at(self, positions: Int64, stretch: Stretch) -> Int64:
        return self._plain.rows_at(positions, stretch)

    def _window(self, update: int, stretch: Stretch) -> tuple[int, int]:
        """The updates [first, end) of the window that `update` is in; alone where it is in none."""
        size, rows = stretch.global_batch_size, self.rows
        epoch = stretch.done(update) // rows
        begin = stretch.update + max(0, -(-(epoch * rows - stretch.rows) // size))
        end = stretch.update + (min((epoch + 1) * rows, stretch.end) - stretch.rows) // size
        if not begin <= update < end:
            return update, update + 1
        window = min(stretch.bucket_updates, max(1, (end - begin) // 2))
        first = update - (update - begin) % window
        return first, min(first + window, end)

    def _positions(self, update: int, stretches: tuple[Stretch, ...], left: Int64) -> Int64:
        last, size = stretches[-1], stretches[-1].global_batch_size
        first, end = self._window(update, last)
        positions = self._in_line(last.done(first), last.done(end), last, left)
        if end - first == 1:
            return positions
        place = update - first
        if last.shuffle:
            place = int(permute(np.array([place]), end - first, last.seed, _STREAM + first)[0])
        by_length = np.argsort(-self._lengths(self.rows_at(positions, last)), kind="stable")
        return positions[by_length[place * size : (place + 1) * size]]

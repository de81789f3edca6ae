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

from shardwright.data.order import Int64, Order, permute

_STREAM = 2**33
"""Epoch numbers from here on shuffle windows: no run reaches them."""


def bucketed(order: Order, lengths: Callable[[Int64], Int64], window: int) -> Order:
    """`order` with windows of `window` updates, which is `order` itself for 1. `lengths` gives the tokens of rows."""
    return order if window == 1 else _Bucketed(order, lengths, window)


class _Bucketed(Order):
    def __init__(self, order: Order, lengths: Callable[[Int64], Int64], window: int) -> None:
        vars(self).update(vars(order))
        self._plain, self._lengths, self._window = order, lengths, window

    def update_rows(self, update: int) -> Int64:
        rows, size = self._plain.update_rows(update), self.global_batch_size
        epoch = update * size // self.rows
        begin, end = -(-epoch * self.rows // size), min((epoch + 1) * self.rows, self.positions) // size
        if not begin <= update < end:
            return rows
        window = min(self._window, max(1, (end - begin) // 2))
        first = update - (update - begin) % window
        last = min(first + window, end)
        ids = np.concatenate([self._plain.update_rows(u) for u in range(first, last)])
        place = update - first
        if self.shuffle:
            place = int(permute(np.array([place]), last - first, self.seed, _STREAM + first)[0])
        by_length = np.argsort(-self._lengths(ids), kind="stable")
        return ids[by_length[place * size : (place + 1) * size]]

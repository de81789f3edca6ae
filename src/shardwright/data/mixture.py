"""How often each source is passed in an epoch: a function of (weights, seed, epoch, position), like the order itself.

A source of n rows with weight w gives round(w n) rows to every epoch, at least one. The whole part of w is whole passes
over its rows. The rest takes the next rows of an endless sequence of passes, each in a new order; so the rows of a source
of weight 0.25 are each seen once in four epochs, and after any number of epochs two rows of one source differ by at most
one in how often they were seen. Nothing is stored, and any position of any epoch costs the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardwright.data.order import Int64, Order, Stretch, permute


class Mixture:
    """The rows of an epoch over several sources.

    bounds: [sources + 1] first row of each source, and the number of rows. weights: passes over each per epoch, read as
    the decimals that they print as. `len` is the number of rows of every epoch; with weights of 1 they are the rows
    in order.
    """

    def __init__(self, bounds: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.bounds, self.weights, self.seed = np.asarray(bounds, np.int64), tuple(weights), seed
        sizes = np.diff(self.bounds)
        exact = [Fraction(repr(weight)) for weight in weights]
        self._whole = np.array([math.floor(w) * n for w, n in zip(exact, sizes.tolist())], np.int64)
        rest = [_half_up(w % 1 * n) for w, n in zip(exact, sizes.tolist())]
        self._rest = np.array(rest, np.int64)
        self._rest[(self._whole + self._rest == 0) & (sizes > 0)] = 1
        self.counts = self._whole + self._rest
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self, rows: str) -> str:
        """A fingerprint of the rows of every epoch, from one of all rows."""
        return hashlib.blake2b(f"{rows} {self.weights}".encode(), digest_size=16).hexdigest()

    def rows(self, positions: Int64, epoch: int, seed: int | None = None) -> Int64:
        """The rows at `positions` (each in [0, len)) of `epoch`, before any shuffling over the whole epoch; seed: another."""
        found = np.empty(len(positions), np.int64)
        source = np.searchsorted(self._ends, positions, side="right")
        offset = positions - (self._ends - self.counts)[source]
        for number in np.unique(source).tolist():
            here = np.flatnonzero(source == number)
            found[here] = self.bounds[number] + self._within(
                number, offset[here], epoch, self.seed if seed is None else seed
            )
        return found

    def _within(self, source: int, offsets: Int64, epoch: int, seed: int) -> Int64:
        size = int(self.bounds[source + 1] - self.bounds[source])
        result = offsets % size
        beyond = np.flatnonzero(offsets >= self._whole[source])
        passes, places = np.divmod(epoch * int(self._rest[source]) + offsets[beyond] - self._whole[source], size)
        for number in np.unique(passes).tolist():
            here = passes == number
            result[beyond[here]] = permute(places[here], size, seed + source + 1, number)
        return result


def mixed(order: Order, mixture: Mixture | None) -> Order:
    """`order`, over as many rows as an epoch of `mixture` has, with the rows of the mixture; None: `order` itself."""
    return order if mixture is None else _Mixed(order, mixture)


class _Mixed(Order):
    def __init__(self, order: Order, mixture: Mixture) -> None:
        vars(self).update(vars(order))
        self._plain, self._mixture = order, mixture

    def rows_at(self, positions: Int64, stretch: Stretch) -> Int64:
        result, epochs = self._plain.rows_at(positions, stretch), positions // self.rows
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            result[here] = self._mixture.rows(result[here], epoch, stretch.seed)
        return result


def _half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))

"""How often each source is passed in an epoch: a function of (weights, seed, epoch, position), like the order itself.

A source of n rows with weight w gives round(w n) rows to every epoch, at least one. The whole part of w is whole passes over
its rows. The rest takes the next rows of an endless sequence of passes, each in a new order. So each row of a source of weight
0.25 is seen once in four epochs, and after any number of epochs two rows of one source differ by at most one in how often
they were seen. Nothing is stored, and any position of any epoch costs the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardwright.data.arrays import Int64
from shardwright.data.permutation import permute


class Mixture:
    """The rows of an epoch over several sources; `len` is their number, in every epoch.

    bounds: [sources + 1] first row of each source, and the number of rows. weights: passes over each source per epoch, read as
    the decimals that they print as; with weights of 1 the rows come in order.
    """

    def __init__(self, bounds: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.bounds, self.weights, self.seed = np.asarray(bounds, np.int64), tuple(weights), seed
        sizes = np.diff(self.bounds)
        exact = [Fraction(repr(weight)) for weight in weights]
        self._whole = np.array([math.floor(w) * n for w, n in zip(exact, sizes.tolist())], np.int64)
        half = Fraction(1, 2)  # halves round up
        self._rest = np.array([math.floor(w % 1 * n + half) for w, n in zip(exact, sizes.tolist())], np.int64)
        self._rest[(self._whole + self._rest == 0) & (sizes > 0)] = 1
        self.counts = self._whole + self._rest
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self, rows: str) -> str:
        """A fingerprint of the rows of every epoch, from the fingerprint `rows` of all rows."""
        return hashlib.blake2b(f"{rows} {self.weights}".encode(), digest_size=16).hexdigest()

    def rows(self, positions: Int64, epoch: int, seed: int | None = None) -> Int64:
        """The rows at `positions` (each in [0, len)) of `epoch`, before shuffling over the epoch; seed: in place of its own."""
        found = np.empty(len(positions), np.int64)
        source = np.searchsorted(self._ends, positions, side="right")
        offset = positions - (self._ends - self.counts)[source]
        for number in np.unique(source).tolist():
            here = np.flatnonzero(source == number)
            own = self._within(number, offset[here], epoch, self.seed if seed is None else seed)
            found[here] = self.bounds[number] + own
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

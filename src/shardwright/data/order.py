"""Which rows each update trains on: a function of (seed, epoch, position), never of the world size.

The rows of all epochs form one stream; update u takes positions [u * G, (u + 1) * G) of it, across the
boundaries of epochs. Position p is row permutation(seed, p // n)(p % n) of the n rows. So the cursor of a run
is the number of updates done, and any number of ranks resumes it.

The permutation is computed for the positions that are asked for and nothing is stored: memory does not grow
with n, and seeking costs nothing. A shuffled index array would take 8 n bytes on every rank and a pass over n
at each epoch, and numpy does not promise that its shuffles stay the same between versions. Here it is integer
arithmetic modulo 2^64 and bits only: a balanced Feistel network (Luby and Rackoff 1988) of 12 rounds over the
smallest even number of bits that holds n, with SplitMix64's finaliser (Steele, Lea and Flood 2014) as the
round function; a result of n or more is sent through again until it falls below n (cycle walking, Black and
Rogaway 2002), which keeps it one to one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.errors import ConfigError, DataError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Cursor = dict[str, Any]
"""What beside the number of updates done says where a stream goes on: plain values."""

FILLER = -1
_BLOCK_ROWS = 4096
_ROUNDS = 12
_MIN_HALF_BITS = 3  # over fewer bits a Feistel network reaches only some of the permutations
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 2**64 - 1


def _mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: Int64, rows: int, seed: int, epoch: int) -> Int64:
    """The rows at `positions` (each in [0, rows)) of the permutation of [0, rows) of (seed, epoch)."""
    half = np.uint64(max(_MIN_HALF_BITS, (max(rows - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    stream = _mix(_mix(np.array([seed & _MASK64], np.uint64)) + np.uint64(epoch))
    keys = _mix(stream + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    result = positions.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        values = result[walking]
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[walking] = (left << half) | right
        walking = walking[result[walking] >= np.uint64(rows)]
    return result.astype(np.int64)


class Order:
    """The row ids of every update of a run over `rows` rows.

    Give `max_steps`, or `num_train_epochs` (a fraction is allowed; it is read as the decimal that it prints
    as). The last update of a run counted in epochs may be part-filled: the ids missing are `FILLER`, and its
    rows still weigh what their targets weigh, since an update's loss is divided by its own number of targets.
    With `drop_last` it is left out; `dropped` is how many rows it had.
    """

    def __init__(
        self,
        rows: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_steps: int | None = None,
        num_train_epochs: float | None = None,
        drop_last: bool = False,
    ) -> None:
        if rows < 1:
            raise DataError("The data has no rows.", "There is nothing to train on.", "Look at data.train.")
        if (max_steps is None) == (num_train_epochs is None):
            given = "neither is" if max_steps is None else "both are"
            raise ConfigError(
                f"training.max_steps or training.num_train_epochs: {given} given.",
                "One of the two says how long the run is.",
                "Keep one of them.",
            )
        self.rows, self.global_batch_size, self.seed, self.shuffle = rows, global_batch_size, seed, shuffle
        if max_steps is not None:
            self.positions = max_steps * global_batch_size
        else:
            self.positions = math.ceil(Fraction(repr(num_train_epochs)) * rows)
        self.dropped = self.positions % global_batch_size if drop_last else 0
        self.positions -= self.dropped
        if not self.positions:
            raise ConfigError(
                f"data.drop_last leaves no update: {self.dropped} rows, training.global_batch_size {global_batch_size}.",
                "The only update would be part-filled.",
                "Lower training.global_batch_size, raise training.num_train_epochs, or remove data.drop_last.",
            )
        self.total_updates = -(-self.positions // global_batch_size)
        # Neighbouring updates are asked for one after the other: made in blocks, they cost a hundredth.
        self._block_updates = max(1, _BLOCK_ROWS // global_batch_size)
        self._block: tuple[int, Int64] = (-1, np.empty(0, np.int64))

    def epoch(self, update: int) -> float | None:
        """Passes over the data completed before `update` begins."""
        return min(update * self.global_batch_size, self.positions) / self.rows

    def cursor(self, update: int) -> Cursor | None:
        """What beside its number says where `update` begins: nothing."""
        return None

    def close(self) -> None:
        """Ends what is being made ahead: nothing."""

    def update_rows(self, update: int) -> Int64:
        """The `global_batch_size` row ids of `update` (0-based), the same on every rank, `FILLER` for none.

        Raises `IndexError` for an update the run does not have.
        """
        if not 0 <= update < self.total_updates:
            raise IndexError(f"update {update} of a run of {self.total_updates} updates")
        block, place = divmod(update, self._block_updates)
        first, ids = self._block
        if first != block:
            ids = self._rows_at(block * self._block_updates * self.global_batch_size)
            self._block = (block, ids)
        size = self.global_batch_size
        return ids[place * size : (place + 1) * size].copy()

    def _rows_at(self, first: int) -> Int64:
        """The row ids of a block of updates from position `first` on."""
        result = np.full(self._block_updates * self.global_batch_size, FILLER, np.int64)
        count = min(len(result), self.positions - first)
        epochs, offsets = np.divmod(np.arange(first, first + count, dtype=np.int64), self.rows)
        if not self.shuffle:
            result[:count] = offsets
            return result
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = np.flatnonzero(epochs == epoch)
            result[here] = permute(offsets[here], self.rows, self.seed, epoch)
        return result

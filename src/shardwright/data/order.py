"""Which rows each update trains on: a function of (seed, epoch, position), never of the world size.

The rows of all epochs form one stream, across the boundaries of epochs. Position p of it is row
permutation(seed, p // n)(p % n) of the n rows. An update takes the next G positions. So the cursor of a run is the
number of rows done, and any number of ranks resumes it, with any G.

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
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.errors import ConfigError, DataError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Cursor = dict[str, Any]
"""What says where a run goes on in its data: plain values, as a checkpoint keeps them."""

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


@dataclass(frozen=True)
class Stretch:
    """How rows are dealt out to updates from `update` on, before which `rows` rows were done.

    end: rows done when the run ends. bucket_updates: how many updates share their rows, sorted by length.
    """

    update: int
    rows: int
    end: int
    global_batch_size: int
    bucket_updates: int
    seed: int
    shuffle: bool

    def done(self, update: int) -> int:
        """Rows that are done before `update`."""
        return min(self.rows + (update - self.update) * self.global_batch_size, self.end)

    @property
    def updates(self) -> int:
        """Updates of the run, those before this stretch too."""
        return self.update - (self.rows - self.end) // self.global_batch_size

    def same_order(self, other: Stretch) -> bool:
        """Whether a position means the same row in both."""
        return (self.seed, self.shuffle) == (other.seed, other.shuffle)


class Order:
    """The row ids of every update of a run over `rows` rows.

    Give `max_steps`, or `num_train_epochs` (a fraction is allowed; it is read as the decimal that it prints
    as). The last update of a run counted in epochs may be part-filled: the ids missing are `FILLER`, and its
    rows still weigh what their targets weigh, since an update's loss is divided by its own number of targets.
    With `drop_last` it is left out; `dropped` is how many rows it had.
    A run that is resumed with other settings takes the rows that are not done yet: see `seek`.
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
        bucket_updates: int = 1,
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
        self.rows, self.global_batch_size, self.bucket_updates = rows, global_batch_size, bucket_updates
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._max_steps, self._epochs = max_steps, num_train_epochs
        self._block: tuple[Any, Int64] = (None, np.empty(0, np.int64))
        self._deal((self._stretch(0, 0),))
        if not self.stretch.end:
            raise ConfigError(
                f"data.drop_last leaves no update: {self.dropped} rows, training.global_batch_size {global_batch_size}.",
                "The only update would be part-filled.",
                "Lower training.global_batch_size, raise training.num_train_epochs, or remove data.drop_last.",
            )

    def _stretch(self, update: int, rows: int) -> Stretch:
        """How this run deals out what is left after `rows` rows and `update` updates."""
        size = self.global_batch_size
        if self._max_steps is not None:
            end = rows + max(0, self._max_steps - update) * size
        else:
            end = max(rows, self._all_rows())
            end -= (end - rows) % size if self._drop_last else 0
        return Stretch(update, rows, end, size, self.bucket_updates, self._seed, self._shuffle)

    def _all_rows(self) -> int:
        return math.ceil(Fraction(repr(self._epochs)) * self.rows)

    def _deal(self, stretches: tuple[Stretch, ...]) -> None:
        self.stretches, self._block = stretches, (None, np.empty(0, np.int64))
        self._left = self._left_before(stretches)

    def _left_before(self, stretches: tuple[Stretch, ...]) -> Int64:
        """The positions that the last of `stretches` takes first: what one before it had passed over."""
        before = stretches[:-1]
        return self._passed_over(stretches[-1].update, before) if before else np.empty(0, np.int64)

    @property
    def stretch(self) -> Stretch:
        """How the updates that are to come are dealt out."""
        return self.stretches[-1]

    @property
    def total_updates(self) -> int:
        """Updates of the whole run, those before a resume too."""
        return self.stretch.updates

    @property
    def dropped(self) -> int:
        """Rows of a part-filled last update that `drop_last` leaves out."""
        return max(0, self._all_rows() - self.stretch.end) if self._drop_last and self._epochs else 0

    def seek(self, update: int, cursor: Cursor | None, trusted: bool = False) -> None:
        """Lets `update` begin after the rows that `cursor` says are done; each other row comes once an epoch.

        Where nothing has changed, the updates are those of a run without interruption. Else the rows of updates that share
        theirs (`bucket_updates`), and that are not done, come first. trusted: the rows themselves are others, which is
        accepted, so only their number counts.
        """
        if cursor is None:
            return
        found = stretches_of(cursor)
        now = self._stretch(update, cursor["rows"])
        if trusted or not found[-1].same_order(now):
            self._deal((now,))
        elif replace(found[-1], update=now.update, rows=now.rows) == now:
            self._deal(found)
        else:
            self._deal((*found, now) if len(self._passed_over(update, found)) else (now,))

    def cursor(self, update: int) -> Cursor | None:
        """Where `update` begins: the rows done before it, and how they were dealt out."""
        return {"rows": self.stretch.done(update), "stretches": [asdict(s) for s in self.stretches]}

    def repeated(self, update: int, cursor: Cursor) -> int:
        """How many rows of the epoch under way come again, and as many never do, where `cursor` is of another order.

        The whole epoch is counted: this takes about a second for ten million rows.
        """
        found, first = stretches_of(cursor), cursor["rows"] // self.rows * self.rows
        former, now = (self.rows_at(np.arange(first, first + self.rows), s) for s in (found[-1], self.stretch))
        passed_over = self._passed_over(update, found) - first
        done = np.arange(self.rows) < cursor["rows"] - first + len(passed_over)
        done[passed_over] = False
        size = int(max(former.max(), now.max())) + 1
        trained = np.bincount(former[done], minlength=size) + np.bincount(now[cursor["rows"] - first :], minlength=size)
        return int(np.maximum(0, trained - np.bincount(former, minlength=size)).sum())

    def epoch(self, update: int) -> float | None:
        """Passes over the data completed before `update` begins."""
        return self.stretch.done(update) / self.rows

    def close(self) -> None:
        """Ends what is being made ahead: nothing."""

    def update_rows(self, update: int) -> Int64:
        """The `global_batch_size` row ids of `update` (0-based), the same on every rank, `FILLER` for none.

        Raises `IndexError` for an update the run does not have, or had before it was resumed with other settings.
        """
        if not self.stretch.update <= update < self.total_updates:
            raise IndexError(f"update {update} of a run of {self.total_updates} updates")
        positions = self._positions(update, self.stretches, self._left)
        result = np.full(self.global_batch_size, FILLER, np.int64)
        result[: len(positions)] = self.rows_at(positions, self.stretch)
        return result

    def _positions(self, update: int, stretches: tuple[Stretch, ...], left: Int64) -> Int64:
        """The positions that `update` of the last of `stretches` takes, which begins with those in `left`."""
        last = stretches[-1]
        return self._in_line(last.done(update), last.done(update + 1), last, left)

    @staticmethod
    def _in_line(first: int, end: int, stretch: Stretch, left: Int64) -> Int64:
        """The positions that `stretch` takes after `first` rows are done and until `end` are."""
        found = np.arange(first, end, dtype=np.int64)
        those = int(np.searchsorted(found, stretch.rows + len(left)))
        found[:those] = left[found[:those] - stretch.rows]
        return found

    def _window(self, update: int, stretch: Stretch) -> tuple[int, int]:
        """The updates [first, end) that share their rows with `update`."""
        return update, update + 1

    def _passed_over(self, update: int, stretches: tuple[Stretch, ...]) -> Int64:
        """Positions that are not done when `update` begins though later ones are, and those between: from low to high."""
        left, last = self._left_before(stretches), stretches[-1]
        first, end = self._window(update, last)
        done = [self._positions(u, stretches, left) for u in range(first, update)]
        begun = max(last.done(end if done else update), last.rows + len(left))
        return np.setdiff1d(
            self._in_line(last.done(first), begun, last, left), np.concatenate([np.empty(0, np.int64), *done])
        )

    def rows_at(self, positions: Int64, stretch: Stretch) -> Int64:
        """The rows at `positions` of the stream of all epochs, in the order of `stretch`.

        Neighbouring updates are asked for one after the other: rows made in blocks cost a hundredth.
        """
        result = np.empty(len(positions), np.int64)
        blocks = positions // _BLOCK_ROWS
        for number in np.unique(blocks).tolist():
            here = blocks == number
            result[here] = self._rows_of(number, stretch)[positions[here] - number * _BLOCK_ROWS]
        return result

    def _rows_of(self, block: int, stretch: Stretch) -> Int64:
        key = (block, stretch)
        if self._block[0] == key:
            return self._block[1]
        first = block * _BLOCK_ROWS
        # nobody asks for more than the epoch in which the run ends, and epochs may be short
        count = min(_BLOCK_ROWS, (stretch.end // self.rows + 1) * self.rows - first)
        epochs, result = np.divmod(np.arange(first, first + count, dtype=np.int64), self.rows)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if stretch.shuffle else ():
            here = np.flatnonzero(epochs == epoch)
            result[here] = permute(result[here], self.rows, stretch.seed, epoch)
        self._block = (key, result)
        return result


def stretches_of(cursor: Cursor) -> tuple[Stretch, ...]:
    """How the rows of a cursor were dealt out; empty where that is not known."""
    return tuple(Stretch(**values) for values in cursor["stretches"])

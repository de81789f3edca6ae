"""Which rows each update trains on: a function of (seed, epoch, position), never of the world size.

The rows of all epochs form one sequence. Position p of it is row permutation(seed, p // n)(p % n) of the n rows. An update
takes the next G positions, across the boundaries of epochs. So the cursor of a run is the number of rows done, and any number
of ranks resumes the run, with any G.

With `bucket_updates` W > 1 the rows of W updates are a megabatch: they are sorted by length and dealt out G at a time, and the
W updates are shuffled, so that updates of long and of short rows come mixed. A rank reads the lengths of one megabatch for
any update, so nothing is passed over on resume. Megabatches begin anew with each epoch. An update that holds rows of two
epochs, or is part-filled, is in no megabatch, so that no update holds a row twice. A megabatch is at most half an epoch: all
rows of an epoch sorted together would make the same updates in each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from shardwright.data.arrays import FILLER, Int64
from shardwright.data.mixture import Mixture
from shardwright.data.permutation import MEGABATCH_EPOCH, permute
from shardwright.errors import ConfigError, DataError

Cursor = dict[str, Any]
"""Where a run continues in its data: plain values, which a checkpoint stores."""

_BLOCK_ROWS = 4096
_EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True)
class Segment:
    """How rows are dealt out to updates, from one update until a resume with other settings."""

    update: int  # the first update of the segment
    rows: int  # rows done before that update
    end: int  # rows done when the run ends
    global_batch_size: int  # rows of an update
    bucket_updates: int  # updates of a megabatch
    seed: int
    shuffle: bool

    def done(self, update: int) -> int:
        """Rows that are done before `update`."""
        return min(self.rows + (update - self.update) * self.global_batch_size, self.end)

    @property
    def updates(self) -> int:
        """Updates of the run, including those before this segment."""
        return self.update - (self.rows - self.end) // self.global_batch_size

    def same_order(self, other: Segment) -> bool:
        """Whether a position means the same row in both."""
        return (self.seed, self.shuffle) == (other.seed, other.shuffle)


class RowOrder:
    """The row ids of every update of a run over `rows` rows, or over the rows of `mixture`.

    Give `max_steps` or `num_train_epochs` (a fraction is read as the decimal that it prints as). The last update of a run
    counted in epochs may be part-filled: the missing ids are `FILLER`. Its rows keep their weight, since the loss of an update
    is divided by its own targets. With `drop_last` that update is left out. `lengths` gives the tokens of rows; megabatches
    need it. A run that is resumed with other settings takes the rows that are not done yet: see `seek`.
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
        mixture: Mixture | None = None,
        lengths: Callable[[Int64], Int64] | None = None,
    ) -> None:
        self.rows = rows if mixture is None else len(mixture)
        if self.rows < 1:
            raise DataError("The data has no rows.", "There is nothing to train on.", "Check data.train.")
        if (max_steps is None) == (num_train_epochs is None):
            given = "neither is" if max_steps is None else "both are"
            raise ConfigError(
                f"training.max_steps or training.num_train_epochs: {given} given.",
                "Exactly one of these keys sets the length of the run.",
                "Keep one of them.",
            )
        self.global_batch_size, self.bucket_updates = global_batch_size, bucket_updates
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._max_steps, self._epochs = max_steps, num_train_epochs
        self._mixture, self._lengths = mixture, lengths
        self._deal((self._segment(0, 0),))
        if not self.segment.end:
            raise ConfigError(
                f"data.drop_last leaves no update: {self.dropped} rows, training.global_batch_size {global_batch_size}.",
                "The only update would be part-filled.",
                "Lower training.global_batch_size, raise training.num_train_epochs, or remove data.drop_last.",
            )

    def _segment(self, update: int, rows: int) -> Segment:
        """How this run deals out the rows that are left after `rows` rows and `update` updates."""
        size = self.global_batch_size
        if self._max_steps is not None:
            end = rows + max(0, self._max_steps - update) * size
        else:
            end = max(rows, self._all_rows())
            end -= (end - rows) % size if self._drop_last else 0
        return Segment(update, rows, end, size, self.bucket_updates, self._seed, self._shuffle)

    def _all_rows(self) -> int:
        return math.ceil(Fraction(repr(self._epochs)) * self.rows)

    def _deal(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self._block: tuple[Any, Int64] = (None, _EMPTY)
        self._left = self._left_before(segments)

    def _left_before(self, segments: tuple[Segment, ...]) -> Int64:
        """The positions that the last of `segments` takes first: those that an earlier segment had passed over."""
        before = segments[:-1]
        return self._passed_over(segments[-1].update, before) if before else _EMPTY

    @property
    def segment(self) -> Segment:
        """How the updates to come are dealt out."""
        return self.segments[-1]

    @property
    def total_updates(self) -> int:
        """Updates of the whole run, including those before a resume."""
        return self.segment.updates

    @property
    def dropped(self) -> int:
        """Rows of a part-filled last update that `drop_last` leaves out."""
        return max(0, self._all_rows() - self.segment.end) if self._drop_last and self._epochs else 0

    def seek(self, update: int, cursor: Cursor | None, trusted: bool = False) -> None:
        """Lets `update` begin after the rows that `cursor` says are done; each other row comes once an epoch.

        Where nothing has changed, the updates are those of a run without interruption. Otherwise the rows of an unfinished
        megabatch come first. trusted: the rows themselves have changed and this is accepted, so only their number counts.
        """
        if cursor is None:
            return
        found = segments_of(cursor)
        now = self._segment(update, cursor["rows"])
        if trusted or not found[-1].same_order(now):
            self._deal((now,))
        elif replace(found[-1], update=now.update, rows=now.rows) == now:
            self._deal(found)
        else:
            self._deal((*found, now) if len(self._passed_over(update, found)) else (now,))

    def cursor(self, update: int) -> Cursor | None:
        """Where `update` begins: the rows done before it, and how they were dealt out."""
        return {"rows": self.segment.done(update), "segments": [asdict(s) for s in self.segments]}

    def repeated(self, update: int, cursor: Cursor) -> int:
        """How many rows of the current epoch are repeated (as many are skipped), where `cursor` is of another order.

        The whole epoch is counted: this takes about a second for ten million rows.
        """
        found, first = segments_of(cursor), cursor["rows"] // self.rows * self.rows
        former, now = (self.rows_at(np.arange(first, first + self.rows), s) for s in (found[-1], self.segment))
        passed_over = self._passed_over(update, found) - first
        done = np.arange(self.rows) < cursor["rows"] - first + len(passed_over)
        done[passed_over] = False
        size = int(max(former.max(), now.max())) + 1
        trained = np.bincount(former[done], minlength=size) + np.bincount(now[cursor["rows"] - first :], minlength=size)
        return int(np.maximum(0, trained - np.bincount(former, minlength=size)).sum())

    def epoch(self, update: int) -> float | None:
        """Passes over the data completed before `update` begins."""
        return self.segment.done(update) / self.rows

    def close(self) -> None:
        """Stops background work: an order of rows on disk has none."""

    def update_rows(self, update: int) -> Int64:
        """The `global_batch_size` row ids of `update` (0-based), the same on every rank; `FILLER` where there is no row.

        Raises `IndexError` for an update that the run does not have, or had before a resume with other settings.
        """
        if not self.segment.update <= update < self.total_updates:
            raise IndexError(f"update {update} of a run of {self.total_updates} updates")
        positions = self._positions(update, self.segments, self._left)
        result = np.full(self.global_batch_size, FILLER, np.int64)
        result[: len(positions)] = self.rows_at(positions, self.segment)
        return result

    def _positions(self, update: int, segments: tuple[Segment, ...], left: Int64) -> Int64:
        """The positions that `update` of the last of `segments` takes, which begins with the positions `left`."""
        last, size = segments[-1], segments[-1].global_batch_size
        first, end = self._megabatch(update, last)
        positions = self._in_line(last.done(first), last.done(end), last, left)
        if self._lengths is None or end - first == 1:
            return positions
        place = update - first
        if last.shuffle:
            place = int(permute(np.array([place]), end - first, last.seed, MEGABATCH_EPOCH + first)[0])
        by_length = np.argsort(-self._lengths(self.rows_at(positions, last)), kind="stable")
        return positions[by_length[place * size : (place + 1) * size]]

    @staticmethod
    def _in_line(first: int, end: int, segment: Segment, left: Int64) -> Int64:
        """The positions that `segment` takes after `first` rows are done and until `end` are done."""
        found = np.arange(first, end, dtype=np.int64)
        count = int(np.searchsorted(found, segment.rows + len(left)))
        found[:count] = left[found[:count] - segment.rows]
        return found

    def _megabatch(self, update: int, segment: Segment) -> tuple[int, int]:
        """The updates [first, end) of the megabatch that holds `update`; `update` alone where none does."""
        size, rows = segment.global_batch_size, self.rows
        epoch = segment.done(update) // rows
        begin = segment.update + max(0, -(-(epoch * rows - segment.rows) // size))
        end = segment.update + (min((epoch + 1) * rows, segment.end) - segment.rows) // size
        if self._lengths is None or not begin <= update < end:
            return update, update + 1
        count = min(segment.bucket_updates, max(1, (end - begin) // 2))
        first = update - (update - begin) % count
        return first, min(first + count, end)

    def _passed_over(self, update: int, segments: tuple[Segment, ...]) -> Int64:
        """Positions, in order, that are not done when `update` begins although later positions are."""
        left, last = self._left_before(segments), segments[-1]
        first, end = self._megabatch(update, last)
        done = [self._positions(u, segments, left) for u in range(first, update)]
        begun = max(last.done(end if done else update), last.rows + len(left))
        return np.setdiff1d(self._in_line(last.done(first), begun, last, left), np.concatenate([_EMPTY, *done]))

    def rows_at(self, positions: Int64, segment: Segment) -> Int64:
        """The rows at `positions` of the sequence of all epochs, in the order of `segment`."""
        result = np.empty(len(positions), np.int64)
        blocks = positions // _BLOCK_ROWS
        for number in np.unique(blocks).tolist():
            here = blocks == number
            result[here] = self._rows_of(number, segment)[positions[here] - number * _BLOCK_ROWS]
        if self._mixture is not None:
            epochs = positions // self.rows
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                result[here] = self._mixture.rows(result[here], epoch, segment.seed)
        return result

    def _rows_of(self, block: int, segment: Segment) -> Int64:
        """The rows of a block of positions. The last block is kept: neighbouring updates then cost a hundredth."""
        key = (block, segment)
        if self._block[0] == key:
            return self._block[1]
        first = block * _BLOCK_ROWS
        # no caller asks for positions past the epoch in which the run ends, and epochs may be short
        count = min(_BLOCK_ROWS, (segment.end // self.rows + 1) * self.rows - first)
        epochs, result = np.divmod(np.arange(first, first + count, dtype=np.int64), self.rows)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if segment.shuffle else ():
            here = np.flatnonzero(epochs == epoch)
            result[here] = permute(result[here], self.rows, segment.seed, epoch)
        self._block = (key, result)
        return result


def segments_of(cursor: Cursor) -> tuple[Segment, ...]:
    """How the rows of a cursor were dealt out; empty where the cursor does not say."""
    stored = cursor["segments"] if "segments" in cursor else cursor["stretches"]  # the name in older checkpoints
    return tuple(Segment(**values) for values in stored)

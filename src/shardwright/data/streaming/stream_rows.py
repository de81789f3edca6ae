"""The rows of a stream by their position in it, and the updates made of them: what a table and its order are elsewhere.

The rows of a window are taken in an order that follows from (seed, number of the window), and windows one after the other, so
that position p is the same row whatever the ranks, microbatches or batch size. A few windows are held at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.data.order import Cursor, Int64, Order, permute
from shardwright.data.rows import Float64
from shardwright.data.streaming.stream import Place
from shardwright.data.streaming.windows import Window, Windows
from shardwright.data.table import Block, Table
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class _Held:
    """A window and the positions [first, end) of its rows in the stream."""

    window: Window
    first: int

    @property
    def end(self) -> int:
        return self.first + len(self.window.table)


class StreamRows:
    """Rows by position, as `Table` gives them by number. seed: shuffles the rows of each window; None: they are in order."""

    def __init__(self, windows: Windows, seed: int | None, check: Callable[[Table], None]) -> None:
        self.windows, self._seed, self._check = windows, seed, check
        self.max_length, self.packed = windows.cut.max_length, windows.cut.packing is not None
        self._base = (0, 0, Place())
        self._held: deque[_Held] = deque()

    def begin(self, cursor: Cursor | None, trusted: bool) -> int:
        """Goes to a cursor, None for the begin of the stream; the position that it stands for.

        Raises `CheckpointError` where the stream holds something else there than it did. trusted: that is accepted.
        """
        self._held.clear()
        if cursor is None:
            self._base = (0, 0, Place())
            return 0
        place = Place(**cursor["place"])
        self._base = (cursor["window"], cursor["first"], place)
        if trusted:
            return int(cursor["position"])
        names = self.windows.stream.names
        if place.source >= len(names) or self.windows.stream.passed(place) != cursor["passed"]:
            raise _other_stream("The files before that place are others, or others in size, than those that were read.")
        self.hold(cursor["first"], cursor["first"] + 1)
        if self._held[0].window.table.fingerprint != cursor["fingerprint"]:
            raise _other_stream(f"From {names[place.source]}:{place.line} on it holds other documents.")
        return int(cursor["position"])

    def repeated(self, cursor: Cursor, seed: int | None) -> int | None:
        """How many rows of the window of `cursor` come again, and as many never do, where `seed` had shuffled it.

        None: it holds other rows than it did.
        """
        first = cursor["first"]
        self.hold(first, first + 1)
        window = self._held[0].window
        if window.table.fingerprint != cursor["fingerprint"]:
            return None
        rows, done = np.arange(len(window.table)), cursor["position"] - first
        before, now = (
            rows if own is None else permute(rows, len(rows), own, window.number) for own in (seed, self._seed)
        )
        return len(np.intersect1d(before[:done], now[done:]))

    def hold(self, first: int, end: int) -> None:
        """Opens the windows of the positions [first, end) and lets go of those before."""
        if self._held and first < self._held[0].first:
            self._held.clear()
        while not self._held or self._held[-1].end < end:
            if self._held:
                last = self._held[-1]
                number, begin, place = last.window.number + 1, last.end, last.window.next
            else:
                number, begin, place = self._base
            if first < begin and not self._held:
                raise IndexError(f"position {first} of a stream that is read from position {begin} on")
            window = self.windows.open(number, place)
            self._check(window.table)
            self._held.append(_Held(window, begin))
            while self._held[0].end <= first and len(self._held) > 1:
                self._held.popleft()

    def cursor(self, position: int) -> Cursor:
        """Where `position` lies, which the windows held reach: what a run needs to go on from there."""
        held = next((h for h in self._held if position <= h.end), self._held[-1])
        place = held.window.start
        return {
            "position": position,
            "window": held.window.number,
            "first": held.first,
            "place": place.to_json(),
            "fingerprint": held.window.table.fingerprint,
            "passed": self.windows.stream.passed(place),
        }

    def _parts(self, positions: Int64) -> Iterator[tuple[Int64, Table, Int64]]:
        """(indices into `positions`, their table, their rows there) for each window."""
        which = np.searchsorted([held.end for held in self._held], positions, side="right")
        for number in np.unique(which).tolist():
            held, here = self._held[number], np.flatnonzero(which == number)
            rows, table = positions[here] - held.first, held.window.table
            if self._seed is not None:
                rows = permute(rows, len(table), self._seed, held.window.number)
            yield here, table, rows

    def _gathered(self, positions: Int64, dtype: Any, values: Callable[[Table, Int64], Any]) -> Any:
        result = np.empty(len(positions), dtype)
        for here, table, rows in self._parts(positions):
            result[here] = values(table, rows)
        return result

    def real_tokens(self, positions: Int64) -> Int64:
        """Tokens of each row."""
        return np.asarray(self._gathered(positions, np.int64, Table.real_tokens))

    def target_tokens(self, positions: Int64) -> Int64:
        """Targets of each row."""
        return np.asarray(self._gathered(positions, np.int64, Table.target_tokens))

    def target_weights(self, positions: Int64) -> Float64:
        """The sum of the weights of the targets of each row."""
        return np.asarray(self._gathered(positions, np.float64, Table.target_weights))

    def weighs(self, positions: Int64) -> bool:
        """Whether a window of these rows has targets with a weight other than 1."""
        return any(table.weighs(rows) for _, table, rows in self._parts(positions))

    def block(self, positions: Sequence[int], width: int, pad_id: int) -> Block:
        """The contents of rows in `width` positions each."""
        parts = list(self._parts(np.asarray(positions, np.int64)))
        blocks = [table.block(rows.tolist(), width, pad_id) for _, table, rows in parts]
        if len(blocks) == 1:
            return blocks[0]
        back = np.argsort(np.concatenate([here for here, _, _ in parts]))
        weights = None
        if any(block.weights is not None for block in blocks):
            ones = (np.ones(block.labels.shape, np.float32) for block in blocks)
            weights = np.concatenate([o if b.weights is None else b.weights for b, o in zip(blocks, ones)])[back]
        documents = [block.documents for block in blocks if block.documents is not None]
        return Block(
            np.concatenate([block.input_ids for block in blocks])[back],
            np.concatenate([block.labels for block in blocks])[back],
            np.concatenate(documents)[back] if documents else None,
            weights,
        )


class StreamOrder(Order):
    """Update u holds the positions [u G, (u + 1) G) of a stream, counted from where the run took it up."""

    def __init__(self, rows: StreamRows, *, global_batch_size: int, max_steps: int) -> None:
        self._stream, self.global_batch_size, self._updates = rows, global_batch_size, max_steps
        self._from = (0, 0)

    @property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        return self._updates

    def seek(self, update: int, cursor: Cursor | None, trusted: bool = False) -> None:
        """Lets `update` begin where `cursor` says; see `StreamRows.begin`."""
        self._from = (update, self._stream.begin(cursor, trusted))

    def repeated_in_window(self, cursor: Cursor, seed: int | None) -> int | None:
        """See `StreamRows.repeated`."""
        return self._stream.repeated(cursor, seed)

    def epoch(self, update: int) -> float | None:
        """None: the length of a pass is not known."""
        return None

    def update_rows(self, update: int) -> Int64:
        """The positions of the rows of `update` (0-based); they can then be asked for."""
        if not 0 <= update < self.total_updates:
            raise IndexError(f"update {update} of a run of {self.total_updates} updates")
        first = self._position(update)
        self._stream.hold(first, first + self.global_batch_size)
        return np.arange(first, first + self.global_batch_size, dtype=np.int64)

    def cursor(self, update: int) -> Cursor:
        """Where `update` begins, of which the update before was the last one made."""
        return self._stream.cursor(self._position(update))

    def close(self) -> None:
        """Ends what is being made ahead."""
        self._stream.windows.close()

    def _position(self, update: int) -> int:
        known, position = self._from
        return position + (update - known) * self.global_batch_size


def _other_stream(why: str) -> CheckpointError:
    return CheckpointError(
        "The stream is not the one that the checkpoint was trained on.",
        why,
        "Restore the data, start anew with another output_dir, or confirm with checkpoint.accept_changes.",
    )

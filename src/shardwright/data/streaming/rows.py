"""The rows of a stream by their position in it, and the updates made of them, in place of `Table` and `RowOrder`.

The rows of a window are taken in an order that follows from (seed, number of the window), and windows one after the other. So
position p is the same row whatever the ranks, microbatches or batch size. A few windows are held at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardwright.data.arrays import Float64, Int64
from shardwright.data.documents import Documents
from shardwright.data.order import Cursor, RowOrder
from shardwright.data.permutation import permute
from shardwright.data.streaming.record_stream import StreamPosition
from shardwright.data.streaming.windows import StreamWindow, StreamWindows
from shardwright.data.table import Block, Table
from shardwright.errors import CheckpointError


class StreamTable:
    """Rows by position, as `Table` gives rows by number.

    seed: shuffles the rows of each window; None: they stay in order. check: raises an error for documents that do not fit.
    """

    def __init__(self, windows: StreamWindows, seed: int | None, check: Callable[[Documents], None]) -> None:
        self.windows, self._seed, self._check = windows, seed, check
        self.max_length, self.packed = windows.rules.max_length, windows.rules.packing is not None
        self._base = (
            0,
            0,
            StreamPosition(),
        )  # window from which the stream is read, position of its first row, its start
        self._held: deque[StreamWindow] = deque()

    def begin(self, cursor: Cursor | None, trusted: bool) -> int:
        """Goes to a cursor, None for the beginning of the stream; returns the position of the cursor.

        Raises `CheckpointError` where the stream holds other records there than before. trusted: other records are accepted.
        """
        self._held.clear()
        if cursor is None:
            self._base = (0, 0, StreamPosition())
            return 0
        at = StreamPosition(**cursor["place"])
        self._base = (cursor["window"], cursor["first"], at)
        if trusted:
            return int(cursor["position"])
        stream = self.windows.stream
        if at.source >= len(stream.names) or stream.sizes_before(at) != cursor["passed"]:
            raise _other_stream("The files that were read before the checkpoint have changed, or their sizes have.")
        if self._window_of(cursor).table.fingerprint != cursor["fingerprint"]:
            raise _other_stream(f"From {stream.names[at.source]}:{at.line} on, the documents have changed.")
        return int(cursor["position"])

    def _window_of(self, cursor: Cursor) -> StreamWindow:
        self.hold(cursor["first"], cursor["first"] + 1)
        return self._held[0]

    def repeated(self, cursor: Cursor, seed: int | None) -> int | None:
        """How many rows of the window of `cursor`, which `seed` had shuffled, are repeated; as many are skipped.

        None: the window holds other rows than before.
        """
        window = self._window_of(cursor)
        if window.table.fingerprint != cursor["fingerprint"]:
            return None
        rows, done = np.arange(len(window.table)), cursor["position"] - cursor["first"]
        before, now = (
            rows if own is None else permute(rows, len(rows), own, window.number) for own in (seed, self._seed)
        )
        return len(np.intersect1d(before[:done], now[done:]))

    def hold(self, first: int, end: int) -> None:
        """Opens the windows of the positions [first, end) and releases earlier windows."""
        if self._held and first < self._held[0].first:
            self._held.clear()
        while not self._held or self._held[-1].end < end:
            if self._held:
                last = self._held[-1]
                number, begin, at = last.number + 1, last.end, last.next
            else:
                number, begin, at = self._base
            if first < begin and not self._held:
                raise IndexError(f"position {first} of a stream that is read from position {begin} on")
            window = self.windows.open(number, at, begin)
            self._check(window.table.documents)
            self._held.append(window)
            while self._held[0].end <= first and len(self._held) > 1:
                self._held.popleft()

    def cursor(self, position: int) -> Cursor:
        """Where a run continues that has trained the rows before `position`, which lies in a window held."""
        held = next((h for h in self._held if position <= h.end), self._held[-1])
        return {
            "position": position,
            "window": held.number,
            "first": held.first,
            "place": held.start.to_json(),
            "fingerprint": held.table.fingerprint,
            "passed": self.windows.stream.sizes_before(held.start),
        }

    def _parts(self, positions: Int64) -> Iterator[tuple[Int64, Table, Int64]]:
        """(indices into `positions`, their table, their rows in it) for each window."""
        which = np.searchsorted([held.end for held in self._held], positions, side="right")
        for number in np.unique(which).tolist():
            held, here = self._held[number], np.flatnonzero(which == number)
            rows, table = positions[here] - held.first, held.table
            if self._seed is not None:
                rows = permute(rows, len(table), self._seed, held.number)
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


class StreamOrder(RowOrder):
    """Update u holds the positions [u G, (u + 1) G) of a stream, counted from where the run was resumed."""

    def __init__(self, rows: StreamTable, *, global_batch_size: int, max_steps: int) -> None:
        self._stream, self.global_batch_size, self._updates = rows, global_batch_size, max_steps
        self._from = (0, 0)  # an update, and the position at which it begins

    @property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        return self._updates

    def seek(self, update: int, cursor: Cursor | None, trusted: bool = False) -> None:
        """Lets `update` begin where `cursor` says; see `StreamTable.begin`."""
        self._from = (update, self._stream.begin(cursor, trusted))

    def repeated_in_window(self, cursor: Cursor, seed: int | None) -> int | None:
        """See `StreamTable.repeated`."""
        return self._stream.repeated(cursor, seed)

    def epoch(self, update: int) -> float | None:
        """None: the length of a pass is not known."""
        return None

    def update_rows(self, update: int) -> Int64:
        """The positions of the rows of `update` (0-based); the windows of these rows are then held."""
        if not 0 <= update < self.total_updates:
            raise IndexError(f"update {update} of a run of {self.total_updates} updates")
        first = self._position(update)
        self._stream.hold(first, first + self.global_batch_size)
        return np.arange(first, first + self.global_batch_size, dtype=np.int64)

    def cursor(self, update: int) -> Cursor:
        """Where `update` begins; the update before it must be the last that was made."""
        return self._stream.cursor(self._position(update))

    def close(self) -> None:
        """Stops the making of windows ahead."""
        self._stream.windows.close()

    def _position(self, update: int) -> int:
        known, position = self._from
        return position + (update - known) * self.global_batch_size


def _other_stream(why: str) -> CheckpointError:
    return CheckpointError(
        "The stream differs from the stream that the checkpoint was trained on.",
        why,
        "Restore the data, start a new run in another output_dir, or accept the change with checkpoint.accept_changes.",
    )

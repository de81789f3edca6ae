"""How many rows a checkpoint has done, and how a run continues with the rows that are not done yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.manifest import Manifest
from shardwright.config.load import read_settings
from shardwright.config.rates import OPEN_ENDED
from shardwright.config.schema import RunFile
from shardwright.data.order import Cursor, RowOrder, Segment, segments_of
from shardwright.data.streaming.rows import StreamOrder

_ONCE = "no row is repeated or skipped"
_AGAIN = "some rows may be repeated or skipped"


@dataclass(frozen=True)
class SavedPosition:
    """Where a checkpoint stands in the data. fingerprint: of the rows. settings: of the run that wrote it, by dotted keys."""

    update: int
    cursor: Cursor | None
    fingerprint: str
    settings: Mapping[str, Any]

    @staticmethod
    def of(manifest: Manifest, config: str) -> SavedPosition:
        """From the manifest and the saved run file."""
        return SavedPosition(manifest.update, manifest.cursor, manifest.data_fingerprint, read_settings(config))

    def counted(self, rows: int, run: RunFile) -> Cursor:
        """A cursor for a checkpoint that was written without one: its updates times its batch size are done.

        run: gives the settings that the saved run file lacks.
        """
        own = {"training": run.training, "data": run.data}

        def saved(section: str, *names: str) -> dict[str, Any]:
            return {n: self.settings.get(f"{section}.{n}", getattr(own[section], n)) for n in names}

        training = saved("training", "global_batch_size", "max_steps", "num_train_epochs", "seed")
        cursor = RowOrder(rows, **training, **saved("data", "shuffle", "drop_last", "bucket_updates")).cursor(
            self.update
        )
        assert cursor is not None
        return cursor


def accepts_other_data(run: RunFile) -> bool:
    """Whether a key of `checkpoint.accept_changes` decides which rows there are."""
    accepted, packed = run.checkpoint.accept_changes, run.data.batching == "pack"
    return (packed and "training.seed" in accepted) or any(
        key.startswith("data.") or "tokenizer" in key for key in accepted
    )


def resume_rows(order: RowOrder, saved: SavedPosition, run: RunFile, fingerprint: str) -> list[str]:
    """Lets `order` begin after the rows that are done; returns lines about changed rows and a changed length.

    fingerprint: of this run's rows. Raises `CheckpointError` where a stream holds other data at its cursor than before, unless
    other data is accepted.
    """
    if isinstance(order, StreamOrder):
        order.seek(saved.update, _stream_cursor(saved.cursor), accepts_other_data(run))
        length = saved.settings.get("training.max_steps")
        return [*_of_stream(order, saved, run), *_of_length(length, order, run)]
    cursor, other = saved.cursor or saved.counted(order.rows, run), saved.fingerprint != fingerprint
    if stream := _stream_cursor(cursor):  # of a stream's cursor only the number of rows holds here
        cursor, other = {"rows": stream["position"], "segments": []}, True
    order.seek(saved.update, cursor, other)
    before = next(iter(segments_of(cursor)[-1:]), None)
    if before == order.segment:
        return []
    rows = _of_rows(order, saved, cursor, before, other) if saved.update < order.total_updates else ()
    return [*rows, *_of_length(before.updates if before else None, order, run)]


def _stream_cursor(cursor: Cursor | None) -> Cursor | None:
    """The cursor if it belongs to a stream, else None."""
    return cursor if cursor is not None and "place" in cursor else None


def _of_rows(
    order: RowOrder, saved: SavedPosition, cursor: Cursor, before: Segment | None, other: bool
) -> Iterator[str]:
    epoch, row = divmod(cursor["rows"], order.rows)
    place = f"row {row + 1:,} of {order.rows:,} of epoch {epoch + 1}" if row else f"epoch {epoch + 1}"
    if other or before is None:
        what = f". The data has changed: {_AGAIN}"
    elif before.same_order(order.segment):
        what = f"; {_ONCE}"
    else:
        what = _other_order(order.repeated(saved.update, cursor))
    yield f"{cursor['rows']:,} rows are done, and update {saved.update} begins with {place}{what if row else ''}."
    if saved.cursor is None:
        yield "The number is computed as updates times batch size: checkpoints of old versions do not hold the number."


def _other_order(again: int) -> str:
    return f". The order of its rows has changed: {again:,} rows are repeated, and {again:,} are skipped"


def _of_stream(order: StreamOrder, saved: SavedPosition, run: RunFile) -> Iterator[str]:
    cursor, settings = _stream_cursor(saved.cursor), saved.settings
    if cursor is None:
        yield "The stream is read from its beginning: the checkpoint was trained on other data."
        return
    seed = settings.get("training.seed") if settings.get("data.shuffle") else None
    again = order.repeated_in_window(cursor, seed)
    done = f"{cursor['position']:,} rows are done, and update {saved.update} begins in window {cursor['window']}"
    if again is None:
        yield f"{done} of the stream. The window holds other rows than before: {_AGAIN}."
    elif again:
        yield f"{done} of the stream{_other_order(again)}."
    elif settings.get("training.global_batch_size") != run.training.global_batch_size:
        yield f"{done} of the stream; {_ONCE}."


def _of_length(before: int | None, order: RowOrder, run: RunFile) -> Iterator[str]:
    now, kind = order.total_updates, run.training.lr_scheduler_type
    if before is not None and before != now:
        rates = "" if kind in OPEN_ENDED else f", and lr_scheduler_type {kind} follows the new number"
        yield f"The run now has {now:,} updates instead of {before:,}{rates}."

"""Records that are tokenised already: ids, which of them are trained, and where documents end in them.

input_ids                                      the tokens
labels                                         -100: not trained; all else is the token at the same place
loss_mask, completion_mask, assistant_masks    0: not trained; a token is trained where every mask and label says so
loss_weights                                   the weight of each token as a target
attention_mask                                 0: padding, which is left out
position_ids, seq_lengths                      where the documents of a packed row begin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwright.data.sources import Record, kind_of
from shardwright.errors import DataError
from shardwright.layout.loss import IGNORE_INDEX

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
COLUMNS = ("labels", *MASKS, "loss_weights", "attention_mask", "position_ids", "seq_lengths")


@dataclass(frozen=True)
class Tokens:
    """Token ids and, where not all are trained alike, the weight of each as a target.

    bounds: where each document begins, and the number of ids. divided_by: the columns that say so.
    """

    ids: list[int]
    weights: list[float] | None
    bounds: tuple[int, ...]
    divided_by: tuple[str, ...]


def tokens_of(record: Record, where: str) -> Tokens:
    """The tokens of a record. Raises `DataError` with `where` for a column that does not fit the others."""
    ids = _numbers(record, "input_ids", int, where)
    weights = _weights(record, ids, where)
    real = [True] * len(ids)
    if record.get("attention_mask") is not None:
        real = [bool(value) for value in _mask(record, "attention_mask", ids, where)]
    kept = [place for place, there in enumerate(real) if there]
    return Tokens(
        [ids[place] for place in kept],
        None if weights is None else [weights[place] for place in kept],
        *_bounds(record, ids, kept, where),
    )


def _weights(record: Record, ids: list[int], where: str) -> list[float] | None:
    """The weight of each token; None where nothing speaks of them."""
    weights = None
    if record.get("loss_weights") is not None:
        weights = [float(weight) for weight in _numbers(record, "loss_weights", float, where)]
        _same_length(weights, ids, "loss_weights", where)
        for position, weight in enumerate(weights):
            if not 0 <= weight < float("inf"):
                raise DataError(f"{where}: `loss_weights[{position}]` is {weight}.", "A weight is at least 0.")
    trained = [_mask(record, column, ids, where) for column in MASKS if record.get(column) is not None]
    if record.get("labels") is not None:
        trained.append(_labelled(record, ids, where))
    for mask in trained:
        weights = [weight * value for weight, value in zip(weights or [1.0] * len(ids), mask)]
    return weights


def _labelled(record: Record, ids: list[int], where: str) -> list[float]:
    """1 where `labels` has the token of its position, 0 where it has -100."""
    labels = _numbers(record, "labels", int, where)
    _same_length(labels, ids, "labels", where)
    for position, (label, token) in enumerate(zip(labels, ids)):
        if label not in (token, IGNORE_INDEX):
            raise DataError(
                f"{where}: `labels[{position}]` is {label} where `input_ids` has {token}.",
                "A label is the token at its own position or -100; training shifts the labels itself.",
                "Write labels that are not shifted.",
            )
    return [float(label != IGNORE_INDEX) for label in labels]


def _mask(record: Record, column: str, ids: list[int], where: str) -> list[float]:
    values = _numbers(record, column, float | bool, where)
    _same_length(values, ids, column, where)
    for position, value in enumerate(values):
        if value not in (0, 1):
            fix = " Use `position_ids` or `seq_lengths` to say where documents begin." * (column == "attention_mask")
            raise DataError(f"{where}: `{column}[{position}]` is {value}.", "A mask holds 0 and 1." + fix)
    return [float(value) for value in values]


def _bounds(record: Record, ids: list[int], kept: list[int], where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where documents begin among the tokens `kept`, with their number, and the columns that say so."""
    found = {
        column: starts(record, ids, kept, where)
        for column, starts in (("seq_lengths", _from_lengths), ("position_ids", _from_positions))
        if record.get(column) is not None
    }
    if len({frozenset(starts) for starts in found.values()}) > 1:
        raise DataError(
            f"{where}: `seq_lengths` and `position_ids` begin documents at different places.",
            "Which column is right cannot be told.",
            "Correct or remove one of the columns.",
        )
    starts = next(iter(found.values()), {0})
    return (*sorted(starts), len(kept)), tuple(found) if len(starts) > 1 else ()


def _from_lengths(record: Record, ids: list[int], kept: list[int], where: str) -> set[int]:
    lengths = _numbers(record, "seq_lengths", int, where)
    if sum(lengths) != len(ids) or min(lengths, default=1) < 1:
        raise DataError(
            f"{where}: `seq_lengths` adds up to {sum(lengths)} for {len(ids)} `input_ids`.",
            "`seq_lengths` must hold the length of each document, at least 1, in order.",
        )
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    return _changes([document[place] for place in kept])


def _from_positions(record: Record, ids: list[int], kept: list[int], where: str) -> set[int]:
    positions = _numbers(record, "position_ids", int, where)
    _same_length(positions, ids, "position_ids", where)
    before = -1
    for place in kept:
        if positions[place] not in (0, before + 1):
            raise DataError(
                f"{where}: `position_ids[{place}]` is {positions[place]} after {before}."
                if before >= 0
                else f"{where}: `position_ids` begins with {positions[place]}.",
                "The positions of a document must count up from 0, one by one.",
                "Correct the column, or remove it.",
            )
        before = positions[place]
    return {0, *(number for number, place in enumerate(kept) if positions[place] == 0)}


def _changes(values: list[int]) -> set[int]:
    return {0, *(number for number, (a, b) in enumerate(pairwise(values), 1) if a != b)}


def _same_length(values: Sequence[Any], ids: Sequence[int], column: str, where: str) -> None:
    if len(values) != len(ids):
        raise DataError(f"{where}: `{column}` has {len(values)} values for {len(ids)} `input_ids`.")


def _numbers(record: Record, column: str, kind: Any, where: str) -> list[Any]:
    values = record[column]
    if not isinstance(values, list):
        raise DataError(f"{where}: `{column}` is {kind_of(values)}, not a list.")
    for position, value in enumerate(values):
        good = isinstance(value, int | kind) and (not isinstance(value, bool) or kind == float | bool)
        if not good or (column == "input_ids" and not 0 <= value < 2**31):
            shown = value if isinstance(value, int | float) else kind_of(value)
            raise DataError(f"{where}: `{column}[{position}]` is {shown}.")
    return values

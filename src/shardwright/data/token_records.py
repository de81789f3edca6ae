"""Records of format tokens: token ids, which of the tokens are trained, and where documents end in them.

input_ids                                      the tokens
labels                                         -100: not trained; any other label is the token at the same position
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

from shardwright.data.records import Record, json_type
from shardwright.errors import DataError
from shardwright.layout.loss import IGNORE_INDEX

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
COLUMNS = ("labels", *MASKS, "loss_weights", "attention_mask", "position_ids", "seq_lengths")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a record, of one document or several."""

    ids: list[int]
    weights: list[float] | None  # of each token as a target; None: all 1
    bounds: tuple[int, ...]  # where each document begins, and the number of ids
    divided_by: tuple[str, ...]  # the columns that divide the record into documents


def tokens_of(record: Record, where: str) -> Tokens:
    """The tokens of a record. Raises `DataError` with `where` for a column that does not fit the others."""
    ids = _numbers(record, "input_ids", int, where)
    weights = _weights(record, ids, where)
    kept = list(range(len(ids)))
    if record.get("attention_mask") is not None:
        real = _mask(record, "attention_mask", ids, where)
        kept = [position for position in kept if real[position]]
    return Tokens(
        [ids[position] for position in kept],
        None if weights is None else [weights[position] for position in kept],
        *_bounds(record, ids, kept, where),
    )


def _weights(record: Record, ids: list[int], where: str) -> list[float] | None:
    """The weight of each token; None where no column says anything about weights."""
    weights = None
    if record.get("loss_weights") is not None:
        weights = [float(weight) for weight in _beside(record, "loss_weights", float, ids, where)]
        for position, weight in enumerate(weights):
            if not 0 <= weight < float("inf"):
                raise DataError(
                    f"{where}: `loss_weights[{position}]` is {weight}.", "A weight is a number of at least 0."
                )
    trained = [_mask(record, column, ids, where) for column in MASKS if record.get(column) is not None]
    if record.get("labels") is not None:
        trained.append(_labelled(record, ids, where))
    for mask in trained:
        weights = [weight * value for weight, value in zip(weights or [1.0] * len(ids), mask)]
    return weights


def _labelled(record: Record, ids: list[int], where: str) -> list[float]:
    """1 where `labels` has the token of its position, 0 where `labels` has -100."""
    labels = _beside(record, "labels", int, ids, where)
    for position, (label, token) in enumerate(zip(labels, ids)):
        if label not in (token, IGNORE_INDEX):
            raise DataError(
                f"{where}: `labels[{position}]` is {label} where `input_ids` has {token}.",
                "A label must be the token at its own position, or -100. Training shifts the labels itself.",
                "Write labels that are not shifted.",
            )
    return [float(label != IGNORE_INDEX) for label in labels]


def _mask(record: Record, column: str, ids: list[int], where: str) -> list[float]:
    values = _beside(record, column, float | bool, ids, where)
    for position, value in enumerate(values):
        if value not in (0, 1):
            fix = "`position_ids` or `seq_lengths` say where documents begin." if column == "attention_mask" else ""
            raise DataError(f"{where}: `{column}[{position}]` is {value}.", "A mask holds 0 and 1.", fix)
    return [float(value) for value in values]


def _bounds(record: Record, ids: list[int], kept: list[int], where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where documents begin among the tokens `kept`, with the number of tokens, and the columns that say so."""
    found = {
        column: starts(record, ids, kept, where)
        for column, starts in (("seq_lengths", _from_lengths), ("position_ids", _from_positions))
        if record.get(column) is not None
    }
    if len({frozenset(starts) for starts in found.values()}) > 1:
        raise DataError(
            f"{where}: `seq_lengths` and `position_ids` begin documents at different positions.",
            "It is not known which of the two columns is right.",
            "Correct or remove one of the columns.",
        )
    starts = next(iter(found.values()), {0})
    return (*sorted(starts), len(kept)), tuple(found) if len(starts) > 1 else ()


def _from_lengths(record: Record, ids: list[int], kept: list[int], where: str) -> set[int]:
    lengths = _numbers(record, "seq_lengths", int, where)
    if sum(lengths) != len(ids) or min(lengths, default=1) < 1:
        raise DataError(
            f"{where}: `seq_lengths` adds up to {sum(lengths)} for {len(ids)} `input_ids`.",
            "`seq_lengths` must hold the length of each document in order, each at least 1.",
        )
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    numbers = [document[position] for position in kept]
    return {0, *(number for number, (a, b) in enumerate(pairwise(numbers), 1) if a != b)}


def _from_positions(record: Record, ids: list[int], kept: list[int], where: str) -> set[int]:
    positions = _beside(record, "position_ids", int, ids, where)
    before = -1
    for place in kept:
        if positions[place] not in (0, before + 1):
            raise DataError(
                f"{where}: `position_ids[{place}]` is {positions[place]} after {before}."
                if before >= 0
                else f"{where}: `position_ids` begins with {positions[place]}.",
                "The positions of a document must count up from 0.",
                "Correct or remove the column.",
            )
        before = positions[place]
    return {0, *(number for number, place in enumerate(kept) if positions[place] == 0)}


def _beside(record: Record, column: str, kind: Any, ids: Sequence[int], where: str) -> list[Any]:
    """The numbers in `column`, as many as there are `ids`."""
    values = _numbers(record, column, kind, where)
    if len(values) != len(ids):
        raise DataError(f"{where}: `{column}` has {len(values)} values for {len(ids)} `input_ids`.")
    return values


def _numbers(record: Record, column: str, kind: Any, where: str) -> list[Any]:
    values = record[column]
    if not isinstance(values, list):
        raise DataError(f"{where}: `{column}` is {json_type(values)}, not a list.")
    for position, value in enumerate(values):
        good = isinstance(value, int | kind) and (not isinstance(value, bool) or kind == float | bool)
        if not good or (column == "input_ids" and not 0 <= value < 2**31):
            shown = value if isinstance(value, int | float) else json_type(value)
            raise DataError(f"{where}: `{column}[{position}]` is {shown}.")
    return values

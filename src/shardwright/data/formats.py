"""The formats of records, in TRL's column names: how each is recognised, and what of it is trained.

format             columns                        trained
text               text (or data.text_column)     all
messages           messages                       assistant messages
prompt_completion  prompt, completion             the completion: strings, or lists of messages
tokens             input_ids                      all; or labels that are not -100; or loss_weights
alpaca             instruction, output            output; `instruction` and `input` are the user's message
sharegpt           conversations                  messages, from {from, value}

`tools` and `chat_template_kwargs` beside messages go to the chat template. Other columns are not read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.schema import Data
from shardwright.data.sources import TABLES, Record, columns, kind_of, no_column, text_of
from shardwright.errors import ConfigError, DataError, did_you_mean

REQUIRED = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
OPTIONAL = frozenset(
    (
        "tools",
        "chat_template_kwargs",
        "labels",
        "loss_weights",
        "attention_mask",
        "input",
        "system",
        "history",
    )
)
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template. `first`: number of the first message that may be trained by default."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    first: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as strings."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """Token ids and, where not all are trained alike, the weight of each as a target."""

    ids: list[int]
    weights: list[float] | None


Sample = str | Chat | Completion | Tokens


def find_format(path: str, data: Data) -> str | None:
    """The format of a file by its columns and data.format; None for a file without records.

    Raises `DataError` when the columns fit none or several.
    """
    return format_of(columns(path), path, data)


def format_of(present: list[str] | None, path: str, data: Data) -> str | None:
    """The same for a file whose first record has the columns `present`; None: plain lines of text."""
    if present is None:
        if data.format not in ("auto", "text"):
            raise DataError(
                f"{path} holds plain lines of text.", f"data.format is {data.format}.", "Use JSONL."
            )
        return "text"
    if not present:
        return None
    if data.format != "auto" or data.text_column != "text":
        form = "text" if data.format == "auto" else data.format
        for column in (data.text_column,) if form == "text" else REQUIRED[form]:
            if column not in present and Path(path).suffix in TABLES:  # a line of JSON is judged by itself
                raise no_column(path, column, present, "data.text_column or data.format asks for it.")
        return form
    fits = [name for name, needed in REQUIRED.items() if set(needed) <= set(present)]
    if len(fits) > 1:
        named = " and ".join(f"`{'`, `'.join(REQUIRED[name])}`" for name in fits)
        raise DataError(
            f"{path}: the columns {named} fit the formats {' and '.join(fits)}.",
            "Each would train something else.",
            f"Set data.format to {' or '.join(fits)}.",
        )
    return fits[0] if fits else _refuse(path, present)


def _refuse(path: str, present: Sequence[str]) -> str:
    needed = sorted({column for names in REQUIRED.values() for column in names})
    for column in present:
        close = did_you_mean(column, needed)
        if close.startswith("Did"):
            raise no_column(path, close.split("`")[1], [column], f"Columns here: {', '.join(present)}.")
    formats = "; ".join(f"{name}: {', '.join(names)}" for name, names in REQUIRED.items())
    raise DataError(
        f"{path}: no format has the columns {', '.join(present)}.",
        f"Known are {formats}.",
        "data.text_column names a column of text.",
    )


def refuse_without_effect(data: Data, formats: Sequence[str]) -> None:
    """Raises `ConfigError` for a key of section data that no format of the training files reads."""
    chats = {"messages", "prompt_completion", "alpaca", "sharegpt"} & set(formats)
    readers = {
        "append_eos": (not data.append_eos, bool({"text", "prompt_completion"} & set(formats))),
        "assistant_only_loss": (data.assistant_only_loss is not None, bool(chats)),
        "chat_template": (data.chat_template is not None, bool(chats)),
        "completion_only_loss": (data.completion_only_loss is not None, "prompt_completion" in formats),
        "text_column": (data.text_column != "text", "text" in formats),
    }
    for key, (given, read) in readers.items():
        if given and not read:
            raise ConfigError(
                f"data.{key} has no effect here.", f"data.train holds {' and '.join(formats)}.", "Remove it."
            )


def sample_of(record: Record, form: str, data: Data, where: str) -> Sample:
    """The record as what its format holds. Raises `DataError` with `where` for what does not fit."""
    if form == "text":
        return text_of(record, data.text_column, where, "data.text_column")
    for column in REQUIRED[form]:
        if column not in record:
            raise no_column(where, column, list(record), f"The format is {form}.")
    if form == "tokens":
        return _tokens(record, where)
    if form == "alpaca":
        return Chat(_alpaca(record, where))
    if form == "prompt_completion":
        return _prompt_completion(record, data, where)
    if form == "sharegpt":
        messages = [
            _turn(turn, f"`conversations[{n}]`", where) for n, turn in _list(record, "conversations", where)
        ]
        return Chat(_system(record, where) + messages, *_for_template(record, where))
    return Chat(_messages(record, "messages", where), *_for_template(record, where))


def _list(record: Record, column: str, where: str) -> list[tuple[int, Any]]:
    value = record[column]
    if not isinstance(value, list):
        raise DataError(f"{where}: `{column}` is {kind_of(value)}, not a list.")
    return list(enumerate(value))


def _messages(record: Record, column: str, where: str) -> list[Message]:
    result = []
    for number, message in _list(record, column, where):
        place = f"{where}: `{column}[{number}]`"
        if not isinstance(message, dict):
            raise DataError(f"{place} is {kind_of(message)}, not a message of role and content.")
        if not isinstance(message.get("role"), str):
            raise DataError(f"{place} has no `role`.", f"It has: {', '.join(message) or 'nothing'}.")
        result.append({key: value for key, value in message.items() if value is not None})
    return result


def _for_template(record: Record, where: str) -> tuple[list[dict[str, Any]] | None, dict[str, Any] | None]:
    """(tools, chat_template_kwargs) of the record; both may also be written as JSON strings."""
    values: list[Any] = []
    for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = record.get(column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise DataError(f"{where}: `{column}` is a string that is not JSON.", f"{error}.") from None
        if value is not None and not isinstance(value, kind):
            raise DataError(f"{where}: `{column}` is {kind_of(value)}, not {kind_of(kind())}.")
        values.append(value or None)
    return values[0], values[1]


def _prompt_completion(record: Record, data: Data, where: str) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(record, "prompt", where), _messages(record, "completion", where)
        first = len(before) if data.completion_only_loss is not False else 0
        return Chat(before + after, *_for_template(record, where), first=first)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError(
            f"{where}: `prompt` is {kind_of(prompt)} and `completion` is {kind_of(completion)}.",
            "",
            "Make both strings, or both lists of messages.",
        )
    return Completion(text_of(record, "prompt", where), text_of(record, "completion", where))


def _alpaca(record: Record, where: str) -> list[Message]:
    user = text_of(record, "instruction", where)
    if record.get("input"):
        user += "\n\n" + text_of(record, "input", where)
    messages = _system(record, where)
    for number, pair in _list(record, "history", where) if record.get("history") else ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: `history[{number}]` is no pair of instruction and output.")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    output = {"role": "assistant", "content": text_of(record, "output", where)}
    return [*messages, {"role": "user", "content": user}, output]


def _system(record: Record, where: str) -> list[Message]:
    return [{"role": "system", "content": text_of(record, "system", where)}] if record.get("system") else []


def _turn(turn: Any, place: str, where: str) -> Message:
    """A ShareGPT turn {from, value} as a message."""
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"{where}: {place} is no turn of `from` and `value`.")
    if turn.get("from") not in _ROLES:
        raise DataError(
            f"{where}: {place} is from `{turn.get('from')}`.", "", f"Known are {', '.join(_ROLES)}."
        )
    marks = {key: turn[key] for key in ("train", "loss_weight") if turn.get(key) is not None}
    return {"role": _ROLES[turn["from"]], "content": turn["value"], **marks}


def _tokens(record: Record, where: str) -> Tokens:
    ids = _numbers(record, "input_ids", int, where)
    weights = None
    if record.get("loss_weights") is not None:
        weights = [float(weight) for weight in _numbers(record, "loss_weights", float, where)]
        _same_length(weights, ids, "loss_weights", where)
        for position, weight in enumerate(weights):
            if not 0 <= weight < float("inf"):
                raise DataError(
                    f"{where}: `loss_weights[{position}]` is {weight}.", "A weight is at least 0."
                )
    if record.get("labels") is not None:
        labels = _numbers(record, "labels", int, where)
        _same_length(labels, ids, "labels", where)
        for position, (label, token) in enumerate(zip(labels, ids)):
            if label not in (token, -100):
                raise DataError(
                    f"{where}: `labels[{position}]` is {label} where `input_ids` has {token}.",
                    "A label is the token at its own position or -100; labels are shifted here, once.",
                    "Write labels that are not shifted.",
                )
        weights = [
            0.0 if label == -100 else weight for label, weight in zip(labels, weights or [1.0] * len(ids))
        ]
    if record.get("attention_mask") is not None:
        mask = _numbers(record, "attention_mask", int, where)
        _same_length(mask, ids, "attention_mask", where)
        ids = [token for token, real in zip(ids, mask) if real]
        weights = None if weights is None else [weight for weight, real in zip(weights, mask) if real]
    return Tokens(ids, weights)


def _same_length(values: Sequence[Any], ids: Sequence[int], column: str, where: str) -> None:
    if len(values) != len(ids):
        raise DataError(f"{where}: `{column}` has {len(values)} values for {len(ids)} `input_ids`.")


def _numbers(record: Record, column: str, kind: type, where: str) -> list[Any]:
    for position, value in _list(record, column, where):
        good = isinstance(value, int | kind) and not isinstance(value, bool)
        if not good or (column == "input_ids" and not 0 <= value < 2**31):
            shown = value if isinstance(value, int | float) else kind_of(value)
            raise DataError(f"{where}: `{column}[{position}]` is {shown}.")
    values: list[Any] = record[column]
    return values

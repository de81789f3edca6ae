"""The formats of records, in TRL's column names: how each is recognised, and what of it is trained.

format             columns                        trained
text               text (or data.text_column)     all
messages           messages                       assistant messages
prompt_completion  prompt, completion             the completion: strings, or lists of messages
tokens             input_ids                      all, or as masks beside them say (`tokenised.py`)
alpaca             instruction, output            output; `instruction` and `input` are the user's message
sharegpt           conversations                  messages, from {from, value}

`tools`, `documents` and `chat_template_kwargs` beside messages go to the chat template. A column that nothing reads is counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.config.schema import Data
from shardwright.data import tokenised
from shardwright.data.files import TABLES, kind_of_file
from shardwright.data.sources import Record, columns, kind_of, no_column, text_of
from shardwright.errors import ConfigError, DataError, did_you_mean

REQUIRED = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
FOR_TEMPLATE = {"tools": list, "documents": list, "chat_template_kwargs": dict}
"""Columns beside messages that go to the chat template, and what each holds."""
OPTIONAL: dict[str, tuple[str, ...]] = {
    "text": (),
    "messages": (*FOR_TEMPLATE,),
    "prompt_completion": (*FOR_TEMPLATE,),
    "tokens": tokenised.COLUMNS,
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", *FOR_TEMPLATE),
}
WEIGHTS = ("train", "loss_weight", "weight")
"""Keys of a message that say how it is trained, and that no template sees."""
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
    "function_call": "assistant",
}
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template. `first`: number of the first message that may be trained by default."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    first: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as strings."""

    prompt: str
    completion: str


Sample = str | Chat | Completion | tokenised.Tokens


def find_format(path: str, data: Data) -> str | None:
    """The format of a file by its columns and data.format; None for a file without records.

    Raises `DataError` when the columns fit none or several.
    """
    return format_of(columns(path), path, data)


def format_of(present: list[str] | None, path: str, data: Data) -> str | None:
    """The same for a file whose first record has the columns `present`; None: plain lines of text."""
    if present is None:
        if data.format not in ("auto", "text"):
            raise DataError(f"{path} holds plain lines of text.", f"data.format is {data.format}.", "Use JSONL.")
        return "text"
    if not present:
        return None
    if data.format != "auto" or data.text_column != "text":
        form = "text" if data.format == "auto" else data.format
        for column in (data.text_column,) if form == "text" else REQUIRED[form]:
            if column not in present and kind_of_file(path) in TABLES:  # a line of JSON is judged by itself
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
        return tokenised.tokens_of(record, where)
    if form == "alpaca":
        return Chat(_alpaca(record, where))
    if form == "prompt_completion":
        return _prompt_completion(record, data, where)
    if form == "sharegpt":
        messages = [_turn(turn, f"`conversations[{n}]`", where) for n, turn in _list(record, "conversations", where)]
        return Chat(_system(record, where) + messages, **_for_template(record, where))
    return Chat(_messages(record, "messages", where), **_for_template(record, where))


def columns_of(form: str, data: Data) -> frozenset[str]:
    """The columns that a record of this format may have with an effect."""
    return frozenset((data.text_column,) if form == "text" else (*REQUIRED[form], *OPTIONAL[form]))


def _list(record: Record, column: str, where: str) -> list[tuple[int, Any]]:
    value = record[column]
    if not isinstance(value, list):
        raise DataError(f"{where}: `{column}` is {kind_of(value)}, not a list.")
    return list(enumerate(value))


def _messages(record: Record, column: str, where: str) -> list[Message]:
    found = _list(record, column, where)
    return [_message(message, f"{where}: `{column}[{number}]`") for number, message in found]


def _message(message: Any, place: str) -> Message:
    """A message with a role and something to say; keys that are null are left out."""
    if not isinstance(message, dict):
        raise DataError(f"{place} is {kind_of(message)}, not a message with role and content.")
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place} has no `role`.", f"The message has: {', '.join(message) or 'nothing'}.")
    result = {key: value for key, value in message.items() if value is not None}
    if isinstance(result.get("tool_calls"), str):
        result["tool_calls"] = _from_json(result["tool_calls"], f"{place}: `tool_calls`")
    if "content" not in result and not set(result) - {"role", "name", *WEIGHTS}:
        why = "`content` is null." if "content" in message else f"The message has: {', '.join(message)}."
        raise DataError(f"{place} has no `content`.", why, "Correct or remove the line.")
    if "content" in result:
        _check_content(result["content"], place)
    return result


def _check_content(content: Any, place: str) -> None:
    """Raises `DataError` for what is neither text nor a list of parts that are text."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise DataError(f"{place}: `content` is {kind_of(content)}, not text.", "", "Correct or remove the line.")
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else kind_of(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place}: part {number} of `content` is {kind}, not text.",
                "Only text is trained on: the model would not be given the picture, sound or file.",
                "Remove the record, or the part.",
            )


def _from_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{place} is a string that is not JSON.", f"{error}.") from None


def _for_template(record: Record, where: str) -> dict[str, Any]:
    """tools, documents and template_kwargs of a `Chat`; each, and each tool, may also be written as a JSON string."""
    values: dict[str, Any] = {}
    for column, kind in FOR_TEMPLATE.items():
        value, place = record.get(column), f"{where}: `{column}`"
        value = _from_json(value, place) if isinstance(value, str) and value else value
        if isinstance(value, list):
            value = [_from_json(item, place) if isinstance(item, str) else item for item in value]
        if value and not isinstance(value, kind):
            raise DataError(f"{place} is {kind_of(value)}, not {kind_of(kind())}.")
        if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
            raise DataError(f"{place} holds an entry that is not an object.", "", "Correct or remove the line.")
        values[column.removeprefix("chat_")] = value or None
    return values


def _prompt_completion(record: Record, data: Data, where: str) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(record, "prompt", where), _messages(record, "completion", where)
        first = len(before) if data.completion_only_loss is not False else 0
        return Chat(before + after, first=first, **_for_template(record, where))
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
    """A ShareGPT turn {from, value} as a message; one of {role, content} is one already."""
    if isinstance(turn, dict) and "from" not in turn and "role" in turn:
        return _message(turn, f"{where}: {place}")
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"{where}: {place} is no turn of `from` and `value`.")
    if turn.get("from") not in _ROLES:
        raise DataError(f"{where}: {place} is from `{turn.get('from')}`.", "", f"Known are {', '.join(_ROLES)}.")
    more = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if turn["from"] == "function_call":
        calls = _from_json(turn["value"], f"{where}: {place}: the call")
        calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        return {"role": "assistant", "tool_calls": calls, **more}
    return {"role": _ROLES[turn["from"]], "content": turn["value"], **more}

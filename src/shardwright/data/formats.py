"""From records to samples: the table of formats, in TRL's column names.

format             columns                        trained
text               text (or data.text_column)     all
messages           messages                       assistant messages
prompt_completion  prompt, completion             the completion: strings, or lists of messages
tokens             input_ids                      all, or as the columns beside them say (`token_records.py`)
alpaca             instruction, output            output; `instruction` and `input` are the user's message
sharegpt           conversations                  as messages, from {from, value}

A new format is a function from a record to a sample, and an entry of `FORMATS` at the end of this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.config.schema import Data
from shardwright.data import token_records
from shardwright.data.files import TABLES, kind_of_file
from shardwright.data.records import Record, columns, json_type, no_column, text_of
from shardwright.errors import ConfigError, DataError, did_you_mean

FOR_TEMPLATE = {"tools": list, "documents": list, "chat_template_kwargs": dict}
"""Columns beside messages that go to the chat template, and what each holds."""
WEIGHTS = ("train", "loss_weight", "weight")
"""Keys of a message that say how the message is trained. No template sees them."""
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool"}
_ROLES |= {"function_call": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation for a chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    first: int = 0  # number of the first message that may be trained by default


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as strings."""

    prompt: str
    completion: str


Sample = str | Chat | Completion | token_records.Tokens


@dataclass(frozen=True)
class Format:
    """How records of a format are recognised, read and trained."""

    required: tuple[str, ...]  # the columns by which a file is recognised
    read: Callable[[Record, Data, str], Sample]  # the sample of a record; the string is its file and line, for errors
    optional: tuple[str, ...] = ()  # other columns that have an effect
    settings: tuple[str, ...] = ()  # keys of section data that have an effect on this format only
    overlong: Literal["split", "truncate"] = "truncate"  # the default of data.overlong
    in_part: bool = True  # only a part of the text may be trained, so that the characters of each token must be known

    def columns(self, data: Data) -> tuple[str, ...]:
        """The required columns, of which data.text_column may name that of text."""
        return (data.text_column,) if self.required == ("text",) else self.required


def find_format(path: str, data: Data) -> str | None:
    """The format of a file by its columns and data.format; None for a file without records.

    Raises `DataError` when the columns fit no format or several.
    """
    return format_of(columns(path), path, data)


def format_of(present: list[str] | None, path: str, data: Data) -> str | None:
    """The format of a file whose first record has the columns `present`; None: plain lines of text."""
    if present is None:
        if data.format not in ("auto", "text"):
            raise DataError(f"{path} holds plain lines of text.", f"data.format is {data.format}.", "Use JSONL.")
        return "text"
    if not present:
        return None
    if data.format != "auto" or data.text_column != "text":
        form = "text" if data.format == "auto" else data.format
        for column in FORMATS[form].columns(data):
            if column not in present and kind_of_file(path) in TABLES:  # records of JSON are checked one by one
                raise no_column(path, column, present, "data.text_column or data.format asks for this column.")
        return form
    fits = [name for name, form in FORMATS.items() if set(form.required) <= set(present)]
    if len(fits) > 1:
        named = " and ".join(f"`{'`, `'.join(FORMATS[name].required)}`" for name in fits)
        raise DataError(
            f"{path}: the columns {named} fit the formats {' and '.join(fits)}.",
            "Each format trains different tokens.",
            f"Set data.format to {' or '.join(fits)}.",
        )
    return fits[0] if fits else _refuse(path, present)


def _refuse(path: str, present: Sequence[str]) -> str:
    needed = sorted({column for form in FORMATS.values() for column in form.required})
    for column in present:
        close = did_you_mean(column, needed)
        if close.startswith("Did"):
            raise no_column(path, close.split("`")[1], [column], f"Columns here: {', '.join(present)}.")
    formats = "; ".join(f"{name}: {', '.join(form.required)}" for name, form in FORMATS.items())
    raise DataError(
        f"{path}: no format has the columns {', '.join(present)}.",
        f"The formats are {formats}.",
        "data.text_column names a column of text.",
    )


def refuse_without_effect(data: Data, formats: Iterable[str]) -> None:
    """Raises `ConfigError` for a key of section data that has no effect on any format of the training files."""
    formats = list(formats)
    used = {key for form in formats for key in FORMATS[form].settings}
    for key in sorted({key for form in FORMATS.values() for key in form.settings} - used):
        if getattr(data, key) != Data.model_fields[key].default:
            raise ConfigError(
                f"data.{key} has no effect here.", f"data.train holds {' and '.join(formats)}.", f"Remove data.{key}."
            )


def sample_of(record: Record, form: str, data: Data, where: str) -> Sample:
    """The sample of a record. Raises `DataError` with `where` for a record that does not fit its format."""
    if form != "text":
        for column in FORMATS[form].required:
            if column not in record:
                raise no_column(where, column, list(record), f"The format is {form}.")
    return FORMATS[form].read(record, data, where)


def columns_of(form: str, data: Data) -> frozenset[str]:
    """The columns that have an effect in a record of this format."""
    return frozenset((*FORMATS[form].columns(data), *FORMATS[form].optional))


def _list(record: Record, column: str, where: str) -> list[tuple[int, Any]]:
    value = record[column]
    if not isinstance(value, list):
        raise DataError(f"{where}: `{column}` is {json_type(value)}, not a list.")
    return list(enumerate(value))


def _messages(record: Record, column: str, where: str) -> list[Message]:
    return [_message(item, f"{where}: `{column}[{number}]`") for number, item in _list(record, column, where)]


def _message(message: Any, place: str) -> Message:
    """A message with a role and content or other keys; keys that are null are left out."""
    if not isinstance(message, dict):
        raise DataError(f"{place} is {json_type(message)}, not a message with role and content.")
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place} has no `role`.", f"The message has: {', '.join(message) or 'nothing'}.")
    result = {key: value for key, value in message.items() if value is not None}
    if isinstance(result.get("tool_calls"), str):
        result["tool_calls"] = _from_json(result["tool_calls"], f"{place}: `tool_calls`")
    if "content" not in result and not set(result) - {"role", "name", *WEIGHTS}:
        why = "`content` is null." if "content" in message else f"The message has: {', '.join(message)}."
        raise DataError(f"{place} has no `content`.", why, "Correct or remove the record.")
    if "content" in result:
        _check_content(result["content"], place)
    return result


def _check_content(content: Any, place: str) -> None:
    """Raises `DataError` for content that is neither text nor a list of parts that are text."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise DataError(f"{place}: `content` is {json_type(content)}, not text.", "", "Correct or remove the record.")
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else json_type(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place}: part {number} of `content` is {kind}, not text.",
                "Only text is trained: the model would not receive the picture, sound or file.",
                "Remove the record, or this part.",
            )


def _from_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{place} is a string that is not JSON.", f"{error}.") from None


def _chat(messages: list[Message], record: Record, where: str, first: int = 0) -> Chat:
    """A chat with the columns for its template; each column, and each tool, may also be written as a JSON string."""
    values: dict[str, Any] = {}
    for column, kind in FOR_TEMPLATE.items():
        value, place = record.get(column), f"{where}: `{column}`"
        value = _from_json(value, place) if isinstance(value, str) and value else value
        if isinstance(value, list):
            value = [_from_json(item, place) if isinstance(item, str) else item for item in value]
        if value and not isinstance(value, kind):
            raise DataError(f"{place} is {json_type(value)}, not {json_type(kind())}.")
        if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
            raise DataError(f"{place} holds an entry that is not an object.", "", "Correct or remove the record.")
        values[column.removeprefix("chat_")] = value or None
    return Chat(messages, first=first, **values)


def _text(record: Record, data: Data, where: str) -> str:
    return text_of(record, data.text_column, where, "data.text_column")


def _conversation(record: Record, data: Data, where: str) -> Chat:
    return _chat(_messages(record, "messages", where), record, where)


def _prompt_completion(record: Record, data: Data, where: str) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(record, "prompt", where), _messages(record, "completion", where)
        return _chat(before + after, record, where, len(before) if data.completion_only_loss is not False else 0)
    if isinstance(prompt, list) or isinstance(completion, list):
        what = f"{where}: `prompt` is {json_type(prompt)} and `completion` is {json_type(completion)}."
        raise DataError(what, "", "Make both columns strings, or both lists of messages.")
    return Completion(text_of(record, "prompt", where), text_of(record, "completion", where))


def _alpaca(record: Record, data: Data, where: str) -> Chat:
    user = text_of(record, "instruction", where)
    if record.get("input"):
        user += "\n\n" + text_of(record, "input", where)
    messages = _system(record, where)
    for number, pair in _list(record, "history", where) if record.get("history") else ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: `history[{number}]` is not a pair of instruction and output.")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    output = {"role": "assistant", "content": text_of(record, "output", where)}
    return Chat([*messages, {"role": "user", "content": user}, output])


def _system(record: Record, where: str) -> list[Message]:
    return [{"role": "system", "content": text_of(record, "system", where)}] if record.get("system") else []


def _sharegpt(record: Record, data: Data, where: str) -> Chat:
    turns = [_turn(turn, f"{where}: `conversations[{n}]`") for n, turn in _list(record, "conversations", where)]
    return _chat(_system(record, where) + turns, record, where)


def _turn(turn: Any, place: str) -> Message:
    """A ShareGPT turn {from, value} as a message; a turn {role, content} is a message already."""
    if isinstance(turn, dict) and "from" not in turn and "role" in turn:
        return _message(turn, place)
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"{place} is not a turn of `from` and `value`.")
    if turn.get("from") not in _ROLES:
        raise DataError(f"{place} is from `{turn.get('from')}`.", "", f"Known are {', '.join(_ROLES)}.")
    more = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if turn["from"] == "function_call":
        calls = _from_json(turn["value"], f"{place}: the call")
        calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        return {"role": "assistant", "tool_calls": calls, **more}
    return {"role": _ROLES[turn["from"]], "content": turn["value"], **more}


_OF_CHATS = ("assistant_only_loss", "chat_template")
FORMATS: dict[str, Format] = {
    "text": Format(("text",), _text, settings=("text_column", "append_eos"), overlong="split", in_part=False),
    "messages": Format(("messages",), _conversation, (*FOR_TEMPLATE,), _OF_CHATS),
    "prompt_completion": Format(
        ("prompt", "completion"),
        _prompt_completion,
        (*FOR_TEMPLATE,),
        (*_OF_CHATS, "completion_only_loss", "append_eos"),
    ),
    "tokens": Format(
        ("input_ids",),
        lambda record, data, where: token_records.tokens_of(record, where),
        token_records.COLUMNS,
        overlong="split",
        in_part=False,
    ),
    "alpaca": Format(("instruction", "output"), _alpaca, ("input", "system", "history"), _OF_CHATS),
    "sharegpt": Format(("conversations",), _sharegpt, ("system", *FOR_TEMPLATE), _OF_CHATS),
}

"""A conversation in the form that a chat template expects, and the parts that the template leaves out.

Records write the same conversation in several forms: no content as null or as "", text as a string or as parts, the arguments
of a call as an object or as JSON. A template knows one or two of these forms. Given another form, it prints `None`, quotes JSON
twice or leaves the text out, without an error. So each doubtful value is rendered in both forms and the texts are compared. A
key without which the text stays the same has no effect, and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from shardwright.data.formats import WEIGHTS, Chat, Message
from shardwright.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_CONTENTS = {
    (type(None), str): "content that is null is given as empty text",
    (str, type(None)): "empty content is given as null",
    (list, str): "content in parts is given as one string",
    (str, list): "content that is a string is given in parts",
}
Text = tuple[str, list[tuple[int, int]]]
"""A text and its marked spans."""


class FittedChat:
    """`chat` in the form that the template expects, without the keys that only say how a message is trained.

    render: the text of a conversation; raises `DataError` where the template fails. text: the text of `chat`. changed: values
    whose form differs from the record. idle: keys without effect on the text. silent: messages that leave no text.
    """

    def __init__(self, chat: Chat, render: Callable[[Chat], Text]) -> None:
        self._render = render
        messages = [{k: v for k, v in message.items() if k not in WEIGHTS} for message in chat.messages]
        self.chat = given = replace(chat, messages=[{"content": None, **message} for message in messages])
        self.idle: set[str] = set()
        self._lost: set[int] = set()
        self._rendered = self._try(self.chat)
        self._make_it_render()
        self._fit_missing_content()
        self._fit_parts()
        self._fit_strings()
        self._fit_arguments()
        self._fit_parameters()
        self.text = self._rendered if self._rendered is not None else render(self.chat)
        self.changed = set(_changes(given, self.chat))
        self.silent = self._find_idle()

    def _try(self, chat: Chat) -> Text | None:
        try:
            return self._render(chat)
        except DataError:
            return None

    def _with(self, number: int, **values: Any) -> Chat:
        """The conversation with other values in message `number`."""
        messages = list(self.chat.messages)
        messages[number] = {**messages[number], **values}
        return replace(self.chat, messages=messages)

    def _without(self, numbers: set[int], key: str) -> Chat:
        numbered = enumerate(self.chat.messages)
        messages = [{k: v for k, v in message.items() if k != key or n not in numbers} for n, message in numbered]
        return replace(self.chat, messages=messages)

    def _take(self, chat: Chat) -> None:
        """Takes `chat` where the template renders it, and to another text than before."""
        text = self._try(chat)
        if text not in (None, self._rendered):
            self.chat, self._rendered = chat, text

    def _make_it_render(self) -> None:
        """Where the template fails, takes the first combination of the other forms for which it does not fail."""
        forms: list[list[Callable[[Message], Message]]]
        forms = [[dict, _emptied], [dict, _joined], [dict, _with_objects, _with_json]]  # dict: as it is
        for changes in product(*forms):
            if self._rendered is not None:
                return
            messages = self.chat.messages
            for change in changes:
                messages = [change(message) for message in messages]
            self._take(replace(self.chat, messages=messages))

    def _writes(self, number: int, content: Any) -> bool:
        """Whether the template writes `content`, which is not text, in Python's notation."""
        return self._rendered == self._try(self._with(number, content=str(content)))

    def _fit_missing_content(self) -> None:
        """Missing content is null, as templates with tool calls expect, unless the template prints `None`.

        Empty text beside a call becomes null where the template otherwise leaves the call out.
        """
        for number, message in enumerate(self.chat.messages):
            if message["content"] is None and self._writes(number, None):
                self._take(self._with(number, content=""))
            elif message["content"] == "" and message.get("tool_calls"):
                null, bare = self._with(number, content=None), self._without({number}, "tool_calls")
                printed = self._with(number, content="None")
                if self._try(bare) == self._rendered and self._try(null) != self._try(printed):
                    self._take(null)

    def _fit_parts(self) -> None:
        """Content in parts is joined where the template prints it as a list, or leaves text out."""
        for number, message in enumerate(self.chat.messages):
            parts, now = message["content"], self._rendered
            if not isinstance(parts, list) or now is None:
                continue
            whole = all(part["text"].strip() in now[0] for part in parts)
            if not whole or self._writes(number, parts):
                self._take(self._with(number, content=_joined(message)["content"]))

    def _fit_strings(self) -> None:
        """Text that the template leaves out, since it expects parts, is given as a part."""
        texts = [content.strip() for m in self.chat.messages if isinstance(content := m["content"], str)]
        for number, message in enumerate(self.chat.messages):
            content, now = message["content"], self._rendered
            if not isinstance(content, str) or not (text := content.strip()) or now is None:
                continue
            if message["role"] in _ROLES and now[0].count(text) >= texts.count(text):
                continue
            if self._try(self._with(number, content="")) != now:
                continue  # the template may rewrite the text, and does not leave it out
            as_part = self._with(number, content=[{"type": "text", "text": content}])
            found = self._try(as_part)
            if found is not None and text in found[0]:
                self._take(as_part)
            else:
                self.idle.add(f"the content of `{message['role']}` messages")
                self._lost.add(number)

    def _fit_arguments(self) -> None:
        """Arguments of calls: JSON that is quoted again is given as an object; a printed object is given as JSON."""
        for number, message in enumerate(self.chat.messages):
            objects, as_json = _with_objects(message), _with_json(message)
            if objects != message and not self._holds(message["tool_calls"], "arguments"):
                self._take(self._with(number, **objects))
            elif as_json != message and self._prints_objects(number, message):
                self._take(self._with(number, **as_json))

    def _prints_objects(self, number: int, message: Message) -> bool:
        """Whether the template writes the arguments of this message, all of them objects, in Python's notation."""
        printed = self._try(self._with(number, **_in_calls(message, str)))
        return message == _with_objects(message) and printed == self._rendered

    def _fit_parameters(self) -> None:
        """Parameters of tools: JSON that is quoted again is given as an object."""
        tools = self.chat.tools or []
        if not self._holds(tools, "parameters"):
            self._take(replace(self.chat, tools=[_in_call(tool, "parameters", _loaded) for tool in tools]))

    def _holds(self, calls: list[Any], key: str) -> bool:
        """Whether each string in `key` of the calls stands in the text as it is, and not quoted once more."""
        strings = [value.strip() for call in calls if isinstance(value := _inside(call, key), str)]
        return self._rendered is not None and all(
            text in self._rendered[0] and json.dumps(text) not in self._rendered[0] for text in strings
        )

    def _find_idle(self) -> set[int]:
        """Notes the keys and columns without which the text is the same; returns the silent messages."""
        messages = self.chat.messages
        idle_of: dict[int, set[str]] = {number: set() for number in range(len(messages))}
        for key in dict.fromkeys(key for message in messages for key in _more(message)):
            holders = {number for number, message in enumerate(messages) if key in message}
            if self._try(self._without(holders, key)) != self.text:
                several = len(holders) > 1
                holders = {n for n in holders if several and self._try(self._without({n}, key)) == self.text}
            for number in holders:
                idle_of[number].add(key)
                self.idle.add(f"`{key}` of messages")
        kwargs = self.chat.template_kwargs or {}
        beside: dict[str, Any] = {
            f"`{name}`": {name: None} for name in ("tools", "documents") if getattr(self.chat, name)
        }
        for key in kwargs:
            rest = {k: v for k, v in kwargs.items() if k != key}
            beside[f"`{key}` of `chat_template_kwargs`"] = {"template_kwargs": rest}
        self.idle |= {name for name, change in beside.items() if self._try(replace(self.chat, **change)) == self.text}
        return {
            number
            for number, message in enumerate(messages)
            if not is_empty(message)
            and (number in self._lost or not _has_text(message))
            and set(_more(message)) <= idle_of[number]
        }


def is_empty(message: Message) -> bool:
    """Whether a message has neither text nor any other key that holds something."""
    return not _has_text(message) and not any(True for _ in _more(message))


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _more(message: Message) -> Iterator[str]:
    """The keys of a message beside role and content that hold something."""
    skipped = ("role", "content", *WEIGHTS)
    return (key for key, value in message.items() if key not in skipped and value not in ("", [], {}))


def _emptied(message: Message) -> Message:
    return {**message, "content": ""} if message["content"] is None else message


def _joined(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _with_objects(message: Message) -> Message:
    return _in_calls(message, _loaded)


def _with_json(message: Message) -> Message:
    return _in_calls(message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _in_calls(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its calls changed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_in_call(call, "arguments", change) for call in calls]}


def _changes(given: Chat, taken: Chat) -> Iterator[str]:
    """The values whose form differs from the record, as the notices name them."""
    for before, after in zip(given.messages, taken.messages):
        kinds = (type(before["content"]), type(after["content"]))
        if before["content"] != after["content"] and kinds in _CONTENTS:
            yield _CONTENTS[kinds]
        if before.get("tool_calls") != after.get("tool_calls"):
            was_json = _with_objects(before).get("tool_calls") == after.get("tool_calls")
            first, second = ("JSON", "objects") if was_json else ("objects", "JSON")
            yield f"`arguments` of calls that are {first} are given as {second}"
    if given.tools != taken.tools:
        yield "`parameters` of tools that are JSON are given as objects"


def _in_call(call: Any, key: str, change: Callable[[Any], Any]) -> Any:
    """A call (or a tool) with another value in `key`, which stands in `function` or beside it."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _in_call(call["function"], key, change)}
    return {**call, key: change(call[key])} if call.get(key) is not None else call


def _inside(call: Any, key: str) -> Any:
    found: list[Any] = []
    _in_call(call, key, found.append)
    return found[0] if found else None


def _loaded(value: Any) -> Any:
    """The object that a string of JSON holds; any other value as it is."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return found if isinstance(found, dict) else value

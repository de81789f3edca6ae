"""A conversation in the manner that a chat template expects, and what of it the template leaves out.

Records write the same conversation in several manners: no content as null or as "", text as a string or as parts, the arguments
of a call as an object or as JSON. A template knows one or two of them and, given another, prints `None`, quotes JSON twice or
leaves the text out, without an error. So each doubtful value is rendered in both manners and the texts are compared. What is
left when a key is taken away and the text stays the same has no effect, and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardwright.data.formats import WEIGHTS, Chat, Message
from shardwright.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
Text = tuple[str, list[tuple[int, int]]]
"""A text and its marked spans."""


class Fitted:
    """`chat` as the template expects it, without the keys that only say what is trained.

    render: the text of a conversation; raises `DataError` where the template fails. text: of `chat`. changed: what is given
    in another manner than the record has it. idle: what has no effect on the text. silent: messages that leave nothing in it.
    """

    def __init__(self, chat: Chat, render: Callable[[Chat], Text]) -> None:
        self._render = render
        messages = [{k: v for k, v in message.items() if k not in WEIGHTS} for message in chat.messages]
        self.chat = replace(chat, messages=messages)
        self.changed: set[str] = set()
        self.idle: set[str] = set()
        self._lost: set[int] = set()
        self._rendered: Text | None = None
        self._fit_missing_content()
        self._rendered = self._try(self.chat)
        self._fit_parts()
        self._fit_strings()
        self._fit_arguments()
        self._fit_parameters()
        self.text = self._rendered if self._rendered is not None else render(self.chat)
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
        messages = [
            {k: v for k, v in message.items() if k != key or n not in numbers}
            for n, message in enumerate(self.chat.messages)
        ]
        return replace(self.chat, messages=messages)

    def _take(self, chat: Chat, how: str) -> None:
        before, self.chat, self._rendered = self._rendered, chat, self._try(chat)
        if before != self._rendered:
            self.changed.add(how)

    def _fit_missing_content(self) -> None:
        """No content is null, as chat templates of tool calls ask, unless the template fails on it or prints it."""
        missing = [n for n, message in enumerate(self.chat.messages) if message.get("content") is None]
        for number in missing:
            self.chat = self._with(number, content=None)
        for number in missing:
            now = self._try(self.chat)
            if now is None or now == self._try(self._with(number, content="None")):
                self.chat = self._with(number, content="")

    def _fit_parts(self) -> None:
        """Content in parts is joined where the template fails on it, prints it as a list, or leaves text out."""
        for number, message in enumerate(self.chat.messages):
            if not isinstance(parts := message["content"], list):
                continue
            texts, now = [part["text"] for part in parts], self._rendered
            printed = now is None or now == self._try(self._with(number, content=str(parts)))
            if now is None or printed or not all(text.strip() in now[0] for text in texts):
                self._take(
                    self._with(number, content="".join(texts)), "content in parts is given as one string"
                )

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
            if found is not None and found != now and text in found[0]:
                self._take(as_part, "content that is a string is given in parts")
            else:
                self.idle.add(f"the content of `{message['role']}` messages")
                self._lost.add(number)

    def _fit_arguments(self) -> None:
        """Arguments of calls: JSON that is quoted again is given as an object, and an object that is printed as JSON."""
        for number, message in enumerate(self.chat.messages):
            calls = message.get("tool_calls")
            if not isinstance(calls, list):
                continue
            as_objects = [_in_call(call, "arguments", _loaded) for call in calls]
            as_json = [_in_call(call, "arguments", _dumped) for call in calls]
            if as_objects != calls and not self._holds(calls, "arguments"):
                objects = self._with(number, tool_calls=as_objects)
                if self._try(objects) is not None:
                    self._take(objects, "`arguments` of calls that are JSON are given as objects")
            elif as_json != calls and as_objects == calls and self._prints(number, calls):
                self._take(
                    self._with(number, tool_calls=as_json),
                    "`arguments` of calls that are objects are given as JSON",
                )

    def _fit_parameters(self) -> None:
        """Parameters of tools: JSON that is quoted again is given as an object."""
        tools = self.chat.tools or []
        objects = [_in_call(tool, "parameters", _loaded) for tool in tools]
        if objects != tools and not self._holds(tools, "parameters"):
            self._take(
                replace(self.chat, tools=objects), "`parameters` of tools that are JSON are given as objects"
            )

    def _holds(self, calls: list[Any], key: str) -> bool:
        """Whether each string in `key` of the calls stands in the text as it is, and not quoted once more."""
        strings = [value.strip() for call in calls if isinstance(value := _inside(call, key), str)]
        return self._rendered is not None and all(
            text in self._rendered[0] and json.dumps(text) not in self._rendered[0] for text in strings
        )

    def _prints(self, number: int, calls: list[Any]) -> bool:
        """Whether the template prints the arguments as Python does, or fails on them."""
        printed = self._with(number, tool_calls=[_in_call(call, "arguments", str) for call in calls])
        return self._rendered is None or self._rendered == self._try(printed)

    def _find_idle(self) -> set[int]:
        """Notes keys of messages, and columns beside them, without which the text is the same; the silent messages."""
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
        beside = {
            "`tools`": replace(self.chat, tools=None) if self.chat.tools else None,
            "`documents`": replace(self.chat, documents=None) if self.chat.documents else None,
            **{
                f"`{key}` of `chat_template_kwargs`": replace(
                    self.chat, template_kwargs={k: v for k, v in kwargs.items() if k != key}
                )
                for key in kwargs
            },
        }
        self.idle |= {name for name, rest in beside.items() if rest and self._try(rest) == self.text}
        return {
            number
            for number, message in enumerate(messages)
            if not is_empty(message)
            and (number in self._lost or not _said(message))
            and set(_more(message)) <= idle_of[number]
        }


def is_empty(message: Message) -> bool:
    """Whether a message has neither text nor anything else to say."""
    return not _said(message) and not any(True for _ in _more(message))


def _said(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _more(message: Message) -> Iterator[str]:
    """The keys of a message beside role and content that hold something."""
    return (
        key
        for key, value in message.items()
        if key not in ("role", "content", *WEIGHTS) and value not in ("", [], {})
    )


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
    """The object that a string of JSON holds; all else as it is."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return found if isinstance(found, dict) else value


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

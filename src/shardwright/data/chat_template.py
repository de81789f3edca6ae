"""From messages to the text of a chat template, and the exact characters of each message that is trained.

Where the template marks what the model writes with {% generation %}, the marked spans are trained. Where the template has no
marks, the span of an assistant message is found by rendering three times: the messages before it with the generation prompt
(A), the messages up to and including it (B), and all messages (F). The message is B without A. That is exact when B begins
with A and F begins with B, so that the pieces join to the text that is trained; `encode.token_weights` then shows that the
boundaries of the pieces are boundaries of tokens. A template for which this fails, for example one that rewrites earlier turns,
is refused with the line of the record: no span is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.data.formats import WEIGHTS, Chat, Message
from shardwright.data.message_forms import FittedChat, Text, is_empty
from shardwright.data.notices import NoteKey
from shardwright.data.records import check_unicode, json_type
from shardwright.errors import ConfigError, DataError

Span = tuple[int, int, float]
"""First character, end, weight as a target."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ADD_MARKS = (
    "Add {% generation %} marks to the template (data.chat_template), or set data.assistant_only_loss to false."
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: list[Span] | None  # what is trained, later spans over earlier ones; None: all of the text
    exact: bool  # every boundary of a span must be a boundary of tokens, since the spans were found from prefixes
    notes: tuple[NoteKey, ...] = ()


class ChatTemplate:
    """The chat template of a tokenizer, or the one in the file `path`. special: texts of the tokenizer's special tokens."""

    def __init__(self, tokenizer: Any, path: str | None, assistant_only: bool, special: Iterable[str]) -> None:
        self.tokenizer, self.assistant_only = tokenizer, assistant_only
        self.name = path or "the tokenizer's chat template"
        self._given = None if path is None else read_template(path)
        self.special = tuple(special)

    def render(self, chat: Chat, where: str) -> Rendered:
        """The conversation and its spans. Raises `DataError` with `where` when a span cannot be found exactly."""
        turns = _Turns(self, self._given or self.tokenizer.get_chat_template(tools=chat.tools), chat, where)
        weights = [_weight(m, f"{where}: message {n}") for n, m in enumerate(chat.messages)]
        assistants = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        self._refuse_silent(turns, {n for n in assistants if weights[n] != 0 and n >= chat.first}, where)
        notes = _notes(turns, chat)
        spans: list[Span] = []
        if not self.assistant_only:
            if not chat.first and all(weight in (None, 1.0) for weight in weights):
                return Rendered(turns.text, None, False, notes)
            start = len(turns.before(chat.first)) if chat.first else 0
            spans.append((start, len(turns.text), 1.0))
        wanted: dict[int, float] = {}
        for number, weight in enumerate(weights):
            trained = number >= chat.first and (not self.assistant_only or number in assistants)
            value = float(trained) if weight is None else weight
            if value != float(trained and not self.assistant_only):
                wanted[number] = value
        if wanted and turns.marked and set(wanted) <= set(assistants):
            spans += turns.from_marks(wanted, assistants)
        else:
            turns.exact = turns.exact or bool(wanted)
            spans += [(*turns.span(number), value) for number, value in wanted.items()]
        return Rendered(turns.text, spans, turns.exact, notes)

    def _refuse_silent(self, turns: _Turns, trained: set[int], where: str) -> None:
        for number in turns.fitted.silent & trained:
            message = turns.fitted.chat.messages[number]
            keys = ", ".join(f"`{key}`" for key, value in message.items() if key != "role" and value)
            raise DataError(
                f"{where}: message {number} (assistant) does not appear in the text: {self.name} leaves out {keys}.",
                "The model would be trained on an empty turn.",
                "Set data.chat_template to a template that renders this message, or set `train: false` on the message.",
            )

    def text(self, template: str, chat: Chat, where: str, **options: bool) -> Text:
        """(text, spans of the {% generation %} marks) of a conversation."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        # `apply_chat_template` of Transformers 5 calls this function, and turns the marked characters, which are needed
        # here, into a mask of tokens
        values = dict(self.tokenizer.special_tokens_map) | (chat.template_kwargs or {})
        if chat.documents is not None:
            values["documents"] = chat.documents
        try:
            texts, marks = render_jinja_template(
                [chat.messages], tools=chat.tools, chat_template=template, **options, **values
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            shown = str(error).strip().splitlines()
            roles = ", ".join(message["role"] for message in chat.messages) or "none"
            raise DataError(
                f"{where}: {self.name} cannot render the messages ({roles}).",
                shown[0] if shown else type(error).__name__,
                "Correct or remove the record.",
            ) from None
        return texts[0], marks[0] if marks else []


def _notes(turns: _Turns, chat: Chat) -> tuple[NoteKey, ...]:
    empty = any(message["role"] == "assistant" and is_empty(message) for message in chat.messages)
    return (
        ("chat", ""),
        *(("idle", what) for what in sorted(turns.fitted.idle)),
        *(("changed", how) for how in sorted(turns.fitted.changed)),
        *((("empty turn", ""),) if empty else ()),
        *((("dated", ""),) if "strftime_now" in turns.template else ()),
    )


class _Turns:
    """One conversation, rendered as a whole and up to any of its messages."""

    def __init__(self, owner: ChatTemplate, template: str, chat: Chat, where: str) -> None:
        self.owner, self.template, self.where = owner, template, where
        self.marked = bool(_MARKS.search(template))
        self.fitted = FittedChat(
            chat, lambda chat: owner.text(template, chat, where, return_assistant_tokens_mask=self.marked)
        )
        self.messages: list[Message] = self.fitted.chat.messages
        self.text, self.marks = self.fitted.text
        check_unicode(self.text, "messages", where)
        self.exact = False

    def from_marks(self, wanted: dict[int, float], assistants: list[int]) -> list[Span]:
        """The marked spans with the weight of their assistant message."""
        if len(self.marks) == len(assistants):
            return [(start, end, wanted[n]) for (start, end), n in zip(self.marks, assistants) if n in wanted]
        if set(wanted) == set(assistants) and len(set(wanted.values())) == 1:
            return [(start, end, wanted[assistants[0]]) for start, end in self.marks]
        raise DataError(
            f"{self.where}: {self.owner.name} marks {len(self.marks)} spans for {len(assistants)} assistant messages.",
            "The messages have different weights, and it is not known which span belongs to which message.",
            "Mark each assistant message once.",
        )

    def before(self, number: int) -> str:
        """The text up to where the model begins to write message `number`."""
        self.exact = True
        prompt = self._prefix(number, add_generation_prompt=True)
        if not self.text.startswith(prompt):
            raise self._refused(number, "does not continue the messages before it and the generation prompt")
        return prompt

    def span(self, number: int) -> tuple[int, int]:
        """The characters of message `number`: of an assistant message what the model writes, of another message all."""
        message, upto = self.messages[number], self._prefix(number + 1)
        if not self.text.startswith(upto):
            raise self._refused(number, "is rendered differently when messages follow it")
        is_assistant = message["role"] == "assistant"
        given = self._prefix(number, add_generation_prompt=is_assistant)
        if not upto.startswith(given):
            raise self._refused(number, "does not continue the messages before it and the generation prompt")
        if not is_assistant:
            return len(given), len(upto)
        written = upto[len(given) :]
        content = message.get("content")
        starts = isinstance(content, str) and written.lstrip().startswith(content.strip())
        if not starts and given == self._prefix(number):
            what = "has a header, but the template has no generation prompt that says where the header ends"
            raise self._refused(number, what)
        ended = written.rstrip()
        if ended.endswith(self.owner.special):  # generation ends there; the template writes the whitespace after it
            written = ended
        return len(given), len(given) + len(written)

    def _prefix(self, count: int, add_generation_prompt: bool = False) -> str:
        if not count and not add_generation_prompt:
            return ""
        chat = replace(self.fitted.chat, messages=self.messages[:count])
        return self.owner.text(self.template, chat, self.where, add_generation_prompt=add_generation_prompt)[0]

    def _refused(self, number: int, what: str) -> DataError:
        role = self.messages[number]["role"]
        return DataError(
            f"{self.where}: message {number} ({role}) {what}, in {self.owner.name}.",
            "The characters of the message cannot be found exactly.",
            _ADD_MARKS if role == "assistant" else "Remove `train` and `loss_weight` from the message.",
        )


def read_template(path: str) -> str:
    """The Jinja template in the file `path`. Raises `ConfigError`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "The file is not UTF-8."
        raise ConfigError(f"data.chat_template: {path} cannot be read.", f"{why}.".replace("..", ".")) from None


def _weight(message: Message, place: str) -> float | None:
    """The weight that `train`, `loss_weight` or `weight` of a message ask for; None where no key does."""
    given = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    found: dict[str, float] = {}
    for key, value in given.items():
        if key == "train" and not isinstance(value, bool):
            raise DataError(f"{place}: `train` is {json_type(value)}, not true or false.")
        number = isinstance(value, int | float) and (key == "train" or not isinstance(value, bool))
        if not number or not 0 <= value < float("inf"):
            shown = value if number else json_type(value)
            raise DataError(f"{place}: `{key}` is {shown}.", f"`{key}` must be a number of at least 0.")
        found[key] = float(value)
    if found.get("train") == 1.0 and len(found) > 1:
        del found["train"]  # the other key gives the weight
    if len(set(found.values())) > 1:
        said = " and ".join(f"`{key}` is {json.dumps(given[key])}" for key in found)
        raise DataError(f"{place}: {said}.", "These keys contradict each other.", "Remove one of these keys.")
    return next(iter(found.values()), None)

"""From samples to tokens and their weights as targets.

The encoder is made once, in the process that starts the tokenising processes, and inherited by them. A token is trained when it
holds at least one character of a trained span.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.schema import Data
from shardwright.data.arrays import Float32, Int32
from shardwright.data.chat_template import ChatTemplate, Span
from shardwright.data.formats import FOR_TEMPLATE, FORMATS, Chat, Completion, Sample, columns_of, sample_of
from shardwright.data.notices import NO_END, NoteKey, Notes
from shardwright.data.records import RecordSlice, records
from shardwright.data.token_records import Tokens
from shardwright.data.tokenizer import SpecialTokens
from shardwright.errors import ConfigError, DataError


@dataclass
class Encoded:
    """The documents of a slice, one after the other."""

    ids: Int32
    weights: Float32 | None  # of each token as a target; None: all 1
    lengths: list[int]  # tokens of each document
    lines: list[int]  # the line of each document
    notes: Notes = field(default_factory=Notes)


@dataclass(frozen=True)
class Document:
    """The tokens of one document."""

    ids: Int32
    weights: Float32 | None = None  # of each token as a target; None: all 1
    notes: tuple[NoteKey, ...] = ()
    is_blank: Callable[[int], bool] | None = None  # whether the token at a position is white space; None: not known


_EMPTY = Document(np.empty(0, np.int32))


class Encoder:
    """Tokenises as section data says. tokenizer: a Hugging Face tokenizer; None where all records are tokens already."""

    def __init__(self, tokenizer: Any, data: Data, formats: frozenset[str], tokenizer_path: Path | None) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.read = {form: columns_of(form, data) for form in formats}
        self.keep = frozenset[str]().union(*self.read.values(), {data.text_column})
        # records of tokens may hold any id, whatever the tokenizer
        self.vocabulary = 2**32 if tokenizer is None or "tokens" in formats else len(tokenizer)
        in_part = any(FORMATS[form].in_part for form in formats)
        self.backend = None
        if tokenizer is not None and getattr(tokenizer, "is_fast", False):
            self.backend = tokenizer.backend_tokenizer
            if in_part:
                self.backend = with_whole_offsets(self.backend)
            self.backend.no_truncation()
            self.backend.no_padding()
        elif in_part:
            raise ConfigError(
                f"The tokenizer in {tokenizer_path} does not say which characters a token holds.",
                "The trained tokens of a chat or completion are found by their characters.",
                "Use a tokenizer with a tokenizer.json.",
            )
        self.special = SpecialTokens.of(tokenizer, self._ids)
        self.template = None
        if in_part and (data.chat_template is not None or tokenizer.chat_template):
            only = data.assistant_only_loss is not False
            self.template = ChatTemplate(tokenizer, data.chat_template, only, self.special.texts.values())

    def slice(self, part: RecordSlice, form: str) -> Encoded:
        """The documents of a slice. Raises `DataError` with file and line for a record that cannot be read."""
        found = Encoded(np.empty(0, np.int32), None, [], [])
        kept: list[Document] = []
        for line, record in records(part, self.data.text_column):
            where = f"{part.path}:{line}"
            found.notes.add("record", "", part.file, line)
            sample = sample_of(record, form, self.data, where)
            read = self.read[form] - (FOR_TEMPLATE.keys() if isinstance(sample, Completion) else set())
            for column in record.keys() - read:
                if record[column] not in (None, "", [], {}):
                    found.notes.add("column", column, part.file, line)
            for document in self.documents(sample, where):
                notes = [("document", ""), *document.notes]
                if not len(document.ids):
                    notes.append(("empty", ""))
                elif document.weights is not None and not document.weights[1:].any():
                    notes.append(("masked", ""))
                else:
                    kept.append(document)
                    found.lines.append(line)
                    notes += self._ends(document, form)
                for kind, subject in notes:
                    found.notes.add(kind, subject, part.file, line)
        for column in part.unread:
            found.notes.add("column", column, part.file, part.first_line, part.size)
        found.lengths = [len(document.ids) for document in kept]
        if kept:
            found.ids = np.concatenate([document.ids for document in kept])
        weights = [None if d.weights is None or (d.weights[1:] == 1).all() else d.weights for d in kept]
        if any(own is not None for own in weights):
            ones = (np.ones(length, np.float32) for length in found.lengths)
            found.weights = np.concatenate([one if own is None else own for own, one in zip(weights, ones)])
        return found

    def documents(self, sample: Sample, where: str) -> list[Document]:
        """The documents of a record: one, or the documents of a packed row of tokens."""
        if isinstance(sample, Tokens):
            ids = np.asarray(sample.ids, np.int32)
            weights = None if sample.weights is None else np.asarray(sample.weights, np.float32)
            found = [
                Document(ids[first:end], None if weights is None else weights[first:end])
                for first, end in pairwise(sample.bounds)
            ]
            return [replace(found[0], notes=tuple(("divided", column) for column in sample.divided_by)), *found[1:]]
        if isinstance(sample, str):
            return [self._text(sample) if sample.strip() else _EMPTY]
        if isinstance(sample, Completion):
            return [self._completion(sample)]
        return [self._chat(sample, where)]

    def _ends(self, document: Document, form: str) -> Iterator[NoteKey]:
        """Notes about how a document, and its trained parts, begin and end."""
        yield from self.special.repeated(document.ids, inside="append_eos" in FORMATS[form].settings)
        if form == "tokens" and document.weights is None:
            return  # a piece of text may end anywhere
        for kind, subject in self.special.ends(document.ids, document.weights, document.is_blank):
            if subject != NO_END or form != "text":  # text need not end in a special token
                yield kind, subject

    def _ids(self, text: str, special: bool = True) -> list[int]:
        if self.backend is not None:
            return list(self.backend.encode(text, add_special_tokens=special).ids)
        options = {"return_attention_mask": False, "verbose": False, "add_special_tokens": special}
        return list(self.tokenizer(text, **options)["input_ids"])

    def _text(self, text: str) -> Document:
        ids = self._ids(text)
        once, notes = self.special.once(ids)
        ids = ids[once]
        return Document(np.asarray([*ids, *self._end(ids)], np.int32), notes=notes)

    def _end(self, ids: list[int]) -> list[int]:
        """The end token, where these ids lack it and data.append_eos asks for it."""
        eos = self.special.eos
        return [eos] if self.data.append_eos and eos is not None and ids and ids[-1] != eos else []

    def _completion(self, sample: Completion) -> Document:
        text, start = sample.prompt + sample.completion, len(sample.prompt)
        if not text.strip():
            return _EMPTY
        if self.data.completion_only_loss is False:
            return self._text(text)
        assert self.backend is not None
        encoding = self.backend.encode(text)
        weights, crossed = token_weights(encoding, [(start, len(text), 1.0)])
        once, notes = self.special.once(encoding.ids)
        ids, weights = encoding.ids[once], weights[once]
        if end := self._end(ids):
            ids, weights = [*ids, *end], np.append(weights, np.float32(0))
        if ids[-1] == self.special.eos and sample.completion:
            weights[-1] = 1
        return Document(np.asarray(ids, np.int32), weights, (*notes, *_crossing(crossed)))

    def _chat(self, sample: Chat, where: str) -> Document:
        if not sample.messages:
            return _EMPTY
        if self.template is None:
            raise ConfigError(
                f"{where} holds messages, and the tokenizer has no chat template.",
                "Messages cannot be rendered without a chat template.",
                "Set data.chat_template to a file with a Jinja template.",
            )
        assert self.backend is not None
        rendered = self.template.render(sample, where)
        encoding = self.backend.encode(rendered.text, add_special_tokens=False)
        once, notes = self.special.once(encoding.ids, added=False)
        notes = (*rendered.notes, *notes, *self.special.missing(encoding.ids))
        ids = np.asarray(encoding.ids[once], np.int32)

        def is_blank(token: int) -> bool:
            chars = encoding.token_to_chars(token + once.start)
            return chars is not None and rendered.text[slice(*chars)].isspace()

        if rendered.spans is None:
            return Document(ids, None, notes, is_blank)
        weights, crossed = token_weights(encoding, rendered.spans)
        if crossed and rendered.exact:
            around = rendered.text[max(0, crossed[0] - 12) : crossed[0] + 12]
            raise DataError(
                f"{where}: a token holds characters on both sides of the boundary of a message, in {around!r}, in "
                f"{self.template.name}.",
                "The model would be trained on other tokens than it is given at generation.",
                "Add {% generation %} marks to the template (data.chat_template), or set data.assistant_only_loss to "
                "false.",
            )
        return Document(ids, weights[once], (*notes, *_crossing(crossed)), is_blank)


def _crossing(crossed: list[int]) -> tuple[NoteKey, ...]:
    return (("crossing", ""),) if crossed else ()


def with_whole_offsets(backend: Any) -> Any:
    """A `tokenizers.Tokenizer` that gives the same ids as `backend`, and offsets that leave no character out.

    Many byte-level tokenizers trim spaces from offsets (`trim_offsets`): a token of spaces then has no characters at all.
    """
    source = backend.to_str()
    if '"trim_offsets":true' not in source.replace(" ", ""):
        return backend

    def untrimmed(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: False if k == "trim_offsets" else untrimmed(v) for k, v in value.items()}
        return [untrimmed(item) for item in value] if isinstance(value, list) else value

    parts = json.loads(source)
    for name in ("pre_tokenizer", "post_processor"):
        parts[name] = untrimmed(parts[name])
    return type(backend).from_str(json.dumps(parts))


def token_weights(encoding: Any, spans: Sequence[Span]) -> tuple[Float32, list[int]]:
    """(weight of each token of a `tokenizers.Encoding`, characters at which the boundary of a span is inside a token).

    Later spans take precedence over earlier ones; tokens outside of all spans have weight 0. A token across the boundary
    belongs to the span.
    """
    weights = np.zeros(len(encoding.ids), np.float32)
    crossed: list[int] = []
    for start, end, weight in spans:
        first, last = _token_at(encoding, range(start, end)), _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        while (after := encoding.token_to_chars(last + 1)) is not None and after[0] < end:
            last += 1  # the other bytes of the last character
        weights[first : last + 1] = weight
        if encoding.token_to_chars(first)[0] < start:
            crossed.append(start)
        if encoding.token_to_chars(last)[1] > end:
            crossed.append(end)
    return weights, crossed


def _token_at(encoding: Any, positions: range) -> int | None:
    """The token of the first of these characters that has a token; normalisation may have dropped some characters."""
    return next((token for p in positions if (token := encoding.char_to_token(p)) is not None), None)

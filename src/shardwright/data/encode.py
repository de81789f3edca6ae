"""One record to token ids and weights. Made once, in the process that starts the others, and inherited by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.config.schema import Data
from shardwright.data.chat import ChatTemplate
from shardwright.data.formats import FOR_TEMPLATE, Chat, Completion, Sample, columns_of, sample_of
from shardwright.data.masks import Float32, token_weights, with_whole_offsets
from shardwright.data.notes import Notes
from shardwright.data.sources import Slice, records
from shardwright.data.special import UNENDED, Said, SpecialTokens
from shardwright.data.tokenised import Tokens
from shardwright.errors import ConfigError, DataError

Int32 = npt.NDArray[np.int32]


@dataclass
class Encoded:
    """The documents of a slice.

    ids, weights: of all, one after the other; weights None: all 1. lengths, lines: of each document. counts: read, empty,
    masked (left out), crossing (a token across the boundary of prompt and completion). first: the first line of each count.
    """

    ids: Int32
    weights: Float32 | None
    lengths: list[int]
    lines: list[int]
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


@dataclass(frozen=True)
class Document:
    """The tokens of one document; weights None: all 1.

    crossing: a token holds characters of the given text and of the trained text. notes: (kind, subject) of what a person should
    know of it. is_blank: whether the token at a place is white space alone; None: not known.
    """

    ids: Int32
    weights: Float32 | None = None
    crossing: bool = False
    notes: Said = ()
    is_blank: Callable[[int], bool] | None = None


_EMPTY = Document(np.empty(0, np.int32))


class Encoder:
    """Tokenises as section data says. tokenizer: a Hugging Face tokenizer; None where all is tokenised already."""

    def __init__(self, tokenizer: Any, data: Data, formats: frozenset[str], tokenizer_path: Path | None) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.read = {form: columns_of(form, data) for form in formats}
        self.keep = frozenset[str]().union(*self.read.values(), {data.text_column})
        self.backend = None
        if tokenizer is not None and getattr(tokenizer, "is_fast", False):
            self.backend = tokenizer.backend_tokenizer
            if formats - {"text", "tokens"}:
                self.backend = with_whole_offsets(self.backend)
            self.backend.no_truncation()
            self.backend.no_padding()
        elif formats - {"text", "tokens"}:
            raise ConfigError(
                f"The tokenizer in {tokenizer_path} does not say which characters a token holds.",
                "Without them it cannot be told which tokens of a chat or completion are trained.",
                "Use a tokenizer with a tokenizer.json.",
            )
        self.special = SpecialTokens.of(tokenizer, self._ids)
        self.template = None
        if tokenizer is not None and formats - {"text", "tokens"}:
            needs = bool(formats & {"messages", "sharegpt", "alpaca"}) or data.chat_template is not None
            if needs or tokenizer.chat_template:
                self.template = ChatTemplate(
                    tokenizer, data.chat_template, data.assistant_only_loss is not False, self.special.texts.values()
                )

    def slice(self, part: Slice, form: str) -> Encoded:
        """The documents of a slice. Raises `DataError` with file and line for what cannot be one."""
        found = Encoded(np.empty(0, np.int32), None, [], [])
        kept: list[Document] = []

        def count(name: str, line: int) -> None:
            found.counts[name] += 1
            found.first.setdefault(name, line)

        for line, record in records(part, self.data.text_column):
            where = f"{part.path}:{line}"
            found.notes.add("record", "", part.file, line)
            sample = sample_of(record, form, self.data, where)
            read = self.read[form] - (FOR_TEMPLATE.keys() if isinstance(sample, Completion) else set())
            for column in record.keys() - read:
                if record[column] not in (None, "", [], {}):
                    found.notes.add("column", column, part.file, line)
            for document in self.documents(sample, where):
                ids, weights = document.ids, document.weights
                count("read", line)
                for kind, subject in document.notes:
                    found.notes.add(kind, subject, part.file, line)
                if document.crossing:
                    count("crossing", line)
                if not len(ids):
                    count("empty", line)
                elif weights is not None and not weights[1:].any():
                    count("masked", line)
                else:
                    kept.append(document)
                    found.lines.append(line)
                    for kind, subject in self._edges(document, form):
                        found.notes.add(kind, subject, part.file, line)
        for column in part.unread:
            found.notes.add("column", column, part.file, part.first_line, part.size)
        found.lengths = [len(document.ids) for document in kept]
        if kept:
            found.ids = np.concatenate([document.ids for document in kept])
        weights_of = [None if d.weights is None or (d.weights[1:] == 1).all() else d.weights for d in kept]
        if any(weights is not None for weights in weights_of):
            found.weights = np.concatenate(
                [
                    np.ones(len(d.ids), np.float32) if weights is None else weights
                    for d, weights in zip(kept, weights_of)
                ]
            )
        return found

    def documents(self, sample: Sample, where: str) -> list[Document]:
        """The documents of a record: one, or those that a packed row of tokens holds."""
        if isinstance(sample, Tokens):
            ids = np.asarray(sample.ids, np.int32)
            weights = None if sample.weights is None else np.asarray(sample.weights, np.float32)
            found = [
                Document(ids[first:end], None if weights is None else weights[first:end])
                for first, end in pairwise(sample.bounds)
            ]
            said = tuple(("divided", column) for column in sample.divided_by)
            return [replace(found[0], notes=said), *found[1:]]
        if isinstance(sample, str):
            return [self._text(sample) if sample.strip() else _EMPTY]
        if isinstance(sample, Completion):
            return [self._completion(sample)]
        return [self._chat(sample, where)]

    def _edges(self, document: Document, form: str) -> Iterator[tuple[str, str]]:
        """Notes of how a document, and what is trained of it, begins and ends."""
        yield from self.special.repeated(document.ids, inside=form in ("text", "prompt_completion"))
        if form == "tokens" and document.weights is None:
            return  # a piece of text may end anywhere
        for kind, subject in self.special.ends(document.ids, document.weights, document.is_blank):
            if subject != UNENDED or form != "text":  # text need not end in a token
                yield kind, subject

    def _ids(self, text: str, special: bool = True) -> list[int]:
        if self.backend is None:
            found: list[int] = self.tokenizer(
                text, return_attention_mask=False, verbose=False, add_special_tokens=special
            )["input_ids"]
            return found
        return self.backend.encode(text, add_special_tokens=special).ids

    def _text(self, text: str) -> Document:
        ids = self._ids(text)
        once, notes = self.special.once(ids)
        ids = ids[once]
        return Document(np.asarray([*ids, *self._end(ids)], np.int32), notes=notes)

    def _end(self, ids: list[int]) -> list[int]:
        """The end token, where these ids lack it."""
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
        return Document(np.asarray(ids, np.int32), weights, bool(crossed), notes)

    def _chat(self, sample: Chat, where: str) -> Document:
        if not sample.messages:
            return _EMPTY
        if self.template is None:
            raise ConfigError(
                f"{where} holds messages, and the tokenizer has no chat template.",
                "",
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
            return Document(ids, None, False, notes, is_blank)
        weights, crossed = token_weights(encoding, rendered.spans)
        if crossed and rendered.exact:
            around = rendered.text[max(0, crossed[0] - 12) : crossed[0] + 12]
            raise DataError(
                f"{where}: a token holds characters on both sides of the boundary of a message, in {around!r}, in "
                f"{self.template.name}.",
                "What is trained would not be what the model is given to continue.",
                "Give the template {% generation %} marks (data.chat_template), or set "
                "data.assistant_only_loss to false.",
            )
        return Document(ids, weights[once], bool(crossed), notes, is_blank)

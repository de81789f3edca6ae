"""One record to token ids and weights. Made once, in the process that starts the others, and inherited by them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.config.schema import Data
from shardwright.data.chat import ChatTemplate
from shardwright.data.formats import OPTIONAL, REQUIRED, Chat, Completion, Sample, Tokens, sample_of
from shardwright.data.masks import Float32, token_weights, with_whole_offsets
from shardwright.data.sources import Slice, records
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


class Encoder:
    """Tokenises as section data says. tokenizer: a Hugging Face tokenizer; None where all is tokenised already."""

    def __init__(
        self, tokenizer: Any, data: Data, formats: frozenset[str], tokenizer_path: Path | None
    ) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.eos = tokenizer.eos_token_id if tokenizer is not None else None
        self.keep = (
            frozenset(column for name in formats for column in REQUIRED[name]) | OPTIONAL | {data.text_column}
        )
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
        self.template = None
        if tokenizer is not None and formats - {"text", "tokens"}:
            needs = bool(formats & {"messages", "sharegpt", "alpaca"}) or data.chat_template is not None
            if needs or tokenizer.chat_template:
                self.template = ChatTemplate(
                    tokenizer, data.chat_template, data.assistant_only_loss is not False
                )

    def slice(self, part: Slice, form: str) -> Encoded:
        """The documents of a slice. Raises `DataError` with file and line for what cannot be one."""
        found = Encoded(np.empty(0, np.int32), None, [], [])
        ids_of: list[Int32] = []
        weights_of: list[Float32 | None] = []

        def count(name: str, line: int) -> None:
            found.counts[name] += 1
            found.first.setdefault(name, line)

        for line, record in records(part, self.data.text_column):
            where = f"{part.path}:{line}"
            ids, weights, crossing = self.sample(sample_of(record, form, self.data, where), where)
            count("read", line)
            if crossing:
                count("crossing", line)
            if not len(ids):
                count("empty", line)
            elif weights is not None and not weights[1:].any():
                count("masked", line)
            else:
                ids_of.append(ids)
                weights_of.append(None if weights is None or (weights[1:] == 1).all() else weights)
                found.lines.append(line)
        found.lengths = [len(ids) for ids in ids_of]
        if ids_of:
            found.ids = np.concatenate(ids_of)
        if any(weights is not None for weights in weights_of):
            pairs = zip(ids_of, weights_of)
            found.weights = np.concatenate(
                [np.ones(len(i), np.float32) if w is None else w for i, w in pairs]
            )
        return found

    def sample(self, sample: Sample, where: str) -> tuple[Int32, Float32 | None, bool]:
        """(ids, weights or None for all 1, whether a token crosses from what is given to what is trained)."""
        if isinstance(sample, Tokens):
            weights = None if sample.weights is None else np.asarray(sample.weights, np.float32)
            return np.asarray(sample.ids, np.int32), weights, False
        if isinstance(sample, str):
            return (self._text(sample) if sample.strip() else np.empty(0, np.int32)), None, False
        if isinstance(sample, Completion):
            return self._completion(sample)
        return self._chat(sample, where)

    def _text(self, text: str) -> Int32:
        if self.backend is None:
            ids = self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
        else:
            ids = self.backend.encode(text).ids
        if self._lacks_eos(ids):
            ids.append(self.eos)
        return np.asarray(ids, np.int32)

    def _lacks_eos(self, ids: list[int]) -> bool:
        return self.data.append_eos and self.eos is not None and bool(ids) and ids[-1] != self.eos

    def _completion(self, sample: Completion) -> tuple[Int32, Float32 | None, bool]:
        text, start = sample.prompt + sample.completion, len(sample.prompt)
        if not text.strip():
            return np.empty(0, np.int32), None, False
        if self.data.completion_only_loss is False:
            return self._text(text), None, False
        assert self.backend is not None
        encoding = self.backend.encode(text)
        weights, crossed = token_weights(encoding, [(start, len(text), 1.0)])
        ids = encoding.ids
        if self._lacks_eos(ids):
            ids, weights = [*ids, self.eos], np.append(weights, np.float32(0))
        if ids[-1] == self.eos and sample.completion:
            weights[-1] = 1
        return np.asarray(ids, np.int32), weights, bool(crossed)

    def _chat(self, sample: Chat, where: str) -> tuple[Int32, Float32 | None, bool]:
        if not sample.messages:
            return np.empty(0, np.int32), None, False
        if self.template is None:
            raise ConfigError(
                f"{where} holds messages, and the tokenizer has no chat template.",
                "",
                "Set data.chat_template to a file with a Jinja template.",
            )
        assert self.backend is not None
        rendered = self.template.render(sample, where)
        encoding = self.backend.encode(rendered.text, add_special_tokens=False)
        if rendered.spans is None:
            return np.asarray(encoding.ids, np.int32), None, False
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
        return np.asarray(encoding.ids, np.int32), weights, bool(crossed)

"""A row as pieces of text, each trained, given or padding, as the loader gives it to the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.prepare import Prepared
from shardwright.layout.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Piece:
    """Tokens in a row that are alike. weight: of each as a target, 0 where it is given. special: a special token."""

    text: str
    ids: list[int]
    weight: float
    special: bool


@dataclass(frozen=True)
class Document:
    """One document of a row, or the piece of it that the row holds. place: `file:line`."""

    place: str
    tokens: int
    targets: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Sample:
    """One row. padding: slots after its last token; None: with bucketing its microbatch decides."""

    row: int
    documents: list[Document]
    padding: int | None

    def to_json(self) -> dict[str, Any]:
        """The sample as plain values."""
        return asdict(self)


class Decoder:
    """Token ids to text. path: the tokenizer's directory; None: ids are shown as numbers."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer: Any = None
        self.special: frozenset[int] = frozenset()
        if path is None:
            return
        if (path / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = frozenset(number for number, token in added.items() if token.special)
        else:
            from shardwright.data.tokenise import load_tokenizer

            self._tokenizer = load_tokenizer(path)
            self.special = frozenset(self._tokenizer.all_special_ids)

    def after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of `ids` where `before` stands before them: some decoders drop a space at the start."""
        if self._tokenizer is None:
            return "".join(f" {number}" for number in ids)
        whole, start = (self._decode([*before, *ids]), self._decode(before))
        return whole[len(start) :] if whole.startswith(start) else self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""


def read_sample(prepared: Prepared, row: int, decoder: Decoder, bucketed: bool) -> Sample:
    """Row `row` of a split. bucketed: it is as wide as its microbatch, not max_length."""
    table = prepared.table
    width = int(table.real_tokens(np.array([row]))[0])
    block = table.block([row], width, prepared.pad_id)
    ids, labels = block.input_ids[0], block.labels[0]
    weights = np.zeros(width)
    weights[1:] = labels[:-1] != IGNORE_INDEX
    if block.weights is not None:
        weights[1:] *= block.weights[0][:-1]
    documents, at = [], 0
    ends = table.documents.ends[:, 0]
    for start, length in table.pieces(row).tolist():
        part = slice(at, at + length)
        number = int(np.searchsorted(ends, start, side="right"))
        pieces = list(_pieces(ids[part].tolist(), weights[part].tolist(), decoder))
        place = table.documents.place(number)
        documents.append(Document(place, length, int((weights[part] != 0).sum()), pieces))
        at += length
    return Sample(row, documents, None if bucketed else table.max_length - width)


def _pieces(ids: list[int], weights: list[float], decoder: Decoder) -> Iterator[Piece]:
    """Runs of tokens of one weight; every special token by itself."""
    start = 0
    for end in range(1, len(ids) + 1):
        special = ids[start] in decoder.special
        if end < len(ids) and not special and ids[end] not in decoder.special and weights[end] == weights[start]:
            continue
        text = decoder.after(ids[:start], ids[start:end])
        yield Piece(text, ids[start:end], weights[start], special)
        start = end

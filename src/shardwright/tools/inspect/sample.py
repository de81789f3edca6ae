"""A row as the loader gives it to the model: its pieces of text, trained or context, in colour or with marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from shardwright.data.prepare import Prepared
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.units import counted

_STYLES = {
    "context": "dim",
    "trained": "black on green",
    "padding": "dim red",
    "document: file:line": "bold blue",
    "special token": "bold magenta",
}


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a row that are alike."""

    text: str
    ids: list[int]
    weight: float  # of each token as a target, 0 where it is not trained
    special: bool  # a special token


@dataclass(frozen=True)
class Document:
    """One document of a row, or the piece of it that the row holds."""

    place: str  # `file:line`
    tokens: int
    targets: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Sample:
    """One row."""

    row: int
    documents: list[Document]
    padding: int | None  # slots after the last token; None: with bucketing this depends on the microbatch

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
        if (path / "tokenizer.json").is_file():  # read by `tokenizers` alone, so that Transformers is not loaded
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = frozenset(number for number, token in added.items() if token.special)
        else:
            from shardwright.data.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(path)
            self.special = frozenset(self._tokenizer.all_special_ids)

    def after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of `ids` after the tokens `before`: some decoders drop a space at the start of a text."""
        if self._tokenizer is None:
            return "".join(f" {number}" for number in ids)
        whole, start = self._decode([*before, *ids]), self._decode(before)
        return whole[len(start) :] if whole.startswith(start) else self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""


def read_sample(prepared: Prepared, row: int, decoder: Decoder, bucketed: bool) -> Sample:
    """Row `row` of a split. bucketed: the row is as wide as its microbatch, not max_length."""
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
        place = table.documents.place(int(np.searchsorted(ends, start, side="right")))
        pieces = list(_pieces(ids[part].tolist(), weights[part].tolist(), decoder))
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
        yield Piece(decoder.after(ids[:start], ids[start:end]), ids[start:end], weights[start], special)
        start = end


def legend(colour: bool) -> Text:
    """What the styles, or the marks, of a sample mean."""
    if not colour:
        return Text(
            "[+trained+] [+0.5:trained with weight 0.5+] context, -- document: file:line --, ↵ a newline of the text"
        )
    text = Text()
    for name, style in _STYLES.items():
        text.append(name, style).append(" (underlined: trained)  " if name == "special token" else "  ")
    return text.append("×0.5", "italic").append(" weight of the text that follows  ↵ a newline of the text")


def sample_lines(sample: Sample, colour: bool) -> Iterator[Text]:
    """A row: its documents one below the other, and its padding."""

    def line(text: str, style: str) -> Text:
        return Text(text, style if colour else "")

    tokens = sum(document.tokens for document in sample.documents)
    slots = f"{tokens} tokens; the longest row of its microbatch sets the number of slots"
    if sample.padding is not None:
        slots = f"{tokens} of {tokens + sample.padding} slots filled"
    yield line(f"Row {sample.row}: {counted(len(sample.documents), 'document')}, {slots}", "bold")
    for document in sample.documents:
        place = document.place.removeprefix(f"{Path.cwd()}/")
        head = f"-- {place}: {document.tokens} tokens, {document.targets} trained --"
        yield line(head, _STYLES["document: file:line"])
        yield _text(document, colour)
    if sample.padding:
        yield line(f"-- {sample.padding} padding --", _STYLES["padding"])


def _text(document: Document, colour: bool) -> Text:
    text = Text()
    for weight, group in groupby(document.pieces, key=lambda piece: piece.weight):
        pieces = [(piece.text.replace("\n", "↵\n"), _style(piece)) for piece in group]
        if colour:
            if weight not in (0.0, 1.0):
                text.append(f"×{weight:g}", "italic")
            for shown, style in pieces:
                text.append(shown, style)
        else:
            shown = "".join(shown for shown, _ in pieces)
            text.append(f"[+{'' if weight == 1 else f'{weight:g}:'}{shown}+]" if weight else shown)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _style(piece: Piece) -> str:
    if piece.special:
        return _STYLES["special token"] + (" underline" if piece.weight else "")
    return _STYLES["trained" if piece.weight else "context"]

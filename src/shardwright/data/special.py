"""The special tokens that begin and end documents: each appears once; and those with which a model is trained to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.data.masks import Float32

Said = tuple[tuple[str, str], ...]
"""(kind, subject) of notes."""
UNENDED = ""
"""The subject of a note `end` about a turn that ends in no special token."""


@dataclass(frozen=True)
class SpecialTokens:
    """bos, eos: of the tokenizer. texts: of every special token. head, tail: what the tokenizer puts around a text."""

    bos: int | None = None
    eos: int | None = None
    texts: Mapping[int, str] = field(default_factory=dict)
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, encode: Callable[[str, bool], list[int]]) -> SpecialTokens:
        """Those of a Hugging Face tokenizer. encode: ids of a text, with what is put around it or without."""
        if tokenizer is None:
            return cls()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        texts = {number: str(token) for number, token in added.items() if token.special}
        texts |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
        whole, text = encode("a", True), encode("a", False)
        places = (n for n in range(len(whole) - len(text) + 1) if whole[n : n + len(text)] == text)
        head: tuple[int, ...] = ()
        tail: tuple[int, ...] = ()
        if text and (at := next(places, None)) is not None:
            head, tail = tuple(whole[:at]), tuple(whole[at + len(text) :])
        return cls(tokenizer.bos_token_id, tokenizer.eos_token_id, texts, head, tail)

    def once(self, ids: Sequence[int], added: bool = True) -> tuple[slice, Said]:
        """The part of `ids` in which the tokens that begin and end a document stand once, and notes about the rest.

        added: the tokenizer has put its own tokens around a text that may have held them.
        """
        head = self.head if added else () if self.bos is None else (self.bos,)
        first, end = 0, len(ids)
        while head and tuple(ids[first : first + 2 * len(head)]) == head * 2:
            first += len(head)
        while self.tail and added and tuple(ids[first:end][-2 * len(self.tail) :]) == self.tail * 2:
            end -= len(self.tail)
        said = []
        if first:
            said.append(("begin twice", self._shown(head[0])))
        if end < len(ids):
            said.append(("end twice", self._shown(self.tail[0])))
        return slice(first, end), tuple(said)

    def missing(self, ids: Sequence[int]) -> Said:
        """A note about a rendered chat that lacks the tokens that the tokenizer puts before a text."""
        lacks = self.head and tuple(ids[: len(self.head)]) != self.head
        return (("begin missing", self._shown(self.head[0])),) if lacks else ()

    def repeated(self, ids: npt.NDArray[np.int32], inside: bool) -> Iterator[tuple[str, str]]:
        """Notes about tokens that begin or end a document in its middle. inside: an end there is none of a turn."""
        if self.bos is not None and self.bos != self.eos and int((ids == self.bos).sum()) > 1:
            yield "begins again", self._shown(self.bos)
        if inside and self.eos is not None and bool((ids[1:-1] == self.eos).any()):
            yield "ends before", self._shown(self.eos)

    def ends(
        self, ids: npt.NDArray[np.int32], weights: Float32 | None, is_blank: Callable[[int], bool] | None
    ) -> Iterator[tuple[str, str]]:
        """A note `end` for each run of trained tokens: the special token in which it ends, white space aside."""
        if not self.texts:  # no tokenizer says which tokens are special
            return
        runs = [(0, len(ids) - 1)]
        if weights is not None:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], weights > 0, [False]])))
            runs = [(first, end - 1) for first, end in edges.reshape(-1, 2).tolist()]
        for first, last in runs:
            while is_blank is not None and last > first and is_blank(last):
                last -= 1
            token = int(ids[last])
            if token not in self.texts and token != self.eos:
                yield "end", UNENDED
                continue
            yield "end", f"{token} {self._shown(token)}"
            if last > first and int(ids[last - 1]) == token:
                yield "stops twice", self._shown(token)

    def _shown(self, token: int) -> str:
        return self.texts.get(token, str(token))


def trained_ends(meta: Mapping[str, Any]) -> dict[int, str]:
    """The special tokens (id -> text) in which what is trained of the documents of `meta` ends, the most frequent first.

    A program that generates text must stop at these tokens: they are the end tokens of the trained model.
    """
    counts: Counter[str] = Counter()
    for kind, subject, _, count, _ in meta["notes"]:
        if kind == "end" and subject != UNENDED:
            counts[subject] += count
    found = (subject.partition(" ") for subject, _ in counts.most_common())
    return {int(token): text for token, _, text in found}

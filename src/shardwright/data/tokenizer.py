"""The tokenizer of a run: where its files are, and its special tokens, which begin and end documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.arch.model_files import TOKENIZER_FILES
from shardwright.config.schema import RunFile
from shardwright.data.arrays import Float32, Int32
from shardwright.data.notices import NO_END, NoteKey
from shardwright.errors import ConfigError


def find_tokenizer(run: RunFile) -> tuple[Path | None, ConfigError | None]:
    """The directory of the run's tokenizer, or the error that there is none: only text needs a tokenizer."""
    key = "tokenizer_name_or_path" if run.model.tokenizer_name_or_path is not None else "model_name_or_path"
    try:
        return _tokenizer_directory(getattr(run.model, key), f"model.{key}"), None
    except ConfigError as error:
        return None, error


def _tokenizer_directory(name: str, key: str) -> Path:
    """The directory of the tokenizer `name`: a directory, or a name in Hugging Face's local cache. Nothing is downloaded."""
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ConfigError(
                f"{key}: `{name}` is neither a directory nor a name in Hugging Face's local cache.",
                "Nothing is downloaded.",
                "Name a directory with a tokenizer.json.",
            ) from None
    if not tokenizer_files(path):
        raise ConfigError(
            f"{key}: {path} has no tokenizer.",
            "Text cannot be tokenised without a tokenizer.",
            "Set model.tokenizer_name_or_path to a directory with a tokenizer.json.",
        )
    return path


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the directory that decide how text is tokenised."""
    return sorted({file for pattern in TOKENIZER_FILES for file in path.glob(pattern)})


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer in the directory `path`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"The tokenizer in {path} cannot be loaded.", str(error).strip().splitlines()[0]) from error


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """The size of a tokenizer's vocabulary, its end token and its padding token; None where there is none."""
    if tokenizer is None:
        return dict.fromkeys(("vocabulary", "eos_id", "pad_id"))
    return {"vocabulary": len(tokenizer), "eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer, by id."""

    bos: int | None = None
    eos: int | None = None
    texts: Mapping[int, str] = field(default_factory=dict)  # of every special token
    head: tuple[int, ...] = ()  # what the tokenizer adds before a text
    tail: tuple[int, ...] = ()  # what the tokenizer adds after a text

    @classmethod
    def of(cls, tokenizer: Any, encode: Callable[[str, bool], list[int]]) -> SpecialTokens:
        """The special tokens of a Hugging Face tokenizer. encode: the ids of a text, with or without the added tokens."""
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

    def once(self, ids: Sequence[int], added: bool = True) -> tuple[slice, tuple[NoteKey, ...]]:
        """The part of `ids` that begins and ends with these tokens once, and notes about the rest.

        added: the tokenizer has added its tokens to a text that may have held them already.
        """
        head = self.head if added else () if self.bos is None else (self.bos,)
        first, end = 0, len(ids)
        while head and tuple(ids[first : first + 2 * len(head)]) == head * 2:
            first += len(head)
        while self.tail and added and tuple(ids[first:end][-2 * len(self.tail) :]) == self.tail * 2:
            end -= len(self.tail)
        notes = [("begin twice", self._shown(head[0]))] if first else []
        notes += [("end twice", self._shown(self.tail[0]))] if end < len(ids) else []
        return slice(first, end), tuple(notes)

    def missing(self, ids: Sequence[int]) -> tuple[NoteKey, ...]:
        """A note about a rendered chat that lacks the tokens that the tokenizer adds before a text."""
        lacks = self.head and tuple(ids[: len(self.head)]) != self.head
        return (("begin missing", self._shown(self.head[0])),) if lacks else ()

    def repeated(self, ids: Int32, inside: bool) -> Iterator[NoteKey]:
        """Notes about tokens that begin or end a document in its middle. inside: an end token there does not end a turn."""
        if self.bos is not None and self.bos != self.eos and int((ids == self.bos).sum()) > 1:
            yield "begins again", self._shown(self.bos)
        if inside and self.eos is not None and bool((ids[1:-1] == self.eos).any()):
            yield "ends before", self._shown(self.eos)

    def ends(self, ids: Int32, weights: Float32 | None, is_blank: Callable[[int], bool] | None) -> Iterator[NoteKey]:
        """A note `end` for each run of trained tokens: the special token at its end, apart from white space."""
        if not self.texts:  # without a tokenizer it is not known which tokens are special
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
                yield "end", NO_END
                continue
            yield "end", f"{token} {self._shown(token)}"
            if last > first and int(ids[last - 1]) == token:
                yield "stops twice", self._shown(token)

    def _shown(self, token: int) -> str:
        return self.texts.get(token, str(token))

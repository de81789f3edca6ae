"""From characters that are trained to the weights of tokens.

A token is trained when it holds at least one character of a span. Offsets are asked from a copy of the tokenizer that
does not trim spaces from them: with trimmed offsets a token of spaces has no characters at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Span = tuple[int, int, float]
Float32 = npt.NDArray[np.float32]


def with_whole_offsets(backend: Any) -> Any:
    """A `tokenizers.Tokenizer` that gives the same ids as `backend`, and offsets that leave no character out."""
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
    """(weight of each token of a `tokenizers.Encoding`, characters at which a span's boundary is inside a token).

    spans: (first character, end, weight), later ones over earlier ones; tokens outside have weight 0. A token across
    the boundary belongs to the span.
    """
    weights = np.zeros(len(encoding.ids), np.float32)
    crossed: list[int] = []
    for start, end, weight in spans:
        first, last = (_token_at(encoding, range(start, end)), _token_at(encoding, range(end - 1, start - 1, -1)))
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
    """The token of the first of these characters that is in one; normalisation may have dropped some."""
    return next((token for p in positions if (token := encoding.char_to_token(p)) is not None), None)

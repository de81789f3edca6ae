"""Tables of documents given as lists of tokens, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwright.data.documents import Documents
from shardwright.data.packing import RowRules, make_rows
from shardwright.data.table import Table


def documents(tokens: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Documents:
    """The documents `tokens`; weights: of each of their tokens as a target."""
    ends = np.cumsum([len(document) for document in tokens])
    places = np.stack([ends, 0 * ends, np.arange(1, len(tokens) + 1)], axis=1)
    flat = np.array([token for document in tokens for token in document], np.uint32)
    found = None if weights is None else np.array([w for own in weights for w in own], np.float32)
    return Documents(Path("-"), {"tokens_digest": ""}, flat, places, found)


def table(tokens: Sequence[Sequence[int]], rules: RowRules, weights: Sequence[Sequence[float]] | None = None) -> Table:
    """The rows that `rules` make of `tokens`."""
    found = documents(tokens, weights)
    return Table(found, rules, make_rows(found.ends[:, 0], rules, found.weights), "")


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of `lengths` whose tokens name them: 1000 x document + position."""
    return [[1000 * number + position for position in range(n)] for number, n in enumerate(lengths)]

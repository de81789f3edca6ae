"""Masks of rows that hold one document each, without a look at the device.

Transformers (5.12 to 5.24) reads the positions of each forward on the host, to find out whether rows hold several documents. On
a GPU the host would wait there for all work before. Rows of `pad` and `bucket` hold one document, so the answer is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SEARCH = "find_packed_sequence_indices"
"""Transformers' function that finds several documents by their positions; None from it means one document in each row."""


@contextmanager
def one_document_each() -> Iterator[None]:
    """Within, Transformers takes each row for one document. Masks of windows, chunks and so on stay as they are."""
    from transformers import masking_utils

    module: Any = masking_utils
    search = getattr(module, SEARCH)
    setattr(module, SEARCH, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, SEARCH, search)

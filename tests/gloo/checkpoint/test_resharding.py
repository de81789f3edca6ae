"""Checkpoints between layouts and world sizes, bit for bit. Rows A66, A67, A68, A71 and A125 of the known faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gloo.resharding import LAYOUTS, PAIRS, matrix

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def test_any_layout_to_any_other(tmp_path: Path) -> None:
    """A66 A67 A71 A125: whole weights and moments are bit-equal, the next loss to 1e-9, and the same rows follow."""
    found = matrix(tmp_path, PAIRS)
    assert len(PAIRS) >= 12 and {LAYOUTS[name] for pair in PAIRS for name in pair} == {1, 2, 3, 4}
    assert found == dict.fromkeys(PAIRS, "")

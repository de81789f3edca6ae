"""Directories of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
REFERENCE = ROOT / "tests" / "reference"
TINY = EXAMPLES / "tiny"

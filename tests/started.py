"""What tests of started programs and ranks share: the environment they get, and how long a test waits for them.

A limit here ends what hangs. It says nothing about speed: a test that waits for something passes however slow the machine is.
An idle machine of two cores needs up to a minute for the longest of these programs, and with a load of 10 a process has a
fifth of its core, and less of the caches. PATIENCE is twice that.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 10.0
LIMIT = 60 * PATIENCE  # seconds, for one program


def environment(**more: str) -> dict[str, str]:
    """For a program that imports this tree's source, with what tests/matrix.py asks of every Python."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}

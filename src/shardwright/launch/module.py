"""One module in a process of its own, for what this process must not load."""

from __future__ import annotations

import subprocess
import sys

from shardwright.errors import ConfigError


def output_of(module: str, arguments: list[str], purpose: str) -> str:
    """What `python -m module arguments` prints. Raises `ConfigError` with `purpose` and its last line when it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ConfigError(f"{purpose} failed: {lines[-1]}")
    return done.stdout

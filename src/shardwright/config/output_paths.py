"""Checks that results can be written to a path, before the work that makes them. Nothing is created."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.errors import ConfigError


def check_writable_directory(path: Path, name: str) -> None:
    """Raises `ConfigError` where `path` cannot become a directory, or is not writable. name: the option, for the error."""
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        what = "a link to nothing" if place.is_symlink() and not place.exists() else "not a directory"
        raise ConfigError(
            f"{name} {path}: {place} is {what}.", "Results would be lost at the end.", f"Set another {name}."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name} {path}: {place} cannot be written.",
            "Results would be lost at the end.",
            f"Set another {name}, or let this user write there.",
        )


def check_writable_file(path: Path, name: str) -> None:
    """Raises `ConfigError` where no file can be written at `path`."""
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a directory.", "", f"Name a file: {path / 'NAME'}.")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {path} cannot be written.", "", f"Set another {name}.")
    check_writable_directory(path.parent, name)

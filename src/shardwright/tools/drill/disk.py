"""A small disk that can be filled: a tmpfs, where this process may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 2**30
"""A larger disk is not put into memory for a trial."""
BALLAST = "ballast"


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[str]:
    """Mounts a tmpfs of `size` bytes at `place` and unmounts it at the end; yields why that is refused, else an empty text."""
    place.mkdir(parents=True)
    refused = _mount(place, size)
    try:
        yield refused
    finally:
        if not refused:
            subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)
        shutil.rmtree(place)


def _mount(place: Path, size: int) -> str:
    if size > MOST_BYTES:
        return f"it would take {size:,} bytes of memory"
    if shutil.which("mount") is None:
        return "there is no mount command"
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def fill(place: Path, left: int) -> Path:
    """Writes a file that leaves `left` bytes of the disk at `place`; returns it."""
    stat = os.statvfs(place)
    path = place / BALLAST
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - left))
    return path


def directory_bytes(place: Path) -> int:
    """The total size of all files in a directory and its subdirectories."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and not path.is_symlink())

"""What a file system may refuse without ending a save: a name, a link, a sync of a directory, a removal.

Each function does what it can and returns lines for a person about what was refused, or none. A removal that was refused is
tried again at each save.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from itertools import count
from pathlib import Path

from shardwright.checkpoint.files import settle, sync

_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}
"""What a sync reports when data is lost. Other errors say that the file system does not sync directories."""


def sync_directories(output_dir: Path, *directories: Path) -> list[str]:
    """Syncs the entries of directories. Raises `OSError` where the file system has lost some."""
    try:
        for directory in directories:
            sync(directory)
    except OSError as error:
        if error.errno in _LOST:
            raise
        return [
            f"{output_dir}: the file system does not sync directories ({error.strerror}). After a power failure the newest "
            "checkpoint may be missing; a run then resumes from the checkpoint before."
        ]
    return []


def sync_files(output_dir: Path) -> list[str]:
    """A line where a sync of files in `output_dir` is refused, tried with one file."""
    with tempfile.TemporaryFile(dir=output_dir) as file:
        reason = settle(file.fileno())
    text = f"{output_dir}: the file system does not sync files ({reason}). A power failure may damage the newest checkpoints."
    return [text] if reason else []


def point(link: Path, target: str) -> list[str]:
    """Points the link `link` to `target`; where that can be done at once, the link is there before and after."""
    aside = link.with_name(f".{link.name}.new")
    try:
        if link.exists() and not link.is_symlink():
            kind = "a directory" if link.is_dir() else "a file"
            return [
                f"{link} is {kind}, not a link, and is left as it is. Checkpoints are found without the link; "
                f"remove {link}, and the next save makes the link."
            ]
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        try:
            aside.replace(link)
        except OSError:  # a share that cannot rename over a link
            link.unlink(missing_ok=True)
            aside.rename(link)
    except OSError as error:
        return [f"The link {link} cannot be made ({error.strerror}). Checkpoints are found without the link."]
    return []


def discard(directory: Path) -> list[str]:
    """Removes what can be removed of a directory that has lost its name."""
    shutil.rmtree(directory, ignore_errors=True)  # frees all but what is held
    try:
        if directory.is_symlink():
            directory.unlink()
        shutil.rmtree(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{directory} cannot be removed: {error}. The next save tries it again."]
    return []


def retire(directory: Path) -> list[str]:
    """Removes a directory that counts. It loses its name first, so that half of it is never taken for a checkpoint."""
    stem = f".{directory.name.removeprefix('.')}"
    names = (f"{stem}{f'.{number}' if number else ''}.removed" for number in count())
    aside = next(place for name in names if not (place := directory.with_name(name)).exists())
    try:
        directory.rename(aside)
    except OSError as error:
        return [f"{directory} cannot be removed: {error}. The next save tries it again."]
    return discard(aside)

"""Reads, writes and syncs that checkpoints need of a file system, and what a file system may refuse without ending a save.

A checksum is taken from the memory that is written, before the write. So a byte that changes on its way to the disk, on the
disk or on its way back is found when the byte is read. XXH3 finds accidents; it does not protect against forgery.

Functions that return a list of lines do what they can; each line tells a person what the file system refused.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from shardwright.errors import DamagedCheckpointError

_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""Errors of a sync that say that the file system cannot sync."""
_DATA_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}
"""Errors of a sync that say that data is lost."""


def checksum(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} {what}.", "", "Use another checkpoint.")


def sync_file(descriptor: int) -> str:
    """Waits until an open file is on the disk. Returns the reason where its file system cannot sync, else an empty text."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        return str(error.strerror)
    return ""


def write_text(path: Path, text: str) -> dict[str, Any]:
    """Writes and syncs a small file; returns its size and checksum."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        sync_file(file.fileno())
    return {"bytes": len(data), "checksum": checksum(data)}


def read_checked(path: Path, record: dict[str, Any]) -> bytes:
    """The content of a small file. Raises `DamagedCheckpointError` where size or checksum differ from `record`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    if (len(data), checksum(data)) != (record.get("bytes"), record.get("checksum")):
        raise damaged(path, "is not what was written: its checksum differs")
    return data


def write_span(descriptor: int, offset: int, data: memoryview | bytes) -> None:
    """Writes all of `data` at byte `offset` of an open file."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def read_span(descriptor: int, path: Path, offset: int, into: memoryview) -> None:
    """Fills `into` from byte `offset` of an open file. Raises `DamagedCheckpointError` where the file ends before."""
    done = 0
    while done < len(into):
        length = os.preadv(descriptor, [into[done:]], offset + done)
        if length == 0:
            raise damaged(path, f"ends at byte {offset + done}")
        done += length


def check_piece(path: Path, offset: int, data: memoryview, expected: str, key: str) -> None:
    """Raises `DamagedCheckpointError` unless `data`, read from byte `offset` of `path`, has the checksum `expected`."""
    if checksum(data) != expected:
        raise damaged(path, f"is not what was written: bytes {offset} to {offset + len(data)}, a part of {key}, differ")


def read_piece(descriptor: int, path: Path, offset: int, into: memoryview, expected: str, key: str) -> None:
    """Fills `into` from byte `offset` of an open file. Raises `DamagedCheckpointError` where the checksum differs."""
    read_span(descriptor, path, offset, into)
    check_piece(path, offset, into, expected, key)


def sync_directories(output_dir: Path, *directories: Path) -> list[str]:
    """Waits until the entries of directories are on the disk. Raises `OSError` where the file system has lost some."""
    try:
        for directory in directories:
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno in _DATA_LOST:
            raise
        return [
            f"{output_dir}: the file system does not sync directories ({error.strerror}). After a power failure the newest "
            "checkpoint may be missing; a run then resumes from the checkpoint before."
        ]
    return []


def try_sync(output_dir: Path) -> list[str]:
    """A line where files in `output_dir` cannot be synced, found with a temporary file."""
    with tempfile.TemporaryFile(dir=output_dir) as file:
        reason = sync_file(file.fileno())
    text = f"{output_dir}: the file system does not sync files ({reason}). A power failure may damage the newest checkpoints."
    return [text] if reason else []


def set_link(link: Path, target: str) -> list[str]:
    """Makes `link` a symbolic link to `target`, by a rename where the file system can rename over a link."""
    new = link.with_name(f".{link.name}.new")
    try:
        if link.exists() and not link.is_symlink():
            kind = "a directory" if link.is_dir() else "a file"
            return [
                f"{link} is {kind}, not a link, and is left as it is. Checkpoints are found without the link; "
                f"remove {link}, and the next save makes the link."
            ]
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        try:
            new.replace(link)
        except OSError:  # some network file systems cannot rename over a link
            link.unlink(missing_ok=True)
            new.rename(link)
    except OSError as error:
        return [f"The link {link} cannot be made ({error.strerror}). Checkpoints are found without the link."]
    return []


def remove(directory: Path) -> list[str]:
    """Removes a checkpoint. The directory is renamed first, so that half of it is never taken for a checkpoint."""
    stem = f".{directory.name.removeprefix('.')}"
    names = (f"{stem}{f'.{number}' if number else ''}.removed" for number in count())
    renamed = next(path for name in names if not (path := directory.with_name(name)).exists())
    try:
        directory.rename(renamed)
    except OSError as error:
        return [f"{directory} cannot be removed: {error}. The next save tries it again."]
    return remove_renamed(renamed)


def remove_renamed(directory: Path) -> list[str]:
    """Removes what can be removed of a directory that `remove` has renamed."""
    shutil.rmtree(directory, ignore_errors=True)  # frees all files but those that somebody has open
    try:
        if directory.is_symlink():
            directory.unlink()
        shutil.rmtree(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{directory} cannot be removed: {error}. The next save tries it again."]
    return []

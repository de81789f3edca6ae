"""Bytes of a checkpoint: safetensors files written and read piece by piece, each piece with its checksum.

A checksum is taken from the memory that is written, before the write, so that whatever changes a byte on its way to the
disk, on it or on its way back is found when it is read. XXH3 finds accidents; it is no protection against forgery, and
nothing read here is executed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwright.checkpoint.parts import Box, Held, local_part, pieces, rows_of
from shardwright.errors import CheckpointError, DamagedCheckpointError
from shardwright.models.safetensors_io import byte_view, header_bytes
from shardwright.models.torch_dtypes import SAFETENSORS_DTYPES

MANIFEST, CONFIG, TENSORS, INDEX = "manifest.json", "config.yaml", "tensors", "index.json"
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor, in `file` from byte `begin`, cut into pieces of `rows` rows with a checksum each."""

    file: str
    begin: int
    box: Box
    rows: int
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


def checksum(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(descriptor: int) -> str:
    """Waits until an open file is on the disk; why not, where its file system cannot say (`directory.prepare` tells)."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        return str(error.strerror)
    return ""


def write_text(path: Path, text: str) -> dict[str, Any]:
    """Writes and syncs a small file; returns its size and checksum."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        settle(file.fileno())
    return {"bytes": len(data), "checksum": checksum(data)}


def file_order(parts: Sequence[Held]) -> list[Held]:
    """The order of parts in a file: the widest dtype first, so that each begins at a multiple of its element's size."""
    return sorted(parts, key=lambda held: -SAFETENSORS_DTYPES[held.dtype].itemsize)


def _name(held: Held) -> str:
    if held.box.shape == held.shape:
        return held.key
    ends = (f"{a}:{a + n}" for a, n in zip(held.box.start, held.box.shape))
    return f"{held.key}[{','.join(ends)}]"


def _write_all(descriptor: int, data: memoryview | bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_span(descriptor: int, offset: int, data: memoryview) -> None:
    """Writes all of `data` at byte `offset` of an open file."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def write_parts(path: Path, parts: Sequence[tuple[Held, Tensor]]) -> dict[str, Any]:
    """Writes parts (in `file_order`) as one safetensors file and syncs it; returns what the index needs to know of it.

    At most one piece is copied at a time, where a tensor is not contiguous or not on the CPU.
    """
    header = header_bytes([(_name(held), SAFETENSORS_DTYPES[held.dtype], held.box.shape) for held, _ in parts])
    record: dict[str, Any] = {"file": path.name, "header": [len(header), checksum(header)], "parts": []}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(descriptor, header)
        begin = len(header)
        for held, tensor in parts:
            local, rows, sums = local_part(tensor), rows_of(held.box, tensor.element_size()), []
            for piece in pieces(held.box, rows):
                data = byte_view(local[piece.within(held.box)].cpu().contiguous())
                sums.append(checksum(data))
                _write_all(descriptor, data)
            entry = [held.key, held.dtype, held.shape, begin, held.box.start, held.box.shape, rows, sums]
            record["parts"].append(entry)
            begin += held.part_bytes
        settle(descriptor)
    finally:
        os.close(descriptor)
    record["bytes"] = begin
    return record


def index_text(records: Sequence[dict[str, Any]], numbers: dict[str, int | float]) -> str:
    """The index of a checkpoint as JSON: where every part of every tensor lies, and the numbers."""
    tensors: dict[str, Any] = {}
    for record in records:
        for key, dtype, shape, *place in record["parts"]:
            entry = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "parts": []})
            entry["parts"].append([record["file"], *place])
    headers = {record["file"]: record["header"] for record in records}
    return json.dumps({"headers": headers, "numbers": numbers, "tensors": tensors}) + "\n"


@dataclass(frozen=True)
class Index:
    """What the checkpoint in `directory` holds. headers: file -> (bytes, checksum) of its safetensors header."""

    directory: Path
    tensors: dict[str, Stored]
    numbers: dict[str, int | float]
    headers: dict[str, tuple[int, str]]

    @property
    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {key: (stored.dtype, stored.shape) for key, stored in self.tensors.items()}


def read_checked(path: Path, record: dict[str, Any]) -> bytes:
    """The content of a small file. Raises `DamagedCheckpointError` where it is not what `record` says was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    if (len(data), checksum(data)) != (record.get("bytes"), record.get("checksum")):
        raise damaged(path, "is not what was written: its checksum differs")
    return data


def damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} {what}.", "", "Use another checkpoint.")


def parse_index(directory: Path, data: bytes) -> Index:
    """The index of the checkpoint in `directory` from its JSON.

    Every value is checked before it is used: files lie in the directory, boxes in their tensors. Raises
    `CheckpointError` where they do not.
    """
    try:
        found = json.loads(data)
        tensors = {key: _stored(key, entry) for key, entry in found["tensors"].items()}
        numbers = {key: value for key, value in found["numbers"].items() if isinstance(value, int | float)}
        headers = {name: (int(size), str(total)) for name, (size, total) in found["headers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{directory / INDEX} is no index of a checkpoint: {error!r}.") from None
    named = headers.keys() | {part.file for stored in tensors.values() for part in stored.parts}
    if wrong := [name for name in named if not _FILE.fullmatch(name) or name not in headers]:
        raise CheckpointError(f"{directory / INDEX} names {wrong[0]!r}, which is no file of a checkpoint.")
    return Index(directory, tensors, numbers, headers)


def _stored(key: str, entry: dict[str, Any]) -> Stored:
    shape = tuple(entry["shape"])
    parts = []
    for file, begin, start, length, rows, sums in entry["parts"]:
        box = Box(tuple(start), tuple(length))
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, *box.start, *box.shape, begin, rows))
        inside = len(shape) == len(box.start) == len(box.shape) and all(
            a + n <= size for a, n, size in zip(box.start, box.shape, shape)
        )
        if not (whole and inside and rows > 0 and isinstance(file, str) and _FILE.fullmatch(file)):
            raise ValueError(f"part {box} of {key} {shape} in {file!r}")
        parts.append(StoredPart(file, begin, box, rows, tuple(sums)))
        if len(parts[-1].checksums) != sum(1 for _ in pieces(box, rows)):
            raise ValueError(f"checksums of {key}")
    if sum(part.box.elements for part in parts) != Box(shape, shape).elements:
        raise ValueError(f"the parts of {key} are not all of it")
    return Stored(SAFETENSORS_DTYPES[entry["dtype"]], shape, tuple(parts))


def read_piece(descriptor: int, path: Path, offset: int, into: memoryview, right: str, key: str) -> None:
    """Fills `into` from byte `offset` of an open file. Raises `DamagedCheckpointError` where the checksum differs."""
    read_span(descriptor, path, offset, into)
    check_piece(path, offset, into, right, key)


def check_piece(path: Path, offset: int, data: memoryview, right: str, key: str) -> None:
    """Raises `DamagedCheckpointError` unless `data`, the piece of `path` from byte `offset`, has the checksum `right`."""
    if checksum(data) != right:
        raise damaged(path, f"is not what was written: bytes {offset} to {offset + len(data)}, a part of {key}, differ")


def read_span(descriptor: int, path: Path, offset: int, into: memoryview) -> None:
    """Fills `into` from byte `offset` of an open file. Raises `DamagedCheckpointError` where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise damaged(path, f"ends at byte {offset + done}")
        done += count


def file_pieces(index: Index, file: str) -> Iterator[tuple[int, int, str, str]]:
    """(first byte, bytes, checksum, key) of every piece of a file, in its order; the header is one."""
    size, total = index.headers[file]
    yield 0, size, total, "the header"
    found = []
    for key, stored in index.tensors.items():
        for part in stored.parts:
            if part.file == file:
                found.append((part.begin, key, stored, part))
    for _, key, stored, part in sorted(found, key=lambda item: item[0]):
        begin = part.begin
        for piece, right in zip(pieces(part.box, part.rows), part.checksums):
            length = piece.elements * stored.dtype.itemsize
            yield begin, length, right, key
            begin += length

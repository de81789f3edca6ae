"""The tensor files of a checkpoint and their index: where every part of every tensor lies, with a checksum for each piece.

Each rank writes one safetensors file. `index.json` names, for each tensor, its parts and the file of each part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.filesystem import checksum, damaged, read_piece, sync_file, write_span
from shardwright.checkpoint.parts import RankPart, local_part, pieces, rows_of
from shardwright.errors import CheckpointError
from shardwright.mesh.shard_geometry import Box
from shardwright.models.safetensors_io import byte_view, header_bytes
from shardwright.models.torch_dtypes import SAFETENSORS_CODES, SAFETENSORS_DTYPES

TENSORS, INDEX = "tensors", "index.json"
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
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Index:
    """What the tensor files in `directory` hold. headers: file -> (bytes, checksum) of its safetensors header."""

    directory: Path
    tensors: dict[str, StoredTensor]
    numbers: dict[str, int | float]
    headers: dict[str, tuple[int, str]]

    @property
    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Key -> (dtype, unsplit shape)."""
        return {key: (stored.dtype, stored.shape) for key, stored in self.tensors.items()}


def file_order(parts: Sequence[RankPart]) -> list[RankPart]:
    """The order of parts in a file: the widest dtype first, as `header_bytes` asks."""
    return sorted(parts, key=lambda held: -held.dtype.itemsize)


def _name(held: RankPart) -> str:
    if held.box.shape == held.shape:
        return held.key
    ends = (f"{a}:{a + n}" for a, n in zip(held.box.start, held.box.shape))
    return f"{held.key}[{','.join(ends)}]"


def write_parts(path: Path, parts: Sequence[tuple[RankPart, Tensor]]) -> dict[str, Any]:
    """Writes parts (in `file_order`) as one safetensors file and syncs it; returns the record of the file for the index.

    A tensor that is not contiguous, or not on the CPU, is copied one piece at a time.
    """
    header = header_bytes([(_name(held), held.dtype, held.box.shape) for held, _ in parts])
    record: dict[str, Any] = {"file": path.name, "header": [len(header), checksum(header)], "parts": []}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_span(descriptor, 0, header)
        end = len(header)
        for held, tensor in parts:
            begin, local, rows, sums = end, local_part(tensor), rows_of(held.box, held.dtype.itemsize), []
            for piece in pieces(held.box, rows):
                data = byte_view(local[piece.within(held.box)].cpu().contiguous())
                sums.append(checksum(data))
                write_span(descriptor, end, data)
                end += len(data)
            code = SAFETENSORS_CODES[held.dtype]
            record["parts"].append([held.key, code, held.shape, begin, held.box.start, held.box.shape, rows, sums])
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    return record | {"bytes": end}


def index_text(records: Sequence[dict[str, Any]], numbers: Mapping[str, int | float]) -> str:
    """The index as JSON, from the records of all files and the numbers of the state."""
    tensors: dict[str, Any] = {}
    for record in records:
        for key, dtype, shape, *part in record["parts"]:
            entry = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "parts": []})
            entry["parts"].append([record["file"], *part])
    headers = {record["file"]: record["header"] for record in records}
    return json.dumps({"headers": headers, "numbers": dict(numbers), "tensors": tensors}) + "\n"


def parse_index(directory: Path, data: bytes) -> Index:
    """The index from its JSON. directory: of the tensor files.

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


def _stored(key: str, entry: dict[str, Any]) -> StoredTensor:
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
    return StoredTensor(SAFETENSORS_DTYPES[entry["dtype"]], shape, tuple(parts))


def file_pieces(index: Index, file: str) -> Iterator[tuple[int, int, str, str]]:
    """(first byte, bytes, checksum, key) of every piece of a file, in its order; the header is the first."""
    yield 0, *index.headers[file], "the header"
    found = [
        (part.begin, key, stored.dtype.itemsize, part)
        for key, stored in index.tensors.items()
        for part in stored.parts
        if part.file == file
    ]
    for begin, key, itemsize, part in sorted(found, key=lambda item: item[0]):
        for piece, expected in zip(pieces(part.box, part.rows), part.checksums):
            length = piece.elements * itemsize
            yield begin, length, expected, key
            begin += length


def verify_file(index: Index, name: str, size: int) -> None:
    """Reads every byte of a tensor file that should have `size` bytes. Raises `DamagedCheckpointError` for a wrong one."""
    path, end = index.directory / name, 0
    with path.open("rb") as file:
        for begin, length, expected, key in file_pieces(index, name):
            if begin != end:
                size = -1  # a gap: the check below raises
                break
            read_piece(file.fileno(), path, begin, memoryview(bytearray(length)), expected, key)
            end = begin + length
    if end != size:
        raise damaged(path, f"has bytes from {end} that the index does not name")

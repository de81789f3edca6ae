"""Safetensors files: the header, and tensors read and written in parts.

`safetensors.safe_open` maps a file. Pages of a mapped file count as resident memory of the process that touched them, so a
rank that reads half of a file would seem to hold that half, and under a memory limit does. `safetensors.torch.save_file`
takes all tensors at once. So rows are read through a small buffer, and tensors are written one after another behind the header.
Format: https://huggingface.co/docs/safetensors (8 bytes length, a JSON header, then the data, row-major).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ModelError
from shardwright.models.torch_dtypes import SAFETENSORS_CODES, SAFETENSORS_DTYPES

BUFFER_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `begin` is its first byte in `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length and JSON of a file that holds `tensors` (name, dtype, shape) in this order, padded to a multiple of 8 bytes.

    The widest dtype must come first: then every tensor begins at a multiple of its element's size.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file by its name. Raises `ModelError` where the file is cut off or holds a dtype torch lacks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{file} is not a safetensors file, or it is cut off.", "", "Copy it again.")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ModelError(f"{file}: its header is not JSON.", "", "Copy it again.") from None
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        if value["dtype"] not in SAFETENSORS_DTYPES:
            raise ModelError(
                f"{file}: {name} is stored as {value['dtype']}.",
                f"Only {', '.join(SAFETENSORS_DTYPES)} can be read.",
                "Convert the weights to bf16 or fp32 first.",
            )
        dtype, (begin, end) = SAFETENSORS_DTYPES[value["dtype"]], value["data_offsets"]
        if end - begin != prod(value["shape"]) * dtype.itemsize or 8 + length + end > size:
            raise ModelError(f"{file} is cut off or damaged: {name} does not fit in it.", "", "Copy it again.")
        entries[name] = TensorEntry(file, dtype, tuple(value["shape"]), 8 + length + begin)
    return entries


def read_slice(entry: TensorEntry, box: tuple[slice, ...], out: Tensor) -> None:
    """Fills `out`, in its own dtype, with `box` of the tensor at `entry`, through a buffer of some rows (at least one)."""
    if out.numel() == 0:
        return
    rows, inner = (box[0], box[1:]) if box else (slice(0, 1), ())
    row_shape = entry.shape[1:]
    row_bytes = prod(row_shape) * entry.dtype.itemsize
    step = max(1, BUFFER_BYTES // row_bytes)
    buffer = bytearray(min(step, rows.stop - rows.start) * row_bytes)
    target = out if box else out.reshape(1)
    with entry.file.open("rb", buffering=0) as stream, torch.no_grad():
        for start in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - start)
            stream.seek(entry.begin + start * row_bytes)
            _fill(stream, memoryview(buffer)[: count * row_bytes])
            part = torch.frombuffer(buffer, dtype=entry.dtype, count=count * prod(row_shape))
            part = part.view(count, *row_shape)[(slice(None), *inner)]
            target[start - rows.start : start - rows.start + count].copy_(part)


def _fill(stream: FileIO, buffer: memoryview) -> None:
    """Reads until `buffer` is full; one read gives at most 2 GiB and may give less."""
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])
        if not count:
            raise ModelError(f"{stream.name} ended early.", "It was cut off while it was read.")
        done += count


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy has buffers

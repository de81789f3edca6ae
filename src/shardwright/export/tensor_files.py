"""Safetensors files written as a stream.

Sizes and offsets follow from names, shapes and dtypes, so the header is written first and tensors are appended behind it, in
its order: no more than one tensor need be held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.models.torch_dtypes import SAFETENSORS_CODES


@dataclass(frozen=True)
class TensorFile:
    """A file and the tensors in it, in their order."""

    name: str
    tensors: tuple[str, ...]


def split_files(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[TensorFile]:
    """Which tensors go into which file, in the given order, files of at most `max_shard_bytes` or one tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    # the widest dtype first, so that every tensor starts at a multiple of its element's size
    ordered = (sorted(group, key=lambda name: -tensors[name].element_size()) for group in groups)
    return [TensorFile(name, tuple(group)) for name, group in zip(names, ordered)]


def header(file: TensorFile, tensors: Mapping[str, Tensor]) -> bytes:
    """Length and JSON of a safetensors file, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in file.tensors:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": SAFETENSORS_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def append(path: Path, tensor: Tensor) -> None:
    """Writes the elements of `tensor` behind what `path` holds."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    with path.open("ab") as stream:
        stream.write(flat.view(torch.uint8).numpy().data)


def write_index(files: list[TensorFile], tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Says which file each tensor is in."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

"""Safetensors files written as a stream.

Sizes and offsets follow from names, shapes and dtypes, so the header is written first and tensors are appended behind it, in
its order: no more than one tensor need be held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardwright.models.safetensors_io import byte_view, header_bytes


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
    """The header of a file, as Transformers writes one."""
    shapes = [(name, tensors[name].dtype, tensors[name].shape) for name in file.tensors]
    return header_bytes(shapes, {"format": "pt"})


def append(path: Path, tensor: Tensor) -> None:
    """Writes the elements of `tensor` behind what `path` holds."""
    with path.open("ab") as stream:
        stream.write(byte_view(tensor.detach().to("cpu").contiguous()))


def write_index(files: list[TensorFile], tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Says which file each tensor is in."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

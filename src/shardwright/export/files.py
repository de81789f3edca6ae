"""The directory of an export and its weights: which directory it may replace, and safetensors written as a stream.

Sizes and offsets follow from names, shapes and dtypes, so the header is written first and tensors are appended behind it, in
its order: no more than one tensor need be held.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardwright.arch.model_files import MODEL_FILES, OTHER_FILES, TOKENIZER_FILES, WEIGHT_FILES, matching
from shardwright.config.schema import Model
from shardwright.models.safetensors_io import byte_view, header_bytes


def refusal(target: Path, spec: Model, tokenizer: Path | None = None) -> str | None:
    """Why an export may not replace what is at `target`, or cannot be written there; None where it can."""
    place = target.resolve()
    for source in (Path(spec.model_name_or_path), tokenizer or Path(spec.tokenizer_name_or_path or "")):
        if target.exists() and source.exists() and source.resolve() == place:
            return "it is the directory that the model was read from"
        if target.exists() and source.resolve().is_relative_to(place):
            return f"it holds {source}, which the run reads"
    if target.is_symlink():
        return f"it is a link, to {target.readlink()}"
    if target.exists() and not target.is_dir():
        return "it is a file"
    if target.is_dir() and (foreign := _foreign(target)) is not None:
        return f"it holds files that are not of an earlier export: {foreign}"
    above = next(path for path in (target.parent, *target.parent.absolute().parents) if path.exists())
    if not above.is_dir():
        return f"{above} is a file"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} is not writable"
    return None


def _foreign(directory: Path) -> str | None:
    """A file of `directory` that no export writes; any file where the directory holds no weights."""
    known = {*matching(directory, (*WEIGHT_FILES, *MODEL_FILES, *TOKENIZER_FILES, *OTHER_FILES))}
    held = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())
    other = [name for name in held if name not in known]
    if other or not held:
        return other[0] if other else None
    return None if matching(directory, WEIGHT_FILES) else held[0]


def replace(partial: Path, target: Path) -> None:
    """Puts the finished directory in place; an older one is removed only when the new one is in place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


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

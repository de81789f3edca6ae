"""A directory that Transformers reads, written from a model that no rank holds whole.

Sizes and offsets of a safetensors file follow from names, shapes and dtypes, so the header is written first
and the tensors are streamed behind it: rank 0 holds one full parameter at a time, never a file's worth.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.models.adapters import canonical_name, canonical_parameters, unwrapped
from shardwright.models.weights import DTYPES
from shardwright.models.whole import described, whole_tensors

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class _File:
    name: str
    tensors: tuple[str, ...]


def save_pretrained(
    model: nn.Module,
    spec: Model,
    directory: str | Path,
    *,
    chat_template: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes `model` as a Hugging Face directory and returns its path; every rank must call it.

    Written: safetensors under the names of the unsplit model, tied weights once, in the dtype of the
    parameters; config.json as the model was built, generation_config.json and tokenizer files where the
    model came with them, with the template in the file `chat_template` in place of the
    tokenizer's own. A plain `nn.Module` has only its safetensors. Files have at most `max_shard_bytes`, or
    one tensor.

    The directory appears complete or not at all: rank 0 writes next to it and renames. One that is there is
    replaced if it holds an earlier export; the model's own source directory never is.

    Raises `ModelError` on every rank when rank 0 cannot write.
    """
    target, root = Path(directory), unwrapped(model)
    partial = target.with_name(f".{target.name}.partial")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = _tensors(root)
    known = {name: like for name, (_, like) in described(tensors).items()}
    files = _split(known, max_shard_bytes)
    _agree(_refusal(target, spec) if _is_writer() else None)
    template = None if chat_template is None else Path(chat_template)
    failure = _write(root, spec, template, tensors, known, files, partial)
    if failure is None and _is_writer():
        failure = _attempt(_replace, partial, target)
    if failure is not None:
        shutil.rmtree(partial, ignore_errors=True)
    _agree(failure)
    return target


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name, tied ones once; the same order on every rank."""
    tensors: dict[str, Tensor] = dict(canonical_parameters(model))
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                tensors[canonical_name(f"{path}.{leaf}" if path else leaf)] = buffer
    return tensors


def _split(tensors: dict[str, Tensor], max_shard_bytes: int) -> list[_File]:
    """Which tensors go into which file, in the model's order."""
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
    return [_File(name, tuple(group)) for name, group in zip(names, ordered)]


def _write(
    model: nn.Module,
    spec: Model,
    template: Path | None,
    tensors: dict[str, Tensor],
    known: dict[str, Tensor],
    files: list[_File],
    partial: Path,
) -> str | None:
    """Writes everything into `partial`; gives what went wrong on rank 0. `known` has shapes and dtypes of all ranks.

    All ranks gather every tensor, even after rank 0 has failed: a rank that left would hang the others.
    """
    writer = _is_writer()
    failure = _attempt(_start, model, spec, template, partial) if writer else None
    for file in files:
        path = partial / file.name
        if writer and failure is None:
            failure = _attempt(path.write_bytes, _header(file, known))
        for _, full in whole_tensors(tensors, file.tensors):
            if full is not None and failure is None:
                failure = _attempt(_append, path, full)
            del full
    if writer and failure is None and len(files) > 1:
        failure = _attempt(_write_index, files, known, partial)
    if writer and failure is None:
        failure = _attempt(_sync, partial)
    return failure


def _start(model: nn.Module, spec: Model, template: Path | None, partial: Path) -> None:
    """Makes the directory with everything but weights."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = Path(spec.model_name_or_path)
    if hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
        _exported_config(model, source).save_pretrained(partial)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", partial / "generation_config.json")
    tokenizer = Path(spec.tokenizer_name_or_path or source)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, partial / name)
    if template is not None:
        _set_chat_template(partial, template)


def _set_chat_template(directory: Path, template: Path) -> None:
    """Makes `template` the only chat template of the tokenizer in `directory`."""
    (directory / "chat_template.json").unlink(missing_ok=True)
    config = directory / "tokenizer_config.json"
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        if values.pop("chat_template", None) is not None:
            config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(template, directory / "chat_template.jinja")


def _exported_config(model: nn.Module, source: Path) -> Any:
    """The config that the model was built from, with the cache as it was there."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = next(model.parameters()).dtype
    if hasattr(config, "use_cache"):
        file = source / "config.json"
        values = json.loads(file.read_text()) if file.is_file() else {}
        config.use_cache = values.get("use_cache", type(config)().use_cache)
    return config


def _header(file: _File, tensors: dict[str, Tensor]) -> bytes:
    """Length and JSON of a safetensors file, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in file.tensors:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _append(path: Path, tensor: Tensor) -> None:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    with path.open("ab") as stream:
        stream.write(flat.view(torch.uint8).numpy().data)


def _sync(directory: Path) -> None:
    """Returns when the contents of every file are on the disk."""
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _write_index(files: list[_File], tensors: dict[str, Tensor], partial: Path) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _refusal(target: Path, spec: Model) -> str | None:
    source = Path(spec.model_name_or_path)
    if target.exists() and source.exists() and target.resolve() == source.resolve():
        return "it is the directory that the model was read from"
    if target.exists() and not target.is_dir():
        return "there is a file of that name"
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("model*.safetensors")):
        return "it holds something else than an earlier export"
    return None


def _replace(partial: Path, target: Path) -> None:
    """Puts the finished directory in place; one that was there goes only when the new one is."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _attempt(function: Any, *args: Any) -> str | None:
    """Calls it; gives what it raised as text, because the other ranks must hear of it first."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agree(failure: str | None) -> None:
    """Raises on every rank when rank 0 has a `failure`."""
    said = [failure]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise ModelError(
            f"The export cannot be written: {said[0]}.", "", "Give another directory or make room."
        )

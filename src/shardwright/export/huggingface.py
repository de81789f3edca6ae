"""Writes a Hugging Face directory from a model that no rank holds whole.

Tensors have the names that Transformers gives them in files (`models.hub_names`). They are streamed: rank 0 holds the tensors
of the model that one tensor of the files is made of, never a whole file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.export.files import TensorFile, append, header, refusal, replace, split_files, write_index
from shardwright.export.other_files import other_files_of
from shardwright.models.gather_full_tensors import described, whole_tensors
from shardwright.models.materialise import unsplit_model_of
from shardwright.models.model_parts import canonical_name, canonical_parameters, unwrapped
from shardwright.models.tensor_tracing import Origin, Slices, Stored
from shardwright.torch_private import persistent_buffers


def save_pretrained(
    model: nn.Module,
    spec: Model,
    directory: str | Path,
    *,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    end_tokens: Sequence[int] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes `model` as a Hugging Face directory and returns its path; every rank must call it.

    Written: safetensors under the names that `save_pretrained` of Transformers gives, tied weights once, in the dtype of
    the parameters; config.json as the model was built; of the model's directory generation_config.json, tokenizer and
    templates, configs of processors, code and terms. tokenizer: a directory, in place of the model's own tokenizer.
    chat_template: a file, in place of the tokenizer's templates. end_tokens: what training teaches the model to stop with,
    added to the end tokens of the configs. A plain `nn.Module` has only its safetensors. Files have at most
    `max_shard_bytes`, or one tensor.

    The directory appears complete or not at all: rank 0 writes beside it and renames. A directory that is there is
    replaced if it holds an earlier export; a directory that `files.refusal` names is never replaced.

    Raises `ModelError` on every rank when rank 0 cannot write.
    """
    target, root = Path(directory), unwrapped(model)
    partial = target.with_name(f".{target.name}.partial")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    export = _Export.of(root, spec, max_shard_bytes)
    failure = refusal(target, spec) if _is_writer() else None
    _agree(failure)

    def start() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        other_files_of(root, spec, tokenizer=tokenizer, chat_template=chat_template, end_tokens=end_tokens).write(
            partial
        )

    if _is_writer():
        failure = _attempt(start)
    failure = export.write(partial, failure)
    if failure is None and _is_writer():
        failure = _attempt(replace, partial, target)
    if failure is not None:
        shutil.rmtree(partial, ignore_errors=True)
    _agree(failure)
    return target


def check_export(
    model: nn.Module,
    spec: Model,
    directory: Path,
    *,
    tokenizer: Path | None,
    chat_template: str | None,
    end_tokens: Sequence[int],
) -> tuple[str, ...]:
    """Lines about what a later `save_pretrained` with these arguments leaves out or changes; called before training.

    Raises `ConfigError` for what would stop the export.
    """
    reason = refusal(directory, spec, tokenizer)
    if reason is not None:
        raise ConfigError(
            f"{directory} cannot be written at the end of the run: {reason}.",
            "checkpoint.export_hf: final puts the trained model there.",
            "Set another checkpoint.output_dir, or checkpoint.export_hf to none.",
        )
    return other_files_of(model, spec, tokenizer=tokenizer, chat_template=chat_template, end_tokens=end_tokens).lines


@dataclass(frozen=True)
class _Export:
    """The weights of one export; `held` alone differs between ranks.

    held: this rank's parts of the model's tensors.
    like: shape and dtype of each tensor of the files, on meta.
    origins: the tensors of the model that each is made of.
    files: which tensors each file holds.
    """

    held: dict[str, Tensor]
    like: dict[str, Tensor]
    origins: dict[str, Origin]
    files: list[TensorFile]

    @classmethod
    def of(cls, model: nn.Module, spec: Model, max_shard_bytes: int) -> _Export:
        whole = unsplit_model_of(model)
        hub = None if whole is None else whole.hub
        held = {hub.kept.get(name, name) if hub else name: value for name, value in _tensors(model).items()}
        known = {name: like for name, (_, like) in described(held).items()}
        origins: dict[str, Origin] = {name: Stored(name, tuple(like.shape)) for name, like in known.items()}
        if hub is not None:
            origins = hub.saved(known, spec.init == "pretrained")
        like = {
            name: torch.empty(origin.shape, dtype=known[next(origin.stored())].dtype, device="meta")
            for name, origin in origins.items()
        }
        return cls(held, like, origins, split_files(like, max_shard_bytes))

    def write(self, directory: Path, failure: str | None) -> str | None:
        """Writes all files; returns `failure`, or what failed on rank 0.

        All ranks gather every tensor, even after rank 0 has failed: a rank that left would hang the others.
        """
        writer, current = _is_writer(), None
        for file, name, parts in self._gathered():
            path = directory / file.name
            if writer and failure is None and file is not current:
                failure = _attempt(path.write_bytes, header(file, self.like))
                current = file
            if writer and failure is None:
                failure = _attempt(_append_made, path, self.origins[name], self.like[name].dtype, parts)
        if writer and failure is None and len(self.files) > 1:
            failure = _attempt(write_index, self.files, self.like, directory)
        if writer and failure is None:
            failure = _attempt(_sync, directory)
        return failure

    def _gathered(self) -> Iterator[tuple[TensorFile, str, dict[str, Tensor]]]:
        """Each tensor of the files, with the whole tensors that make it up, on rank 0 and while needed."""
        order: list[str] = []
        steps: list[tuple[TensorFile, str, list[str], int]] = []
        kept: list[str] = []
        for file in self.files:
            for name in file.tensors:
                needed = list(dict.fromkeys(self.origins[name].stored()))
                new = [part for part in needed if part not in kept]
                order += new
                steps.append((file, name, needed, len(new)))
                kept = needed
        gathered = whole_tensors(self.held, order)
        parts: dict[str, Tensor] = {}
        for file, name, needed, count in steps:
            parts = {part: tensor for part, tensor in parts.items() if part in needed}
            for _ in range(count):
                part, tensor = next(gathered)
                if tensor is not None:
                    parts[part] = tensor
            yield file, name, parts
        next(gathered, None)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name, tied ones once; the same order on every rank."""
    tensors: dict[str, Tensor] = dict(canonical_parameters(model))
    for path, module in model.named_modules():
        for leaf, buffer in persistent_buffers(module).items():
            tensors[canonical_name(f"{path}.{leaf}" if path else leaf)] = buffer
    return tensors


def _append_made(path: Path, origin: Origin, dtype: torch.dtype, parts: Mapping[str, Tensor]) -> None:
    """Writes the tensor that `origin` makes of the whole tensors `parts`."""
    if isinstance(origin, Stored):
        append(path, parts[origin.name])
        return

    def read(name: str, box: Slices, out: Tensor) -> None:
        out.copy_(parts[name][box])

    device = next(iter(parts.values())).device
    made = torch.empty(origin.shape, dtype=dtype, device=device)
    with torch.no_grad():
        origin.fill(tuple(slice(0, size) for size in origin.shape), made, read)
    append(path, made)


def _sync(directory: Path) -> None:
    """Returns when the contents of every file are on the disk."""
    for path in (path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _attempt(function: Any, *args: Any) -> str | None:
    """Calls the function; returns the error that it raised as text, which all ranks must know before one raises."""
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
        raise ModelError(f"The export cannot be written: {said[0]}.", "", "Give another directory or make room.")

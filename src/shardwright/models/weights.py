"""The weights of a model directory: which files hold them, and whether they are those of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardwright.arch.model_files import FOREIGN_WEIGHTS, matching
from shardwright.errors import ModelError
from shardwright.models.initialization import Recipe, UnsplitModel, modules_above
from shardwright.models.safetensors_io import TensorEntry, read_header, read_slice
from shardwright.models.tensor_tracing import Origin, Slices, Stored


class Weights:
    """The tensors of a model directory, by the names of the whole model.

    Raises `ModelError` on construction when there are no safetensors, when they lack a tensor of the model, or when they
    hold more of one of its modules than the model has. `unused` names what belongs to no module of the model.
    """

    def __init__(self, directory: Path, whole: UnsplitModel) -> None:
        self._directory, self._entries = directory, read_headers(directory)
        self._origins = _origins(self._entries, whole)
        extra = [n for n in self._origins if n not in whole.names and not _matches(n, whole.ignored)]
        inside = [name for name in extra if _belongs(name, whole)]
        missing = sorted(
            group[0]
            for group in whole.groups
            if not any(name in self._origins or _matches(name, whole.optional) for name in group)
        )
        self.unused = sorted({name for n in extra for name in self._origins[n].stored()})
        if missing or inside:
            raise ModelError(
                f"{directory}: the weights are not those of this model. "
                + listed("missing from the files", missing)
                + listed("not in the model", inside),
                "Every parameter must get a value, and a module cannot leave a part of its weights out.",
                "Use the config.json that the weights were saved with, without config_overrides.",
            )

    def check(self, recipe: Recipe, shape: Sequence[int], dtype: torch.dtype) -> list[str]:
        """What is wrong with the entries of one tensor: shape or dtype; empty when nothing is."""
        wrong = []
        for name in self._names(recipe):
            origin = self._origins[name]
            stored = {self._entries[part].dtype: part for part in origin.stored()}
            made = "" if isinstance(origin, Stored) else f" (made of {len(list(origin.stored()))} tensors)"
            if origin.shape != tuple(shape):
                wrong.append(f"{name} is {list(origin.shape)} in the files{made} and {list(shape)} in the model")
            wrong += [
                f"{name} is {found} in the files and {dtype} in the model"
                for found in stored
                if found.is_floating_point != dtype.is_floating_point or _loses(found, dtype)
            ]
        return wrong

    def has(self, recipe: Recipe) -> bool:
        """True when the files hold the tensor under one of its names."""
        return bool(self._names(recipe))

    def read(self, recipe: Recipe, box: Slices, out: Tensor) -> None:
        """Fills `out` with the part `box` of a tensor, in `out`'s dtype.

        Where a checkpoint holds both names of tied weights, they must be equal: raises `ModelError` if not.
        """
        first, *others = self._names(recipe)
        self._origins[first].fill(box, out, self._part)
        for other in others:
            twin = torch.empty_like(out)
            self._origins[other].fill(box, twin, self._part)
            if not torch.equal(out, twin):
                raise ModelError(
                    f"{self._directory}: {first} and {other} differ, but the model ties them.",
                    "One of the two would be lost.",
                    "Set tie_word_embeddings to false in config.json, or remove one from the files.",
                )

    def _part(self, name: str, box: Slices, out: Tensor) -> None:
        read_slice(self._entries[name], box, out)

    def _names(self, recipe: Recipe) -> list[str]:
        return [name for name in recipe.names if name in self._origins]


def _origins(entries: dict[str, TensorEntry], whole: UnsplitModel) -> dict[str, Origin]:
    """What the files hold, by the model's names."""
    if whole.hub is not None:
        return whole.hub.loaded({name: (entry.shape, entry.dtype) for name, entry in entries.items()})
    return {name: Stored(name, entry.shape) for name, entry in entries.items()}


def _loses(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True for float64 into the default float32. A bf16 master is asked for by name, so it may narrow."""
    return stored == torch.float64 and wanted == torch.float32


def listed(what: str, names: Sequence[str], limit: int = 8) -> str:
    """`3 WHAT: a, b, c. `, cut after `limit` names; empty without names."""
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} {what}: {', '.join(names[:limit])}{more}. "


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _belongs(name: str, whole: UnsplitModel) -> bool:
    """Whether a tensor that the model lacks would be a part of one of its modules, below the model and its base.

    A bias that the model has no place for, or one more layer, makes another model. A vision tower, or a head for tokens
    further ahead, stands beside what the model computes.
    """
    bases = {whole.hub.base_model_prefix} if whole.hub is not None else set()
    return any(module in whole.modules - bases for module in modules_above(name))


def read_headers(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor in the safetensors of `directory`, by its name there; raises `ModelError` without any."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    placed: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    files = [directory / name for name in sorted(set(placed.values()))] or [single]
    if index.is_file() and single.is_file() and single not in files:
        raise ModelError(
            f"{directory} has {single.name} and {index.name}, which names other files.",
            "Which of the two sets of weights is meant cannot be told.",
            "Remove one of them.",
        )
    if not index.is_file() and not single.is_file():
        other = matching(directory, FOREIGN_WEIGHTS)
        raise ModelError(
            f"{directory} has no {single.name} and no {index.name}" + (f" (there is {other[0]})." if other else "."),
            "init: pretrained reads its weights from there.",
            f"Convert the weights once with Transformers, AutoModelForCausalLM.from_pretrained({str(directory)!r})"
            ".save_pretrained(NEW_DIRECTORY), or set model.init to random.",
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing.", f"{index.name} names it.", "Copy the directory again.")
        entries.update(read_header(file))
    lost = sorted(set(placed) - set(entries))
    if lost:
        raise ModelError(f"{directory}: {listed('named by the index but in no file', lost)}".strip())
    return entries

"""This rank's part of a model on meta gets memory and values, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.mesh.shard_geometry import box_of, from_local, local_tensor
from shardwright.models.build import RECIPES, model_directory, tensors_of
from shardwright.models.initialization import Recipe, UnsplitModel, replay
from shardwright.models.weights import Weights, listed
from shardwright.torch_private import fsdp_units, own_buffers


@dataclass
class _Slot:
    """One tensor on meta, and every (module, attribute) that holds it."""

    tensor: Tensor
    recipe: Recipe
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


def materialise(model: nn.Module, spec: Model, *, seed: int, device: torch.device) -> None:
    """Gives every parameter and buffer of a model from `build_model` its memory on `device` and its value.

    Parameters may be plain tensors, or DTensors after `fully_shard` or `parallelize_module`, of which this rank's part is
    allocated. Ties stay ties. Optimizers must be made afterwards: parameters are new objects.

    init: random draws each value from (seed, name) on the full shape, on the CPU and in float32, and then converts the value:
    the same numbers on every layout. init: pretrained reads the rows of this rank from the safetensors files. A buffer that no
    file holds gets the value that the constructor gives it.

    Peak memory above the shard: one full parameter in float32 (random), a few MiB (pretrained).
    Raises `ModelError`, by name, before anything is allocated where a value cannot be known.
    """
    slots = _slots(model)
    weights = Weights(model_directory(spec), slots[0].recipe.whole) if spec.init == "pretrained" else None
    _check(slots, weights)
    _move_computed_buffers(model, device)
    sharded = [p for _, unit in fsdp_units(model.modules()) for p in unit.fsdp_params]
    on_host = {id(p.sharded_param) for p in sharded if p.offload_to_cpu}
    for slot in slots:
        target = torch.device("cpu") if id(slot.tensor) in on_host else device
        new = _filled(slot, weights, seed, target)
        for module, leaf in slot.places:
            setattr(module, leaf, new)
    # fully_shard keeps references to its parameters; it takes new ones in `_apply` in the same way (torch 2.11 to 2.14)
    with torch.no_grad():
        for p in sharded:
            p.reset_sharded_param()


def check_weights(model: nn.Module, spec: Model) -> None:
    """Raises the `ModelError` that `materialise` would raise of the weights. Nothing is allocated; headers alone are read."""
    if spec.init == "pretrained":
        slots = _slots(model)
        _check(slots, Weights(model_directory(spec), slots[0].recipe.whole))


def weight_notices(model: nn.Module, spec: Model) -> list[str]:
    """Lines about weights that take no part in training: those in the files without a module, and those beside the text."""
    whole = unsplit_model_of(model)
    lines: list[str] = []
    if whole is None:
        return lines
    if spec.init == "pretrained" and (unused := Weights(model_directory(spec), whole).unused):
        said = listed("weights in the files belong to no module of the model and are not used", unused)
        lines.append(f"{spec.model_name_or_path}: {said}".rstrip())
    if whole.beside:
        lines.append(f"frozen: {listed('parameters that text does not reach', whole.beside)}".rstrip())
    return lines


def unsplit_model_of(model: nn.Module) -> UnsplitModel | None:
    """The unsplit model of which `model`, or what a rank holds of it, was built; None where `build_model` did not build it."""
    recipes = (recipe for module in model.modules() for recipe in vars(module).get(RECIPES, {}).values())
    first: Recipe | None = next(recipes, None)
    return None if first is None else first.whole


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for path, module in model.named_modules():
        for leaf, tensor in tensors_of(module).items():
            recipe = vars(module).get(RECIPES, {}).get(leaf)
            local = local_tensor(tensor)
            if not local.is_meta and not isinstance(tensor, nn.Parameter):
                continue  # a buffer that the constructor computed on the CPU has its value
            if recipe is None or not local.is_meta:
                raise ModelError(
                    f"{path}.{leaf} is not as build_model left it: "
                    + ("it was added later." if recipe is None else f"it is on {local.device} already."),
                    "Its first value is not known.",
                    "Materialise each model once, and add nothing in between.",
                )
            slots.setdefault(id(tensor), _Slot(tensor, recipe)).places.append((module, leaf))
    return list(slots.values())


def _move_computed_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers that a constructor computed on the CPU, out of numpy for example, to `device`; ties stay ties."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for leaf, tensor in own_buffers(module).items():
            if tensor is not None and not tensor.is_meta and tensor.device != device:
                setattr(module, leaf, moved.setdefault(id(tensor), tensor.to(device)))


def _check(slots: Sequence[_Slot], weights: Weights | None) -> None:
    """Refuses parameters without a rule for their value, and weights of another shape or dtype."""
    if weights is None:
        unset = [slot.recipe.names[0] for slot in slots if slot.is_parameter and not slot.recipe.is_set]
        if unset:
            raise _no_rule(unset)
        return
    wrong = [w for slot in slots for w in weights.check(slot.recipe, slot.tensor.shape, slot.tensor.dtype)]
    if wrong:
        rows_differ = any(word in text for text in wrong for word in ("embed", "wte", "head"))
        raise ModelError(
            f"The weights do not fit the model: {listed('tensors differ', wrong)}".strip(),
            "They were saved with another config.json, for example with another vocab_size." if rows_differ else "",
            "Use the config.json that the weights were saved with.",
        )


def _filled(slot: _Slot, weights: Weights | None, seed: int, device: torch.device) -> Tensor:
    """The new parameter or buffer of `slot` with its value."""
    old, recipe = slot.tensor, slot.recipe
    box = box_of(old, recipe.names[0])
    local = torch.empty(box.shape, dtype=old.dtype, device=device)
    with torch.no_grad():
        if weights is not None and weights.has(recipe):
            weights.read(recipe, box.slices, local)
        elif local.numel() or not slot.is_parameter:
            full = replay(recipe, seed, unset=float("nan") if slot.is_parameter else 0.0)
            if slot.is_parameter and bool(torch.isnan(full.sum())):
                raise _no_rule([recipe.names[0]])
            local.copy_(full[box.slices])
    if not isinstance(old, nn.Parameter):
        return local.requires_grad_(old.requires_grad)
    new = nn.Parameter(from_local(local, old), requires_grad=old.requires_grad)
    new.__dict__.update({key: kept for key, kept in old.__dict__.items() if key not in new.__dict__})
    return new


def _no_rule(names: Sequence[str]) -> ModelError:
    return ModelError(
        listed("parameters never get a value", names).strip(),
        "With init: random, a parameter gets what its constructor gives it; this one only allocates.",
        "Write into it in the constructor (torch.nn.init), or make it with torch.zeros, ones or randn.",
    )

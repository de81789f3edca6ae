"""The state of training as one flat mapping that can be saved and resharded.

Keys are `model.<name>`, `optimizer.<name>.<entry>` and `optimizer_group.<name>.<entry>`, names being those of the unsplit
model; values are DTensors where a parameter is sharded, plain tensors elsewhere, and numbers. So every data-parallel kind
and every world size reads the checkpoints of any other. What an optimizer keeps for a whole group (schedule-free and
D-adapting optimizers do) stands under each parameter of the group, since groups differ between layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.parts import Value
from shardwright.errors import CheckpointError
from shardwright.mesh.object_collectives import gather_objects

STATE_MODEL, STATE_OPTIMIZER, STATE_GROUP = "model.", "optimizer.", "optimizer_group."
FROM_THE_RUN_FILE = ("params", "lr", "weight_decay", "orthogonal")
"""Entries of groups that are set by the run file and the schedule, not by the optimizer."""
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class LocalParameter(Protocol):
    """A trainable parameter as the state needs it (see `train.optimizer.ShardedParam`)."""

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter

    def wrap(self, local: Tensor) -> Tensor:
        """The local tensor as a DTensor of the unsplit shape, where the parameter is one."""
        ...


def split_key(key: str, prefix: str) -> tuple[str, str]:
    """(parameter, entry) of a key of an optimizer's state."""
    name, _, entry = key.removeprefix(prefix).rpartition(".")
    return name, entry


def entries_of(keys: Iterable[str]) -> dict[str, list[str]]:
    """Parameter -> entries of its optimizer state, from the keys of a state."""
    found: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(STATE_OPTIMIZER):
            name, entry = split_key(key, STATE_OPTIMIZER)
            found.setdefault(name, []).append(entry)
    return found


def model_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter (frozen ones too) and persistent buffer once; tied parameters under their first name."""
    state = {name: p.detach() for name, p in module.named_parameters()}
    return {f"{STATE_MODEL}{name}": value for name, value in {**state, **_buffers(module)}.items()}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    persistent = module.state_dict()
    return {name: b for name, b in module.named_buffers() if name in persistent}


def buffer_keys(module: nn.Module) -> set[str]:
    """Keys of the persistent buffers: what forward may change."""
    return {f"{STATE_MODEL}{name}" for name in _buffers(module)}


def check_buffers(module: nn.Module) -> None:
    """Raises `CheckpointError` on all ranks where ranks hold different values of a persistent buffer; collective.

    The values of one rank are stored, and all ranks would resume from them: the resumed run would differ. Running statistics of
    BatchNorm, which each rank takes from its own rows, are such buffers.
    """
    own = {}
    for name, buffer in _buffers(module).items():
        if not isinstance(buffer, DTensor):
            data = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            own[name] = hashlib.blake2b(data.numpy().tobytes(), digest_size=8).digest()
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(gather_objects(own)):
        for name, digest in digests.items():
            first, right = seen.setdefault(name, (rank, digest))
            if digest != right:
                raise CheckpointError(
                    f"The buffer {name} differs between ranks {first} and {rank}.",
                    "A checkpoint holds one value of a buffer, so a resumed run would differ from the saved one.",
                    "Use a layer without running statistics, or one that takes them over all ranks (SyncBatchNorm).",
                )


def optimizer_values(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]) -> dict[str, Value]:
    """Everything in the optimizer's state: tensors, shards as DTensors, and numbers, those of groups too.

    Parameters without state have no entries. Raises `CheckpointError` for a value that is neither.
    """
    found: dict[str, Value] = {}
    for local in parameters:
        for entry, value in optimizer.state.get(local.tensor, {}).items():
            key = f"{STATE_OPTIMIZER}{local.name}.{entry}"
            if isinstance(value, Tensor):
                same_shape = value.shape == local.tensor.shape and value.dim() > 0
                found[key] = local.wrap(value) if same_shape else value
            elif isinstance(value, int | float):
                found[key] = value
            elif value is not None:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {entry} of {local.name} as {type(value).__name__}.",
                    "A checkpoint holds tensors and numbers; without this value the resumed run would differ.",
                    "Use an optimizer whose state is tensors and numbers.",
                )
    names = {id(local.tensor): local.name for local in parameters}
    for group in optimizer.param_groups:
        changed = _changed(group, optimizer.defaults)
        for tensor in group["params"]:
            name = names[id(tensor)]
            found |= {f"{STATE_GROUP}{name}.{entry}": value for entry, value in changed.items()}
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]) -> dict[str, Tensor]:
    """`optimizer_values` of single parameters, with numbers as 0-dim tensors."""
    return {
        key: value if isinstance(value, Tensor) else torch.tensor(value, dtype=_wide(value))
        for key, value in optimizer_values(optimizer, parameters).items()
        if key.startswith(STATE_OPTIMIZER)
    }


def _wide(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _changed(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a group that the optimizer has made or changed."""
    found = {}
    for entry, value in group.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if entry in FROM_THE_RUN_FILE or not isinstance(number, int | float):
            continue
        if entry not in defaults or number != defaults[entry]:
            found[entry] = number
    return found


def restore_numbers(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[LocalParameter],
    numbers: Mapping[str, int | float],
) -> None:
    """Puts the numbers of a checkpoint back, of parameters and of groups.

    Raises `CheckpointError` where parameters of one group had different ones: these layouts group them otherwise.
    """
    for local in parameters:
        entries = optimizer.state.get(local.tensor, {})
        for entry in entries:
            key = f"{STATE_OPTIMIZER}{local.name}.{entry}"
            if key in numbers:
                entries[entry] = numbers[key]
    names = {id(local.tensor): local.name for local in parameters}
    of_parameter: dict[str, dict[str, int | float]] = {}
    for key, value in numbers.items():
        if key.startswith(STATE_GROUP):
            name, entry = split_key(key, STATE_GROUP)
            of_parameter.setdefault(name, {})[entry] = value
    for group in optimizer.param_groups:
        found = [of_parameter.get(names[id(tensor)], {}) for tensor in group["params"]]
        if any(entries != found[0] for entries in found):
            raise CheckpointError(
                f"The checkpoint has different numbers for parameters that {type(optimizer).__name__} steps as one group.",
                "",
                "Resume with the layout that wrote the checkpoint.",
            )
        for entry, value in found[0].items() if found else ():
            held = group.get(entry)
            if isinstance(held, Tensor):
                held.fill_(value)
            else:
                group[entry] = value


def allocate_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[LocalParameter],
    shapes: Shapes,
    numbers: Mapping[str, int | float],
    zeros: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Gives a fresh optimizer the entries that the checkpoint has, for loading to fill; replaces its present state.

    zeros: keys of more entries, of their parameter's shape, that begin with 0. An entry of the parameter's shape is divided as
    the parameter is; `step` lies on the CPU unless the optimizer is fused or capturable, as in torch. Where parameters are
    DTensors to the optimizer and it keeps other shapes (rows and columns), only the optimizer knows how these are divided:
    then it makes them in a step (`materialise_optimizer_state`).
    """
    entries = entries_of((*shapes, *numbers, *zeros))
    optimizer.state.clear()
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    by_step = set()
    for local in parameters:
        whole, tensor = tuple(local.parameter.shape), local.tensor
        state: dict[str, Value] = {}
        for entry in entries.get(local.name, ()):
            key = f"{STATE_OPTIMIZER}{local.name}.{entry}"
            if key in numbers:
                state[entry] = numbers[key]
                continue
            if key in zeros:
                state[entry] = torch.zeros_like(tensor, dtype=zeros[key], requires_grad=False)
                continue
            dtype, shape = shapes[key]
            if shape == whole and shape:
                state[entry] = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
            elif shape and isinstance(tensor, DTensor):
                by_step.add(local.name)
            else:
                group = groups[id(tensor)]
                on_device = entry != "step" or group.get("fused") or group.get("capturable")
                place = tensor.device if on_device else torch.device("cpu")
                state[entry] = torch.empty(shape, dtype=dtype, device=place)
        if state:
            optimizer.state[tensor] = state
    if by_step:
        optimizer.state.clear()
        materialise_optimizer_state(optimizer, parameters, {local.name for local in parameters} & entries.keys())


def materialise_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter], names: set[str]
) -> None:
    """Gives a fresh optimizer its state entries by a step, for the parameters called `names`.

    One step with zero gradients and a learning rate of zero makes them without moving a weight. Weights are put back bit
    for bit (decoupled decay of a zero rate changes nothing, but other optimizers may differ), and what it changed in groups.
    """
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    chosen = [local for local in parameters if local.name in names]
    with torch.no_grad():
        kept = [local.tensor.detach().clone() for local in chosen]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for local in chosen:
            local.tensor.grad = torch.zeros_like(local.tensor)
        optimizer.step()
        for local, value in zip(chosen, kept):
            local.tensor.copy_(value)
            local.tensor.grad = None
    for group, values in zip(optimizer.param_groups, before):
        for entry in [k for k in group if k != "params" and k not in values]:
            del group[entry]
        group.update(values)

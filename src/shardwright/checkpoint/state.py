"""The state of training as one flat mapping that `torch.distributed.checkpoint` can reshard.

Keys are `model.<name>` and `optimizer.<name>.<entry>`, names being those of the unsplit model, values DTensors where a
parameter is sharded and plain tensors elsewhere. So every data-parallel kind and every world size reads any other's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError

STATE_MODEL, STATE_OPTIMIZER = "model.", "optimizer."


class LocalParameter(Protocol):
    """What the state needs to know of a trainable parameter (see `train.optimizer.Local`)."""

    name: str
    tensor: nn.Parameter

    def wrap(self, local: Tensor) -> Tensor:
        """The local tensor as a DTensor of the unsplit shape, where the parameter is one."""
        ...


def model_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter (frozen ones too) and persistent buffer once; tied parameters under their first name."""
    state = {name: p.detach() for name, p in module.named_parameters()}
    persistent = module.state_dict()
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {f"{STATE_MODEL}{name}": value for name, value in {**state, **buffers}.items()}


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: list[LocalParameter]) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, shards as DTensors, and every number as a 0-dim tensor (a copy).

    Parameters without state have no entries. Raises `CheckpointError` for a value that is neither.
    """
    found: dict[str, Tensor] = {}
    for local in parameters:
        for entry, value in optimizer.state.get(local.tensor, {}).items():
            key = f"{STATE_OPTIMIZER}{local.name}.{entry}"
            if isinstance(value, Tensor):
                same_shape = value.shape == local.tensor.shape and value.dim() > 0
                found[key] = local.wrap(value) if same_shape else value
            elif isinstance(value, int | float):
                found[key] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else torch.int64
                )
            elif value is not None:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {entry} of {local.name} as {type(value).__name__}.",
                    "A checkpoint holds tensors and numbers; without this value the run could not go on as it was.",
                    "Use an optimizer whose state is tensors and numbers.",
                )
    return found


def restore_numbers(
    optimizer: torch.optim.Optimizer, parameters: list[LocalParameter], state: dict[str, Tensor]
) -> None:
    """Puts the numbers of a loaded `optimizer_state` back; its tensors were filled in place."""
    for local in parameters:
        entries = optimizer.state.get(local.tensor, {})
        for entry, value in entries.items():
            if isinstance(value, int | float):
                entries[entry] = type(value)(state[f"{STATE_OPTIMIZER}{local.name}.{entry}"].item())


def materialise_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: list[LocalParameter], names: set[str]
) -> None:
    """Gives a fresh optimizer the state entries that loading will fill, for the parameters called `names`.

    Optimizers make their state in the first step: one step with zero gradients and a learning rate of zero makes it
    without moving a weight. Weights are put back bit for bit (decoupled decay of a zero rate changes nothing, but other
    optimizers may differ).
    """
    rates = [group["lr"] for group in optimizer.param_groups]
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
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate

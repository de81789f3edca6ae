"""Reading a checkpoint back into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.checkpoint import state, store


def current_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[state.LocalParameter]
) -> dict[str, Tensor]:
    """Everything of a model and its optimizer that a checkpoint holds."""
    return state.model_state(module) | state.optimizer_state(optimizer, list(parameters))


def restore(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[state.LocalParameter],
) -> None:
    """Fills weights and optimizer from the checkpoint at `path`, whatever layout wrote it; collective.

    Raises `CheckpointError` where names, shapes or dtypes differ.
    """
    own, prefix = list(parameters), state.STATE_OPTIMIZER
    stored = [key.removeprefix(prefix) for key in store.stored_keys(path) if key.startswith(prefix)]
    names = {local.name for local in own if any(key.startswith(f"{local.name}.") for key in stored)}
    state.materialise_optimizer_state(optimizer, own, names)
    found = current_state(module, optimizer, own)
    store.load(path, found)
    state.restore_numbers(optimizer, own, found)

"""Reading a checkpoint back into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoint import reader, state
from shardwright.checkpoint.parts import Value


def current_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[state.LocalParameter]
) -> dict[str, Value]:
    """Everything of a model and its optimizer that a checkpoint holds."""
    return {**state.model_state(module), **state.optimizer_values(optimizer, parameters)}


def restore(
    place: Path | reader.Source,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[state.LocalParameter],
    partial: Sequence[str] = (),
) -> list[str]:
    """Fills weights and optimizer from the checkpoint at `place`, whatever layout wrote it; collective.

    partial: patterns of names that may be missing on either side or differ; they keep their first values, and a fresh
    optimizer state. Returns the keys of this rank that were left so. Raises `CheckpointError` where names, shapes or
    dtypes differ, `DamagedCheckpointError` where a byte is not what was written.
    """
    source = reader.Directory(place) if isinstance(place, Path) else place
    index = source.index()
    shapes, own = index.shapes, list(parameters)
    fits = [
        local
        for local in own
        if shapes.get(f"{state.STATE_MODEL}{local.name}")
        == (local.parameter.dtype, tuple(local.parameter.shape))
        or not reader.covers(partial, f"{state.STATE_MODEL}{local.name}")
    ]
    state.allocate_optimizer_state(optimizer, fits, shapes, index.numbers)
    found = current_state(module, optimizer, own)
    numbers = reader.load_index(source, index, found, partial)
    state.restore_numbers(optimizer, own, numbers)
    return reader.unread(index, found)

"""Reading a checkpoint back into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoint import reader, state
from shardwright.checkpoint.other_optimizer import Fitted, OptimizerChange, fit
from shardwright.checkpoint.parts import Value


def current_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[state.LocalParameter]
) -> dict[str, Value]:
    """Everything of a model and its optimizer that a checkpoint holds."""
    return {**state.model_state(module), **state.optimizer_values(optimizer, parameters)}


@dataclass(frozen=True)
class Restored:
    """What a load did not take over as it was.

    left: keys of this rank that `partial` left as they were. fitted: what became of the optimizer's state.
    """

    left: list[str]
    fitted: Fitted


def restore(
    place: Path | reader.Source,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[state.LocalParameter],
    partial: Sequence[str] = (),
    change: OptimizerChange = "none",
) -> Restored:
    """Fills weights and optimizer from the checkpoint at `place`, whatever layout wrote it; collective.

    partial: patterns of names that may be missing on either side or differ; they keep their first values, and a fresh
    optimizer state. change: how the optimizer differs from the one that was saved, see `other_optimizer`. Raises
    `CheckpointError` where names, shapes or dtypes differ, `DamagedCheckpointError` where a byte is not what was written.
    """
    source = reader.Directory(place) if isinstance(place, Path) else place
    own = list(parameters)
    fitted = fit(source.index(), optimizer, own, change)
    index = fitted.index
    shapes = index.shapes
    fits = [
        local
        for local in own
        if shapes.get(f"{state.STATE_MODEL}{local.name}") == (local.parameter.dtype, tuple(local.parameter.shape))
        or not reader.covers(partial, f"{state.STATE_MODEL}{local.name}")
    ]
    state.allocate_optimizer_state(optimizer, fits, shapes, index.numbers, fitted.begun)
    found = current_state(module, optimizer, own)
    numbers = reader.load_index(
        source, index, {key: value for key, value in found.items() if key not in fitted.begun}, partial
    )
    state.restore_numbers(optimizer, own, numbers)
    left = [key for key in reader.unread(index, found) if key not in fitted.begun]
    return Restored(left, fitted)

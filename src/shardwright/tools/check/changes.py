"""Changes that a check makes to a run on both sides alike, so that it shows more or fits the machine. Each is said aloud."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.layout.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Changes:
    """vocabulary: ids are taken modulo this (a shrunk model), None for no change. thin: mask some labels of most rows.

    no_dropout: dropout is off, because the devices of the two sides draw other random numbers.
    """

    vocabulary: int | None = None
    thin: bool = False
    no_dropout: bool = False


def thinned(labels: Tensor, row: int) -> Tensor:
    """`labels` [T] of row `row` without the first row % 4 of every 4 but the very first: rows then differ in targets."""
    place = torch.arange(len(labels))
    return torch.where((place % 4 < row % 4) & (place > 0), IGNORE_INDEX, labels)


def has_dropout(model: nn.Module) -> bool:
    """Whether `model` drops anything in training: what `silence_dropout` would change."""
    modules = list(model.modules())
    named = (value for m in modules for name, value in vars(m).items() if "drop" in name and isinstance(value, float))
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules) or any(value > 0 for value in named)


def silence_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of `model` to 0: those of `nn.Dropout` and of attributes called so."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)

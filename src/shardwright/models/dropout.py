"""Dropout of a model: whether there is any, and how to turn it off."""

from __future__ import annotations

from torch import nn


def has_dropout(model: nn.Module) -> bool:
    """Whether `model` drops anything in training, in `nn.Dropout` or by an attribute of a module that names dropout."""
    modules = list(model.modules())
    named = (value for m in modules for name, value in vars(m).items() if "drop" in name and isinstance(value, float))
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules) or any(value > 0 for value in named)


def silence_dropout(model: nn.Module) -> None:
    """Sets every dropout probability that `has_dropout` looks at to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)

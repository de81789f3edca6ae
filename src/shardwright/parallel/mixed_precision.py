"""Compute in another dtype than the stored weights have, for modules that `fully_shard` does not manage.

`fully_shard` casts while it gathers (`MixedPrecisionPolicy.param_dtype`). Here `ddp` does the same: each read of a parameter
inside forward gives a cast of the stored parameter, through autograd, so gradients arrive in the stored dtype. Unlike
autocast, every operation of the model runs in the compute dtype, as under `fully_shard`: both kinds compute alike.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwright.mesh.shard_geometry import local_tensor
from shardwright.torch_private import own_parameters

_classes: dict[tuple[type, tuple[str, ...], torch.dtype], type] = {}


def _reader(name: str, dtype: torch.dtype) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        stored = own_parameters(module)[name]
        return None if stored is None else local_tensor(stored).to(dtype)

    return property(read)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes every module of `model` read its floating parameters in `dtype`; names and stored values stay.

    A property on a subclass made here wins over `nn.Module.__getattr__`; `_parameters`, and so `named_parameters`,
    state dicts and the optimizer, still see the stored parameter.
    """
    for module in model.modules():
        names = tuple(
            name
            for name, p in own_parameters(module).items()
            if p is not None and p.is_floating_point() and p.dtype != dtype
        )
        if not names:
            continue
        key = (type(module), names, dtype)
        if key not in _classes:
            readers = {name: _reader(name, dtype) for name in names}
            _classes[key] = type(f"{type(module).__name__}", (type(module),), readers)
        module.__class__ = _classes[key]

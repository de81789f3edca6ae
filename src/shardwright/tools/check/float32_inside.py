"""The first module of a model's blocks that computes in float32 whatever the model's dtype, as many norms do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.schema import Model
from shardwright.models import build_model, find_parts, materialise
from shardwright.models.model_parts import is_transformers
from shardwright.torch_private import TorchDispatchMode, tree_leaves

TOKENS = 4


class _Float32Finder(TorchDispatchMode):
    """Notes the class of the innermost module that is running when an operation gives float32."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        float32 = any(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result))
        if float32 and self.running and not self.found:
            self.found = type(self.running[-1]).__name__
        return result


def float32_inside(spec: Model) -> str:
    """The class of the first module inside the blocks that computes in float32 in a float64 model; empty where none does."""
    model = build_model(spec, torch.float64)
    random = spec.model_copy(update={"init": "random"})
    materialise(model, random, seed=0, device=torch.device("cpu"))
    finder = _Float32Finder()
    for name in find_parts(model).blocks:
        for module in model.get_submodule(name).modules():
            module.register_forward_pre_hook(lambda own, args: finder.running.append(own))
            module.register_forward_hook(lambda own, args, output: finder.running.pop() and None)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with torch.no_grad(), finder:
        if is_transformers(model):
            model(input_ids=ids, use_cache=False)
        else:
            model(ids)
    return finder.found

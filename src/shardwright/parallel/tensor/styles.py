"""Tensor-parallel styles of single layers, for `torch.distributed.tensor.parallel.parallelize_module`.

Parameters become DTensors on the tensor-parallel mesh. Forward works on local tensors and calls `tp_collectives` itself, so
that no operation goes through DTensor's dispatch.

B rows, T positions, D width. Weights: nn.Linear [out, in], Conv1D of Transformers [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from shardwright.backends import tp_collectives
from shardwright.backends.tp_collectives import TensorParallelGroup
from shardwright.loss.vocab_parallel_loss import check_ids
from shardwright.mesh.shard_geometry import chunk, local_tensor
from shardwright.torch_private import ParallelStyle, own_parameters

Change = Callable[[Tensor], Tensor]
Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By id of a parameter: the parameter (which must stay alive for its id), and the DTensor that replaced it."""


def features(module: nn.Module) -> tuple[int, int]:
    """(input features, output features) of a linear layer, unsplit."""
    weight = own_parameters(module)["weight"]
    assert weight is not None
    return (weight.shape[0], weight.shape[1]) if isinstance(module, Conv1D) else (weight.shape[1], weight.shape[0])


def shard_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh, replaced: Replaced) -> None:
    """Replaces a whole parameter (on meta) by a DTensor that is sharded along `dim`.

    A parameter that another module shares is replaced by the same DTensor in both, so that ties stay ties.
    """
    old = own_parameters(module)[name]
    if old is None or isinstance(old, DTensor):
        return
    if id(old) not in replaced:
        _, length = chunk(old.shape[dim], mesh.size(), mesh.get_local_rank())
        shape = (*old.shape[:dim], length, *old.shape[dim + 1 :])
        local = torch.empty(shape, dtype=old.dtype, device=old.device)
        value = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=old.shape, stride=old.stride())
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        replaced[id(old)] = (old, new)
    setattr(module, name, replaced[id(old)][1])


STYLE = "_tensor_parallel_style"
"""Attribute of a divided linear layer: its style."""


def run_with(style: Any, module: nn.Module) -> nn.Module:
    """Makes `style.run(module, x)` the forward of `module`.

    A method of the module, and not a `functools.partial`: torch.compile takes each partial for code of its own, compiles each
    block for itself, and gives up after eight blocks.
    """
    vars(module)[STYLE] = style
    module.forward = MethodType(_run_style, module)
    return module


def _run_style(module: nn.Module, x: Tensor) -> Tensor:
    return vars(module)[STYLE].run(module, x)


def local_linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x` times the local weight of a linear layer, plus `bias`."""
    weight = local_tensor(module.weight)  # type: ignore[arg-type]
    return F.linear(x, weight.t() if isinstance(module, Conv1D) else weight, bias)


def local_bias(module: nn.Module) -> Tensor | None:
    return None if module.bias is None else local_tensor(module.bias)  # type: ignore[arg-type]


@dataclass
class ColumnParallelLinear(ParallelStyle):
    """Output features are divided: weight and bias.

    entry: changes the input; None where the region around the module has changed it. leave: changes the output.
    """

    tp_group: TensorParallelGroup
    replaced: Replaced
    entry: Change | None
    leave: Change | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_parameter(module, "weight", 1 if isinstance(module, Conv1D) else 0, device_mesh, self.replaced)
        shard_parameter(module, "bias", 0, device_mesh, self.replaced)
        return run_with(self, module)

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        y = local_linear(module, x if self.entry is None else self.entry(x), local_bias(module))
        return y if self.leave is None else self.leave(y)


@dataclass
class VocabParallelHead(ColumnParallelLinear):
    """A column layer over the vocabulary whose logits stay divided: a DTensor that knows its unsplit shape."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super().apply(module, device_mesh)
        module.forward = partial(self.logits, module, device_mesh, features(module)[1])
        return module

    def logits(self, module: nn.Module, mesh: DeviceMesh, vocabulary: int, x: Tensor) -> Tensor:
        y = self.run(module, x)
        like = torch.empty(*y.shape[:-1], vocabulary, device="meta")
        return DTensor.from_local(
            y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=like.shape, stride=like.stride()
        )


@dataclass
class RowParallelLinear(ParallelStyle):
    """Input features are divided. The products are summed between ranks, then the bias, whole, is added once.

    leave: turns partial products into the output. splits: the input arrives whole and is cut here.
    """

    tp_group: TensorParallelGroup
    replaced: Replaced
    leave: Change
    splits: bool = False

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_parameter(module, "weight", 0 if isinstance(module, Conv1D) else 1, device_mesh, self.replaced)
        return run_with(self, module)

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        x = tp_collectives.scatter_to_tp(x, -1, self.tp_group) if self.splits else x
        y, bias = self.leave(local_linear(module, x, None)), local_bias(module)
        return y if bias is None else y + bias


@dataclass
class VocabParallelEmbedding(ParallelStyle):
    """An embedding whose rows are divided. A rank looks up its own rows, the other ids give zeros, and the sum is whole.

    The module's own forward runs on local rows, so that an embedding that scales its result still does.
    """

    tp_group: TensorParallelGroup
    replaced: Replaced

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        shard_parameter(module, "weight", 0, device_mesh, self.replaced)
        first, rows = chunk(module.num_embeddings, self.tp_group.size, self.tp_group.rank)
        if module.padding_idx is not None:  # that row gets no gradient, on the rank that has it
            here = first <= module.padding_idx < first + rows
            module.padding_idx = module.padding_idx - first if here else None
        module.forward = partial(self.run, module, module.forward, first, rows)  # type: ignore[method-assign]
        return module

    def run(self, module: nn.Module, look_up: Change, first: int, rows: int, input: Tensor) -> Tensor:
        parameters: dict[str, Any] = own_parameters(module)
        stored = parameters["weight"]
        check_ids(input, stored.shape[0])
        other = (input < first) | (input >= first + rows)
        parameters["weight"] = local_tensor(stored)
        try:
            found = look_up(torch.where(other, 0, input - first))
        finally:
            parameters["weight"] = stored
        return tp_collectives.reduce_from_tp(found.masked_fill(other[..., None], 0.0), self.tp_group)


def is_vocab_parallel(module: nn.Module) -> bool:
    """Whether `module` is an embedding under `VocabParallelEmbedding`."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), VocabParallelEmbedding)


def change_input(change: Change, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook (with keyword arguments) that changes a module's first input, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def change_output(change: Change, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that changes a module's output, or the first of several."""
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

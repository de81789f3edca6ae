"""Tensor-parallel styles of single layers, for `torch.distributed.tensor.parallel.parallelize_module`.

Parameters become DTensors on the tensor-parallel mesh; forward works on local parts and exchanges what it must (see
`tp_collectives.py`). B rows, T positions, D width. Weights: nn.Linear [out, in], Conv1D of Transformers [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from shardwright.backends import tp_collectives
from shardwright.backends.tp_collectives import Peers
from shardwright.loss.vocab_parallel_loss import check_ids
from shardwright.mesh.shard_geometry import chunk, local_tensor
from shardwright.torch_private import ParallelStyle, own_parameters

Entry = Callable[[Tensor], Tensor]


def fan(module: nn.Module) -> tuple[int, int]:
    """(input features, output features) of a linear layer, unsplit."""
    weight = own_parameters(module)["weight"]
    assert weight is not None
    return (weight.shape[0], weight.shape[1]) if isinstance(module, Conv1D) else (weight.shape[1], weight.shape[0])


Done = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By id of a parameter: it, and what it has become."""


def distribute(module: nn.Module, name: str, dim: int, mesh: DeviceMesh, done: Done) -> None:
    """Replaces a whole parameter (on meta) by a DTensor cut along `dim`, in pieces as `torch.chunk` makes them.

    A parameter that another module shares and that is in `done` becomes what it became there: ties stay ties.
    """
    old = own_parameters(module)[name]
    if old is None or isinstance(old, DTensor):
        return
    if id(old) not in done:
        _, length = chunk(old.shape[dim], mesh.size(), mesh.get_local_rank())
        shape = (*old.shape[:dim], length, *old.shape[dim + 1 :])
        local = torch.empty(shape, dtype=old.dtype, device=old.device)
        value = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=old.shape, stride=old.stride())
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        done[id(old)] = (old, new)
    setattr(module, name, done[id(old)][1])


def product(module: nn.Module, x: Tensor, with_bias: bool) -> Tensor:
    """`x` times the local weight of a linear layer, with its local bias or without."""
    weight = local_tensor(module.weight)  # type: ignore[arg-type]
    bias = _bias(module) if with_bias else None
    if isinstance(module, Conv1D):
        weight = weight.t()
    return F.linear(x, weight, bias)


def _bias(module: nn.Module) -> Tensor | None:
    bias = module.bias
    return None if bias is None else local_tensor(bias)  # type: ignore[arg-type]


@dataclass
class Column(ParallelStyle):
    """Output features are divided: weight and bias.

    entry: what happens to the input, None where the module around it has done that. leave: the output is made whole so.
    """

    peers: Peers
    done: Done
    entry: Entry | None
    leave: Entry | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, "weight", 1 if isinstance(module, Conv1D) else 0, device_mesh, self.done)
        distribute(module, "bias", 0, device_mesh, self.done)
        module.forward = partial(self.run, module)
        return module

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        if self.entry is not None:
            x = self.entry(x)
        y = product(module, x, with_bias=True)
        return y if self.leave is None else self.leave(y)


@dataclass
class Head(Column):
    """A column layer over the vocabulary whose logits stay divided: a DTensor that knows its unsplit shape."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super().apply(module, device_mesh)
        module.forward = partial(self.logits, module, device_mesh, fan(module)[1])
        return module

    def logits(self, module: nn.Module, mesh: DeviceMesh, vocabulary: int, x: Tensor) -> Tensor:
        y = self.run(module, x)
        shape = torch.empty(*y.shape[:-1], vocabulary, device="meta")
        return DTensor.from_local(
            y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape.shape, stride=shape.stride()
        )


@dataclass
class Row(ParallelStyle):
    """Input features are divided; the products are summed between ranks, and the bias, whole, is added once behind.

    leave: how partial products become the output. splits: the input arrives whole and is cut here.
    """

    peers: Peers
    done: Done
    leave: Entry
    splits: bool = False

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, "weight", 0 if isinstance(module, Conv1D) else 1, device_mesh, self.done)
        module.forward = partial(self.run, module)
        return module

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        if self.splits:
            x = tp_collectives.cut(x, -1, self.peers)
        y, bias = self.leave(product(module, x, with_bias=False)), _bias(module)
        return y if bias is None else y + bias


@dataclass
class Vocabulary(ParallelStyle):
    """An embedding whose rows are divided: a rank looks up its own, others give zeros, and the sum is whole.

    The module's own forward runs on local rows, so that embeddings that scale keep doing so.
    """

    peers: Peers
    done: Done

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        distribute(module, "weight", 0, device_mesh, self.done)
        first, rows = chunk(module.num_embeddings, self.peers.size, self.peers.rank)
        if module.padding_idx is not None:  # that row gets no gradient, on the rank that has it
            here = first <= module.padding_idx < first + rows
            module.padding_idx = module.padding_idx - first if here else None
        module.forward = partial(self.run, module, module.forward, first, rows)  # type: ignore[method-assign]
        return module

    def run(
        self, module: nn.Module, look_up: Callable[[Tensor], Tensor], first: int, rows: int, input: Tensor
    ) -> Tensor:
        stored: Any = own_parameters(module)["weight"]
        check_ids(input, stored.shape[0])
        other = (input < first) | (input >= first + rows)
        own_parameters(module)["weight"] = local_tensor(stored)  # type: ignore[assignment]
        try:
            found = look_up(torch.where(other, 0, input - first))
        finally:
            own_parameters(module)["weight"] = stored
        return tp_collectives.sum_out(found.masked_fill(other[..., None], 0.0), self.peers)


def divided(module: nn.Module) -> bool:
    """Whether `module` is an embedding under `Vocabulary`."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), Vocabulary)


def change_input(change: Entry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook (with keyword arguments) that puts `change` on a module's first input, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

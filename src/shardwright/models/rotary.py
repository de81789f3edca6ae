"""Rotary frequencies that depend on a document's length: decided for each document of a microbatch, not for its longest row.

Transformers chooses the frequencies of `longrope` and `dynamic` by the highest position of a whole forward, and `dynamic` keeps
them for the forwards after it. Padding, the other rows of a microbatch and the microbatches before would then change the
loss. Here every token gets the frequencies that its document has when it is run by itself.

B rows, T positions. Documents are read from the positions: each begins at position 0, and each token of padding is at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch_private import copy_module, own_buffers

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Values of `rope_type` whose frequencies follow from the length."""


def follows_length(model: nn.Module) -> bool:
    """Whether `model` has rotary frequencies that depend on the length of a document."""
    return any(map(_kinds, model.modules()))


def decide_by_document(model: nn.Module) -> None:
    """Gives each document of a forward the rotary frequencies of its own length; see the module."""
    for module in model.modules():
        if _kinds(module):
            vars(module)["forward"] = partial(_rotated, module)


@contextmanager
def shapes_alone(model: nn.Module) -> Iterator[None]:
    """Within, a forward on meta needs no positions with values: only the shapes of rotary tables are right."""
    changed = [module for module in model.modules() if _kinds(module)]
    before = [vars(module).get("forward") for module in changed]
    for module in changed:
        vars(module)["forward"] = partial(_shaped, module)
    try:
        yield
    finally:
        for module, forward in zip(changed, before):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def lengths_of(position_ids: Tensor) -> Tensor:
    """[..., T]: for each token the length of its document, of positions [..., T] that start at 0 in each."""
    begins = position_ids == 0
    begins[..., 0] = True
    document = begins.cumsum(-1) - 1
    longest = torch.zeros_like(position_ids).scatter_reduce(-1, document, position_ids, "amax")
    return longest.gather(-1, document) + 1


def _kinds(module: nn.Module) -> set[str]:
    """The kinds of length-dependent frequencies that `module` computes: nothing for any but a rotary embedding."""
    kind = vars(module).get("rope_type")
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return {k for k in kinds if k in LENGTH_DEPENDENT}


def _rotated(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """What `module` gives for `position_ids`, of each document as if it were alone.

    `module` itself stays as it was built: each of its forwards runs on a copy, which takes the state that a forward leaves.
    """
    named = {} if layer_type is None else {"layer_type": layer_type}
    kind, rope = module.rope_type, module.config.rope_parameters
    if layer_type is not None:
        kind, rope = kind[layer_type], rope[layer_type]
    if kind not in LENGTH_DEPENDENT:
        return type(module).forward(module, x, position_ids, **named)
    lengths = lengths_of(position_ids)

    def as_if(longest: int) -> Any:
        """The tables of a forward whose highest position is `longest` - 1."""
        own = copy_module(module, {name: b if b is None else b.clone() for name, b in own_buffers(module).items()})
        last = position_ids.new_full((*position_ids.shape[:-1], 1), longest - 1)
        positions = torch.cat([position_ids.clamp(max=longest - 1), last], -1)
        return _mapped(lambda table: table[..., :-1, :], type(module).forward(own, x, positions, **named))

    if kind == "longrope":
        trained = rope["original_max_position_embeddings"]
        return _mapped(
            lambda short, long: torch.where((lengths > trained).unsqueeze(-1), long, short),
            as_if(trained),
            as_if(trained + 1 + position_ids.shape[-1]),
        )
    trained = module.config.max_position_embeddings
    tables = as_if(trained)
    for length in lengths[lengths > trained].unique().tolist():
        own = (lengths == length).unsqueeze(-1)
        tables = _mapped(lambda other, table, own=own: torch.where(own, table, other), tables, as_if(length))
    return tables


def _shaped(module: Any, x: Tensor, position_ids: Tensor, *layer_type: str, **named: Any) -> Any:
    """On meta, what `module` would give; its forward runs on the CPU, on buffers of zeros."""
    buffers = own_buffers(module).items()
    own = copy_module(module, {name: b if b is None else torch.zeros_like(b, device="cpu") for name, b in buffers})
    positions = torch.zeros_like(position_ids, device="cpu")
    tables = type(module).forward(own, torch.zeros_like(x, device="cpu"), positions, *layer_type, **named)
    return _mapped(lambda table: table.to(x.device), tables)


def _mapped(function: Callable[..., Tensor], *tables: Any) -> Any:
    """`function` of each tensor of what a rotary embedding gives: (cosines, sines), or one tensor."""
    if isinstance(tables[0], tuple):
        return tuple(function(*each) for each in zip(*tables))
    return function(*tables)

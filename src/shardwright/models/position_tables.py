"""Tables that a model looks up by position, and how many positions they hold: seen in one forward on the meta device.

A learned table of positions ends, and so does a table of sines that a model made once: a longer row is an index error in the
middle of a run. Such tables are recognised by their use, not by name: in a forward, weights and activations are on meta, while
whole numbers keep their values, so that what a table is indexed with can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.models.build import RECIPES
from shardwright.models.initialization import replay
from shardwright.models.model_parts import is_transformers
from shardwright.torch_private import tree_iter, tree_map_only, view_base

_TOKENS = 5
_TOKEN = 7
_CREATE = (
    torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.ones_like, torch.zeros_like,
    torch.full_like, torch.tril_indices, torch.triu_indices,
)  # fmt: skip


@dataclass(frozen=True)
class PositionTable:
    """A table that is indexed by positions: its name in the model, and how many positions it has, of the first 0."""

    name: str
    positions: int


def position_tables(model: nn.Module, **given: Any) -> tuple[PositionTable, ...]:
    """The tables of `model` (on meta, see `build_model`) that positions index; it stays as it is.

    given: arguments of its forward beside the ids. Where the forward cannot be run to its end on meta, those that were looked
    up until then.
    """
    tensors = {name: _stand_in(t) for name, t in model.named_parameters()}
    tensors |= {name: _buffer(model, name, b) for name, b in model.named_buffers()}
    indexed = _Indexed({id(t): name for name, t in tensors.items()})
    ids = torch.full((1, _TOKENS), _TOKEN)
    arguments = {**({"use_cache": False} if is_transformers(model) else {}), **given}
    # whatever a model's code may raise on tensors without values
    with suppress(Exception), torch.no_grad(), indexed:
        torch.func.functional_call(model, tensors, (ids,), arguments)
    found: dict[str, int] = {}
    for name, positions in indexed.found:
        found[name] = min(positions, found.get(name, positions))
    return tuple(PositionTable(*item) for item in found.items())


def numbers_from_elsewhere(model: nn.Module) -> str:
    """The table in which `model`, without given positions, begins elsewhere than at position 0; empty without such a table."""
    own = {table.name: table.positions for table in position_tables(model)}
    given = position_tables(model, position_ids=torch.arange(_TOKENS).unsqueeze(0))
    return next((t.name for t in given if own.get(t.name, t.positions) != t.positions), "")


def _stand_in(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, device="meta", dtype=dtype)


def _buffer(model: nn.Module, name: str, buffer: Tensor) -> Tensor:
    """The buffer as the forward is given it: whole numbers with their values, all else without."""
    path, _, leaf = name.rpartition(".")
    recipe = vars(model.get_submodule(path)).get(RECIPES, {}).get(leaf)
    if buffer.is_floating_point() or buffer.is_complex() or recipe is None or buffer.dtype == torch.bool:
        return _stand_in(buffer) if buffer.is_floating_point() else torch.empty_like(buffer, device="meta")
    return replay(recipe, 0, unset=0).to(buffer.dtype)


class _Indexed(TorchFunctionMode):
    """Notes lookups by position in tensors of the model. Everything made in it stays on the CPU, with its values.

    names: of the model's tensors, by identity. found: (name, positions that it holds).
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.found = names, list[tuple[str, int]]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        self.found += self._looked_up(func, args, given)
        if func in _CREATE and _is_meta(given.get("device")):
            given["device"] = "cpu"
        elif func in (Tensor.to, Tensor.cuda, Tensor.cpu) and isinstance(args[0], Tensor):
            own = args[0].device
            args = tuple(own if isinstance(a, (str, torch.device)) else _same(a, own) for a in args)
            if "device" in given:
                given["device"] = own
        elif any(isinstance(t, Tensor) and t.is_meta for t in tree_iter((args, given))):
            args, given = tree_map_only(Tensor, lambda t: t.to("meta"), (args, given))
        return func(*args, **given)

    def _looked_up(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Iterator[tuple[str, int]]:
        name = getattr(func, "__name__", "")
        if name == "embedding":
            index, table = (*args, given.get("weight"))[:2]
            if not isinstance(table, Tensor):
                index, table = table, index
            yield from self._by_index(table, 0, index)
        elif name in ("index_select", "gather") and len(args) > 2:
            yield from self._by_index(args[0], args[1], args[2])
        elif name == "__getitem__":
            asked = args[1] if isinstance(args[1], tuple) else (args[1],)
            for dim, part in enumerate(asked):
                if part is Ellipsis or part is None:
                    break
                if isinstance(part, slice):
                    yield from self._by_slice(args[0], dim, part)
                elif isinstance(part, Tensor):
                    yield from self._by_index(args[0], dim, part)

    def _by_index(self, table: Any, dim: int, index: Any) -> Iterator[tuple[str, int]]:
        """A table of the model that is indexed by numbers that rise by one from token to token."""
        name = self._name(table)
        if not name or not isinstance(index, Tensor) or index.is_meta or index.is_floating_point():
            return
        for axis in range(index.dim()):
            steps = index.diff(dim=axis)
            if index.shape[axis] == _TOKENS and bool((steps == 1).all()):
                yield name, table.shape[dim] - int(index.min())

    def _by_slice(self, table: Any, dim: int, part: slice) -> Iterator[tuple[str, int]]:
        """A table of the model of which the first positions are taken, as many as there are tokens."""
        name = self._name(table)
        if name and part.stop == _TOKENS and not part.start and table.dim() > dim:
            yield name, table.shape[dim]

    def _name(self, table: Any) -> str:
        if not isinstance(table, Tensor):
            return ""
        return self.names.get(id(table)) or self.names.get(id(view_base(table)), "")


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _same(value: Any, device: torch.device) -> Any:
    """`value` as an argument of `to`: a tensor of another device stands for its dtype."""
    return value.dtype if isinstance(value, Tensor) and value.device != device else value

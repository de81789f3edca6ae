"""What of the optimizer state in a checkpoint the optimizer of this run goes on with, where the two are not the same.

State is compared entry by entry. What this run does not keep is dropped, and what the checkpoint lacks starts fresh.
Nothing is taken over between optimizers of two classes: entries of one name need not mean the same thing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shardwright.checkpoint.files import Index
from shardwright.checkpoint.multi_host.hosts import everyone
from shardwright.checkpoint.state import (
    STATE_GROUP,
    STATE_OPTIMIZER,
    LocalParameter,
    materialise_optimizer_state,
    named,
)

OptimizerChange = Literal["none", "options", "class"]
"""How the optimizer of this run differs from the one that was saved: not, by its arguments, or by its class."""
Entries = dict[str, dict[str, torch.dtype | None]]
"""Parameter -> entries of its state, and the dtype of those that are tensors of the parameter's shape."""


@dataclass(frozen=True)
class Fitted:
    """An index without the entries that this run does not keep. begun: keys missing for a parameter that has others.

    dropped, fresh: entries of state, and of how many parameters; equal on all ranks.
    """

    index: Index
    begun: dict[str, torch.dtype]
    dropped: Counter[str]
    fresh: Counter[str]

    def lines(self, name: str) -> list[str]:
        """Lines about entries that are dropped or start fresh. name: of the checkpoint."""
        found = []
        if self.dropped:
            found.append(f"Optimizer state of {name} that this run drops: {_counted(self.dropped)}.")
        if self.fresh:
            found.append(f"Optimizer state that starts fresh: {_counted(self.fresh)}.")
        return found


def fit(
    index: Index,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[LocalParameter],
    change: OptimizerChange,
) -> Fitted:
    """What of `index` the parameters that are trained here go on with; collective. Leaves `optimizer` without state."""
    own: Entries = {p.name: {} for p in parameters}
    if change != "none":
        own = expected_entries(optimizer, parameters)
    trained: Entries = {name: entries for part in everyone(own) for name, entries in part.items()}
    stored = _stored(index)
    kept: set[str] = set()
    begun: dict[str, torch.dtype] = {}
    dropped: Counter[str] = Counter()
    fresh: Counter[str] = Counter()
    for name in stored.keys() | trained.keys():
        there, here = stored.get(name, set()), trained.get(name, {})
        going_on = _going_on(there, here, change) if name in trained else set()
        dropped.update(there - going_on)
        fresh.update(here.keys() - going_on)
        kept |= {f"{STATE_OPTIMIZER}{name}.{entry}" for entry in going_on}
        for entry, dtype in here.items():
            if going_on and entry not in going_on and dtype is not None:
                begun[f"{STATE_OPTIMIZER}{name}.{entry}"] = dtype

    def stays(key: str) -> bool:
        if key.startswith(STATE_GROUP):
            return change != "class" and named(key, STATE_GROUP)[0] in trained
        return not key.startswith(STATE_OPTIMIZER) or key in kept

    tensors = {key: value for key, value in index.tensors.items() if stays(key)}
    numbers = {key: value for key, value in index.numbers.items() if stays(key)}
    return Fitted(replace(index, tensors=tensors, numbers=numbers), begun, dropped, fresh)


def _going_on(there: set[str], here: dict[str, torch.dtype | None], change: OptimizerChange) -> set[str]:
    """Which entries of a parameter's state stay; all or none where an entry without the shape of the parameter is missing."""
    if change == "none":
        return there
    missing = here.keys() - there
    return set() if change == "class" or any(here[entry] is None for entry in missing) else there & here.keys()


def _stored(index: Index) -> dict[str, set[str]]:
    """The entries of each parameter's state."""
    found: dict[str, set[str]] = {}
    for key in (*index.tensors, *index.numbers):
        if key.startswith(STATE_OPTIMIZER):
            name, entry = named(key, STATE_OPTIMIZER)
            found.setdefault(name, set()).add(entry)
    return found


def expected_entries(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]) -> Entries:
    """The entries that `optimizer` keeps, seen in a step of one parameter for each (group, shape, dtype); no state stays."""
    groups = {id(tensor): number for number, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    kinds = {p.name: (groups[id(p.tensor)], tuple(p.parameter.shape), p.parameter.dtype) for p in parameters}
    first = {kinds[p.name]: p for p in reversed(parameters)}
    optimizer.state.clear()
    materialise_optimizer_state(optimizer, parameters, {p.name for p in first.values()})
    seen = {
        kind: {
            entry: value.dtype
            if isinstance(value, Tensor) and value.shape == p.tensor.shape and value.dim() > 0
            else None
            for entry, value in optimizer.state.get(p.tensor, {}).items()
            if value is not None
        }
        for kind, p in first.items()
    }
    optimizer.state.clear()
    return {name: seen[kind] for name, kind in kinds.items()}


def _counted(entries: Counter[str]) -> str:
    by_count: dict[int, list[str]] = {}
    for entry, count in sorted(entries.items()):
        by_count.setdefault(count, []).append(entry)
    return "; ".join(
        f"{', '.join(names)} of {count} parameter{'s' if count > 1 else ''}" for count, names in by_count.items()
    )

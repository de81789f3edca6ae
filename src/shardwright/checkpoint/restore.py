"""Reading a checkpoint back into a model and its optimizer, also where the optimizer is another than the one that was saved.

Optimizer state is compared entry by entry. What this run does not keep is dropped, and what the checkpoint lacks starts fresh.
Nothing is taken over between optimizers of two classes: entries of one name need not mean the same thing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from shardwright.checkpoint import reader, state
from shardwright.checkpoint.index import Index
from shardwright.checkpoint.parts import Value
from shardwright.checkpoint.state import STATE_GROUP, STATE_MODEL, STATE_OPTIMIZER, LocalParameter, split_key
from shardwright.mesh.object_collectives import gather_objects

OptimizerChange = Literal["none", "options", "class"]
"""How the optimizer of this run differs from the one that was saved: not, by its arguments, or by its class."""
Entries = dict[str, dict[str, torch.dtype | None]]
"""Parameter -> entries of its state, and the dtype of those that are tensors of the parameter's shape."""


def current_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]
) -> dict[str, Value]:
    """The state of a model and its optimizer that a checkpoint holds."""
    return {**state.model_state(module), **state.optimizer_values(optimizer, parameters)}


def restore(
    place: Path | reader.CheckpointSource,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[LocalParameter],
    partial: Sequence[str] = (),
    change: OptimizerChange = "none",
) -> tuple[list[str], OptimizerMatch]:
    """Fills weights and optimizer from the checkpoint at `place`, whatever layout wrote it; collective.

    Returns the keys of this rank that `partial` left as they were, and what became of the optimizer's state. partial: patterns
    of names that may be missing on either side or differ; they keep their first values, and a fresh optimizer state. Raises
    `CheckpointError` where names, shapes or dtypes differ, `DamagedCheckpointError` where a byte is not what was written.
    """
    source = reader.SharedCheckpoint(place) if isinstance(place, Path) else place
    own = list(parameters)
    match = match_optimizer_state(source.index(), optimizer, own, change)
    shapes = match.index.shapes
    fits = [
        p
        for p in own
        if shapes.get(f"{STATE_MODEL}{p.name}") == (p.parameter.dtype, tuple(p.parameter.shape))
        or not reader.covers(partial, f"{STATE_MODEL}{p.name}")
    ]
    state.allocate_optimizer_state(optimizer, fits, shapes, match.index.numbers, match.zeros)
    found = {k: value for k, value in current_state(module, optimizer, own).items() if k not in match.zeros}
    numbers = reader.load(source, found, partial, match.index)
    state.restore_numbers(optimizer, own, numbers)
    return reader.unread(match.index, found), match


@dataclass(frozen=True)
class OptimizerMatch:
    """The optimizer state of a checkpoint against the state that this run's optimizer keeps."""

    index: Index
    """The checkpoint's, without the entries that this run does not keep."""
    zeros: dict[str, torch.dtype]
    """Keys that the checkpoint lacks for a parameter of which it has other entries: they start from zeros of this dtype."""
    dropped: Counter[str]
    """Entry -> number of parameters whose entry this run does not keep; equal on all ranks."""
    fresh: Counter[str]
    """Entry -> number of parameters whose entry starts fresh; equal on all ranks."""

    def lines(self, name: str) -> list[str]:
        """Lines about entries that are dropped or start fresh. name: of the checkpoint."""
        return [
            f"{text}: {_counted(entries)}."
            for text, entries in (
                (f"Optimizer state of {name} that this run drops", self.dropped),
                ("Optimizer state that starts fresh", self.fresh),
            )
            if entries
        ]


def match_optimizer_state(
    index: Index, optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter], change: OptimizerChange
) -> OptimizerMatch:
    """Which optimizer state of `index` this run resumes with; collective. Leaves `optimizer` without state."""
    own: Entries = {p.name: {} for p in parameters}
    if change != "none":
        own = expected_entries(optimizer, parameters)
    trained: Entries = {name: entries for part in gather_objects(own) for name, entries in part.items()}
    stored = state.entries_of((*index.tensors, *index.numbers))
    match = OptimizerMatch(index, {}, Counter(), Counter())
    kept: set[str] = set()
    for name in stored.keys() | trained.keys():
        there, here = set(stored.get(name, ())), trained.get(name, {})
        resumed = _resumed(there, here, change) if name in trained else set()
        match.dropped.update(there - resumed)
        match.fresh.update(here.keys() - resumed)
        kept |= {f"{STATE_OPTIMIZER}{name}.{entry}" for entry in resumed}
        for entry, dtype in here.items():
            if resumed and entry not in resumed and dtype is not None:
                match.zeros[f"{STATE_OPTIMIZER}{name}.{entry}"] = dtype

    def stays(key: str) -> bool:
        if key.startswith(STATE_GROUP):
            return change != "class" and split_key(key, STATE_GROUP)[0] in trained
        return not key.startswith(STATE_OPTIMIZER) or key in kept

    tensors = {key: value for key, value in index.tensors.items() if stays(key)}
    numbers = {key: value for key, value in index.numbers.items() if stays(key)}
    return replace(match, index=replace(index, tensors=tensors, numbers=numbers))


def _resumed(there: set[str], here: dict[str, torch.dtype | None], change: OptimizerChange) -> set[str]:
    """The entries of a parameter's state that stay; none where the checkpoint lacks an entry without the parameter's shape."""
    if change == "none":
        return there
    missing = here.keys() - there
    return set() if change == "class" or any(here[entry] is None for entry in missing) else there & here.keys()


def expected_entries(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]) -> Entries:
    """The entries that `optimizer` keeps, seen in a step of one parameter for each (group, shape, dtype); no state stays."""
    groups = {id(tensor): number for number, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    kinds = {p.name: (groups[id(p.tensor)], tuple(p.parameter.shape), p.parameter.dtype) for p in parameters}
    first = {kinds[p.name]: p for p in reversed(parameters)}
    optimizer.state.clear()
    state.materialise_optimizer_state(optimizer, parameters, {p.name for p in first.values()})
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

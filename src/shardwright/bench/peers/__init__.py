"""Other people's programs for the same model, rows and objective, each in a module of its own; skipped where not installed.

A peer is told nothing of our engine: it gets the model with our first values, and the same microbatches. It computes the
same loss, a sum over the targets of the update divided once, in whatever way its own interface reaches that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwright.bench.own import Counted
from shardwright.config.schema import RunFile
from shardwright.data.loader import UpdateBatch
from shardwright.layout.axes import Axes
from shardwright.measure import clock
from shardwright.models.build import build_model
from shardwright.models.materialise import materialise
from shardwright.parallel.apply import DTYPES
from shardwright.train.run_data import open_data

UpdateLoop = Callable[[UpdateBatch], float]
"""One update of the microbatches given; the loss per target of the whole update."""


class PeerModule(Protocol):
    """What a module of this package offers. KINDS: data-parallel kinds that the program has, as ours are called."""

    KINDS: tuple[str, ...]

    def make(self, run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop: ...


MODULES = {
    "torch": ("bare", ()),
    "accelerate": ("accelerate_ddp", ("accelerate",)),
    "deepspeed": ("deepspeed_zero", ("deepspeed",)),
    "trainer": ("trainer", ("transformers", "accelerate")),
}
"""Program -> (module, packages that it needs)."""


def _module(program: str) -> Any:
    return importlib.import_module(f"{__name__}.{MODULES[program][0]}")


def possible_peers(kinds: list[str]) -> tuple[list[str], list[str]]:
    """(names of the peers for these data-parallel kinds, lines that say which programs are left out and why)."""
    names, lines = [], []
    for program, (_, packages) in MODULES.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            lines.append(f"{program} left out: {', '.join(missing)} is not installed.")
            continue
        names += [f"{program} {kind}" for kind in _module(program).KINDS if kind in kinds]
    return names, lines


@dataclass
class Peer:
    """One peer that takes turns."""

    name: str
    update: UpdateLoop
    batches: Iterator[UpdateBatch]
    counted: Counted = field(default_factory=Counted)
    loss: float | None = None

    def turn(self) -> float:
        """One update; the seconds that it waited for data."""
        start = clock.now()
        batch = next(self.batches)
        waited = clock.now() - start
        self.counted.add(batch)
        self.loss = self.update(batch)
        return waited


def make_peer(name: str, run: RunFile, device: torch.device) -> Peer:
    """The peer `name` (of `possible_peers`), after as many updates as our layouts have done. Collective."""
    program, _, kind = name.partition(" ")
    model = build_model(run.model, DTYPES[run.precision.master_dtype])
    materialise(model, run.model, seed=run.training.seed, device=device)
    model.train()
    axes = Axes(dp_replicate=dist.get_world_size())
    data = open_data(run, axes, dist.get_rank())
    update = _module(program).make(run, kind, model, device)
    peer = Peer(name, update, data.updates_from(0, device))
    from shardwright.bench.own import MEMORY_UPDATES

    for _ in range(MEMORY_UPDATES + 1):
        peer.turn()
    return peer

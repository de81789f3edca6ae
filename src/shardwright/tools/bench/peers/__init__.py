"""Peers: other training programs on the same model, rows and objective, a module each; left out where not installed.

A peer gets the model with our initial values and the same microbatches, and nothing of our engine. It computes the same loss, a
sum over the targets of the update divided once, through its own interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwright.config.schema import RunFile, Training
from shardwright.data.loader import UpdateBatch
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.layout.loss import CROSS_ENTROPY
from shardwright.measure import clock
from shardwright.models.build import build_model
from shardwright.models.materialise import materialise
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.tools.bench.layout_loop import MEMORY_UPDATES, CountedBatches
from shardwright.train.run_data import open_data

UpdateLoop = Callable[[UpdateBatch], float]
"""One update of the microbatches given; the loss per target of the whole update."""


class PeerModule(Protocol):
    """What a module of this package offers. KINDS: the data-parallel kinds that the program has, under our names."""

    KINDS: tuple[str, ...]

    def make(self, run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop: ...


MODULES = {
    "torch": ("bare", ()),
    "accelerate": ("accelerate_ddp", ("accelerate",)),
    "deepspeed": ("deepspeed_zero", ("deepspeed",)),
    "trainer": ("trainer", ("transformers", "accelerate")),
}
"""Program -> (module, packages that it needs)."""


def _module(program: str) -> PeerModule:
    module: Any = importlib.import_module(f"{__name__}.{MODULES[program][0]}")
    return module


def check_peers(run: RunFile) -> None:
    """Raises `ConfigError` for a run whose objective other programs cannot be given.

    They get padded microbatches, our first values, and AdamW with its usual arguments.
    """
    t = run.training
    wrong = {
        f"data.batching {run.data.batching}": run.data.batching != "pad",
        f"the model function {run.model.model_name_or_path}": ":" in run.model.model_name_or_path
        and not Path(run.model.model_name_or_path).exists(),
        f"training.optimizer {t.optimizer}": t.optimizer != "adamw",
        "training.optimizer_kwargs": bool(t.optimizer_kwargs),
        "training.no_decay": t.weight_decay > 0 and t.no_decay != Training.model_fields["no_decay"].default,
        f"training.loss {t.loss}": t.loss != CROSS_ENTROPY,
        f"precision.master_dtype {run.precision.master_dtype}": run.precision.master_dtype != "fp32",
    }
    if found := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(
            f"--vs peers cannot be run with {', '.join(found)}.",
            "Other programs are given the same padded microbatches, cross entropy, and AdamW over float32 weights.",
            "Leave --vs out, or remove these keys from the run.",
        )


def possible_peers(layouts: list[str]) -> tuple[list[str], list[str]]:
    """(names of the peers for these layouts, lines about programs and layouts that are left out, with the reason).

    Raises `ConfigError` where no layout has a peer.
    """
    names, lines = [], []
    for program, (_, packages) in MODULES.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            lines.append(f"{program} left out: {', '.join(missing)} is not installed.")
            continue
        names += [f"{program} {kind}" for kind in _module(program).KINDS if kind in layouts]
    alone = [layout for layout in layouts if layout not in map(kind_of_peer, names)]
    if not names:
        raise ConfigError(
            f"--vs peers: no peer for {', '.join(alone)}.",
            "Other programs run ddp, zero1, zero2 and zero3, where they are installed.",
            "Name one of these layouts in --layouts, or leave --vs out.",
        )
    if alone:
        lines.append(f"No peer for {', '.join(alone)}.")
    return names, lines


def kind_of_peer(name: str) -> str:
    """The data-parallel kind of a peer of `possible_peers`."""
    return name.partition(" ")[2]


@dataclass
class PeerLoop:
    """The training loop of one peer."""

    name: str
    train: UpdateLoop
    batches: Iterator[UpdateBatch]
    counted: CountedBatches = field(default_factory=CountedBatches)
    loss: float | None = None

    def update(self) -> float:
        """Does one update; returns the seconds that it waited for data."""
        start = clock.now()
        batch = next(self.batches)
        waited = clock.now() - start
        self.counted.batches.append(batch)
        self.loss = self.train(batch)
        return waited


def make_peer(name: str, run: RunFile, device: torch.device) -> PeerLoop:
    """The peer `name` (of `possible_peers`), after as many updates as our layouts have done. Collective."""
    program, _, kind = name.partition(" ")
    model = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
    materialise(model, run.model, seed=run.training.seed, device=device)
    model.train()
    axes = Axes(dp_replicate=dist.get_world_size())
    data = open_data(run, axes, dist.get_rank())
    train = _module(program).make(run, kind, model, device)
    peer = PeerLoop(name, train, data.updates_from(0, device))
    for _ in range(MEMORY_UPDATES + 1):
        peer.update()
    return peer

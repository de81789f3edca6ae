"""A made-up run, written as the records of a reference and of a candidate with a fault: numbers without a model.

Gradients of microbatches are drawn at random; clipping, AdamW and SGD are written out here, in float64, so that what
`check` says of the records is held against arithmetic that shares no code with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.layout.axes import Axes
from shardwright.tools.check.compare import compare_records
from shardwright.tools.check.diagnose import Finding, explain
from shardwright.tools.check.record import MicrobatchNote, Notes, Record, Scalars
from shardwright.tools.check.tolerance import Tolerance, float64_tolerance

SHAPES = {
    "embed.weight": (10, 4),
    "blocks.0.w": (6, 4),
    "blocks.0.norm": (4,),
    "blocks.1.w": (6, 4),
    "blocks.1.norm": (4,),
    "gate": (1, 4),
    "head.weight": (10, 4),
}
COUNTS = (7, 3, 5, 2, 9, 4)  # targets of the microbatches: 3 on each of 2 data ranks, 30 in all
DATA_RANKS, ROUNDS, UPDATES = 2, 3, 3
TOTAL = sum(COUNTS)
RATE, DECAY, BETA1, BETA2, EPSILON, LIMIT = 1e-3, 0.1, 0.9, 0.99, 1e-8, 0.05
RATES = (1e-3, 9e-4, 7e-4, 4e-4, 3e-4, 2e-4, 1e-4, 5e-5)

Gradients = dict[str, Tensor]


@dataclass
class World:
    """The drawn numbers: `parts[update][microbatch]` are gradients of loss sums, `losses` the sums."""

    start: Gradients
    parts: list[list[Gradients]]
    losses: list[list[float]]
    optimizer: str = "adamw"

    @staticmethod
    def draw(seed: int = 0, optimizer: str = "adamw") -> World:
        generator = torch.Generator().manual_seed(seed)

        def tensors() -> Gradients:
            return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

        parts = [[tensors() for _ in COUNTS] for _ in range(UPDATES)]
        losses = [[float(torch.rand((), generator=generator)) * 3 * c for c in COUNTS] for _ in range(UPDATES)]
        return World(tensors(), parts, losses, optimizer)

    def gradient(self, update: int) -> Gradients:
        """The right gradient of an update (0-based): the sum over microbatches, divided once."""
        return {n: sum(part[n] for part in self.parts[update]) / TOTAL for n in SHAPES}  # type: ignore[misc]


@dataclass
class Fault:
    """What goes wrong in a candidate; the defaults are right. Functions get the update (0-based) first."""

    start: Callable[[Gradients], Gradients] = lambda start: start
    gradient: Callable[[int, World], Gradients] = lambda update, world: world.gradient(update)
    keep_gradient: bool = False
    loss: Callable[[int, World], float] = lambda update, world: sum(world.losses[update]) / TOTAL
    targets: Callable[[int], int] = lambda update: TOTAL
    norm: Callable[[float, Gradients], float] = lambda norm, gradient: norm
    reported_norm: Callable[[float, float], float] = lambda norm, coefficient: norm
    coefficient: Callable[[float], float] = lambda coefficient: coefficient
    rate: Callable[[int], float] = lambda update: RATES[update]
    reported_rate: Callable[[int], float] | None = None
    decay: Callable[[str], float] = lambda name: DECAY if len(SHAPES[name]) > 1 else 0.0
    decay_in_gradient: bool = False
    reset_state: bool = False
    moves: Callable[[str], bool] = lambda name: True
    local_norms: tuple[float, ...] = ()
    rows: Callable[[int], tuple[int, ...]] = lambda index: (2 * index, 2 * index + 1)
    rename: dict[str, str] = field(default_factory=dict)
    replica_gap: float = 0.0


def notes(world: World, **changes: Any) -> Notes:
    """What a reference would note of `world`."""
    values: dict[str, Any] = {
        "names": tuple(SHAPES),
        "optimizer": world.optimizer,
        "weight_decay": DECAY,
        "adam": {"beta1": BETA1, "beta2": BETA2, "epsilon": EPSILON},
        "momentum": 0.0,
        "no_decay": tuple(n for n, s in SHAPES.items() if len(s) < 2),
        "frozen": (),
        "tied": (),
        "blocks": ("blocks.0", "blocks.1"),
        "microbatch_targets": COUNTS,
        "microbatch_divisors": tuple(map(float, COUNTS)),
        "microbatch_loss_sums": tuple(world.losses[0]),
        "other_counts": {"positions": 48, "tokens": 36},
        "other_losses": {"shifted again": 1.125, "not shifted": 1.75},
        "learning_rates": RATES,
    }
    return Notes(**{**values, **changes})


def write(directory: Path, world: World, fault: Fault, written: Notes | None = None) -> Record:
    """The record of UPDATES updates of `world` under `fault`; with `written`, that of the reference."""
    record = Record(directory)
    p = {n: t.clone() for n, t in fault.start({n: t.clone() for n, t in world.start.items()}).items()}
    m, v = ({n: torch.zeros_like(t) for n, t in p.items()} for _ in range(2))
    left: Gradients = {}

    def put(update: int, kind: str, tensors: Gradients) -> None:
        record.write_tensors(update, kind, {fault.rename.get(n, n): t.clone() for n, t in tensors.items()})

    put(0, "param", p)
    for update in range(UPDATES):
        g = {n: t + left.get(n, 0.0) for n, t in fault.gradient(update, world).items()}
        true_norm = sum(t.square().sum().item() for t in g.values()) ** 0.5
        norm = fault.norm(true_norm, g)
        c = fault.coefficient(min(1.0, LIMIT / (norm + 1e-6)))
        put(update + 1, "grad", g)
        used = {n: t * c for n, t in g.items()}
        left = used if fault.keep_gradient else {}
        rate = fault.rate(update)
        if fault.reset_state:
            m, v = ({n: torch.zeros_like(t) for n, t in p.items()} for _ in range(2))
        for n in p:
            decay = fault.decay(n)
            step = used[n] + (decay * p[n] if fault.decay_in_gradient else 0.0)
            if world.optimizer == "sgd":
                moved = p[n] - rate * (step + (0.0 if fault.decay_in_gradient else decay * p[n]))
            else:
                m[n] = BETA1 * m[n] + (1 - BETA1) * step
                v[n] = BETA2 * v[n] + (1 - BETA2) * step * step
                count = 1 if fault.reset_state else update + 1
                mean, square = m[n] / (1 - BETA1**count), v[n] / (1 - BETA2**count)
                moved = p[n] * (1 if fault.decay_in_gradient else 1 - rate * decay) - rate * mean / (
                    square.sqrt() + EPSILON
                )
            p[n] = moved if fault.moves(n) else p[n]
        put(update + 1, "param", p)
        if world.optimizer == "adamw":
            put(update + 1, "exp_avg", m)
            put(update + 1, "exp_avg_sq", v)
        rank = 0 if written else 1
        microbatches = tuple(MicrobatchNote(i % DATA_RANKS * rank, i, fault.rows(i), n) for i, n in enumerate(COUNTS))
        record.write_scalars(
            update + 1,
            Scalars(
                target_tokens=fault.targets(update),
                loss=fault.loss(update, world),
                grad_norm=fault.reported_norm(norm, c),
                clip_coefficient=c,
                learning_rate=(fault.reported_rate or fault.rate)(update),
                microbatches=microbatches,
                local_norms=fault.local_norms,
                replica_gap=fault.replica_gap,
                replica_name="blocks.0.w" if fault.replica_gap else "",
            ),
        )
    if written is not None:
        record.write_notes(written)
        record.write_probe(dict(enumerate(world.parts[0])))
    return record


def judge(
    directory: Path,
    fault: Fault,
    world: World | None = None,
    tolerance: Tolerance | None = None,
    axes: Axes | None = None,
    **changed_notes: Any,
) -> Finding | None:
    """What `check` finds in a candidate with `fault`; None when it passes. By default 2 ranks that shard."""
    world, tolerance = world or World.draw(), tolerance or float64_tolerance()
    reference = write(directory / "reference", world, Fault(), notes(world, **changed_notes))
    candidate = write(directory / "candidate", world, fault)
    comparison = compare_records(reference, candidate, tolerance)
    if comparison.passed:
        return None
    return explain(reference, candidate, comparison, tolerance, axes or Axes(dp_shard=DATA_RANKS))

"""Your own model, loss and loop on any layout; here a network that learns the product of two numbers.

    python examples/custom_loop.py
    torchrun --nproc-per-node 2 examples/custom_loop.py zero3
    torchrun --nproc-per-node 4 examples/custom_loop.py zero2+tp2

All three print the same losses: the layout is no part of the objective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import api

ROWS, ROWS_IN_MICROBATCH, UPDATES = 32, 4, 40
TP_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # used where the layout has tpN


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Product(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.last = nn.Linear(width, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.first(pairs)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def make_model() -> nn.Module:
    return Product()


def loss_sum(model: Callable[..., Any], microbatch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum over targets, not the mean: the engine divides once, by the targets of the whole update."""
    pairs, wanted = microbatch
    known = ~wanted.isnan()
    error = torch.where(known, model(pairs)[:, 0] - wanted.nan_to_num(), 0.0)
    return error.abs().sum()


def rows_of(update: int) -> tuple[Tensor, Tensor]:
    """All rows of an update, equal on every rank. A third of the products is missing: microbatches differ in targets."""
    g = torch.Generator().manual_seed(update)
    pairs = 2 * torch.rand(ROWS, 2, generator=g) - 1
    wanted = pairs.prod(dim=1)
    wanted[torch.rand(ROWS, generator=g) < 1 / 3] = float("nan")
    return pairs, wanted


def main() -> None:
    layout = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    options = {}
    if "tp" in layout:  # there are no sequences here
        options = {"parallelism__tp_plan": TP_PLAN, "parallelism__sequence_parallel": False}
    with api.connect() as connection:
        engine = api.Engine(
            make_model,
            loss_sum,
            layout=layout,
            updates=UPDATES,
            device=connection.device,
            training__learning_rate=3e-3,
            training__max_grad_norm=1.0,
            **options,
        )
        for update in range(UPDATES):
            pairs, wanted = (rows.to(connection.device) for rows in rows_of(update))
            cut = list(zip(pairs.split(ROWS_IN_MICROBATCH), wanted.split(ROWS_IN_MICROBATCH)))
            own = cut[engine.data_rank :: engine.data_ranks]
            targets = engine.total(sum(int((~y.isnan()).sum()) for _, y in own))
            engine.forward_backward(own, targets)
            result = engine.step()
            if connection.rank_info.rank == 0 and (update + 1) % 10 == 0:
                print(f"update {update + 1}: loss {result.loss:.5f}, gradient norm {result.grad_norm:.4f}")


if __name__ == "__main__":
    main()

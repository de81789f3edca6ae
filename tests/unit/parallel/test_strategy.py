"""What all strategies share: the order of an update, and which rank counts a tied parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.parallel.strategy import DataParallel, Microbatches, Ties


class Noted(DataParallel):
    """Writes down what is called."""

    def __init__(self) -> None:
        self.module, self.calls = nn.Linear(1, 1), list[str]()
        self.finishers = (lambda: self.calls.append("first"), lambda: self.calls.append("second"))

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self.calls.append(f"last={last}")
        yield
        self.calls.append("end")

    def reduce_gradients(self) -> None:
        self.calls.append("reduce")

    def release(self) -> None:
        self.calls.append("release")


def test_each_microbatch_is_seeded_and_the_last_one_is_told() -> None:
    """Reductions of the data ranks are complete before other axes sum."""
    strategy = Noted()

    def loss(k: int) -> torch.Tensor:
        strategy.calls.append(f"loss {k}")
        return strategy(torch.ones(1)).sum()

    batch = Microbatches(
        count=2,
        inputs=lambda k: (torch.zeros(1, 1), {}),
        before_forward=lambda k, stage: strategy.calls.append(f"seed {k} {stage}"),
        announce=lambda k: None,
        loss=lambda output, k: output,
        loss_of_model=loss,
    )
    strategy.forward_backward(batch)
    strategy.finish_gradients()
    assert strategy.calls == [
        *("seed 0 0", "last=False", "loss 0", "end"),
        *("seed 1 0", "last=True", "loss 1", "end"),
        *("reduce", "first", "second"),
    ]
    assert strategy.module.weight.grad is not None and strategy.module.weight.grad.item() == 2.0


def test_the_rank_of_the_first_stage_counts_a_tied_parameter() -> None:
    first, last = (Ties.between(["embed.weight"], rank, 0, 3) for rank in (0, 3))
    assert (first.peer, last.peer) == (3, 0)
    assert not first.is_counted_elsewhere("embed.weight") and last.is_counted_elsewhere("embed.weight")
    assert not last.is_counted_elsewhere("head.weight")
    assert Ties.between(["embed.weight"], 1, 0, 3) == Ties.between(["embed.weight"], 0, 0, 0) == Ties()

"""`ddp`'s own reducer against the gradients of every rank's rows added up in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.ranks import run_ranks
from torch import Tensor, nn

from shardwright.errors import ShardwrightError
from shardwright.parallel.ddp import DDP

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

RANKS, UPDATES = 2, 3


class Branches(nn.Module):
    """Two dtypes, a parameter that only rank 1 uses, an unused and a frozen one; backward's order is not `parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)

        def of(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=make, dtype=dtype))

        self.last, self.first = of(5, 7), of(3, 5)
        self.narrow = of(7, dtype=torch.float32)
        self.sometimes, self.never = of(7, 7), of(11)
        self.frozen = of(7).requires_grad_(False)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = (x @ self.first).tanh() @ self.last
        x = x @ self.sometimes if branch else x
        return (x * self.narrow.double() * self.frozen).square().sum()


def rows(update: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * update + 10 * microbatch + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def expected(update: int) -> dict[str, Tensor]:
    model = Branches()
    for rank in range(RANKS):
        for microbatch in range(2):
            model(rows(update, microbatch, rank), branch=rank == 1).backward()
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named if p.requires_grad}


def _facts(overlap: bool) -> dict[str, Any]:
    rank, found = dist.get_rank(), []
    model = Branches()
    # 64 bytes: stretches within parameters and over several
    own = DDP(model, dist.group.WORLD, 64, torch.float64, overlap)  # type: ignore[arg-type]
    for update in range(UPDATES):
        for microbatch in range(2):
            with own.microbatch(last=microbatch == 1):
                own(rows(update, microbatch, rank), branch=rank == 1).backward()  # type: ignore[attr-defined]
        own.finish_gradients()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        memory = {g.untyped_storage().data_ptr() for g in gradients.values()}
        found.append(({n: g.clone() for n, g in gradients.items()}, len(memory)))
        model.zero_grad()
    refused = ""
    if overlap:
        try:
            with own.microbatch(last=True):
                for microbatch in range(2):
                    own(rows(0, microbatch, rank), branch=True).backward()  # type: ignore[attr-defined]
        except ShardwrightError as error:
            refused = str(error)
    return {"found": found, "order": own._order, "refused": refused}


def _both() -> list[dict[str, Any]]:
    return [_facts(True), _facts(False)]


@pytest.fixture(scope="module")
def facts() -> list[list[dict[str, Any]]]:
    return run_ranks(_both, RANKS)


@pytest.mark.parametrize("way", [0, 1], ids=["overlapping", "afterwards"])
def test_gradients_are_sums_over_ranks_and_microbatches(facts: list[Any], way: int) -> None:
    for update in range(UPDATES):
        right = expected(update)
        for rank in facts:
            gradients, memories = rank[way]["found"][update]
            assert gradients.keys() == right.keys()
            for name, gradient in gradients.items():
                dtype = torch.float32 if name == "narrow" else torch.float64
                bound = tolerance.of_model(right, 4 * 2 * RANKS, dtype) * right[name].abs().max()
                assert (gradient - right[name]).abs().max() <= bound, name
            assert memories == 2  # one flat tensor for each dtype


def test_flat_tensors_take_the_order_in_which_gradients_come(facts: list[Any]) -> None:
    """Parameters: last, first, narrow, sometimes, never. narrow's gradient comes first on rank 0, then last's, then first's."""
    for rank in facts:
        assert rank[0]["order"] == facts[0][0]["order"]
        assert rank[0]["order"][:3] == [2, 0, 1]
        assert rank[1]["order"] == [4, 3, 2, 1, 0]


def test_a_second_backward_after_sending_is_refused(facts: list[Any]) -> None:
    assert all("has a second gradient in one microbatch" in rank[0]["refused"] for rank in facts)

"""What a GPU decides about an update, computed on the CPU: the same as the host decides, and a skipped step changes no bit."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from tests import tolerance
from torch import Tensor, nn

from shardwright.train.decision import (
    DeviceDecision,
    PendingResult,
    clip_coefficient,
    norm_of,
    scale,
    step_unless,
    why_the_host_waits,
)
from shardwright.train.muon import Muon

CPU = torch.device("cpu")
SQUARES = (0.0, 1e-300, 0.3, 1.0, 7.7e9, 1e308, math.inf, math.nan, -1.0)
LOSSES = (0.0, -3.5, 1e300, math.inf, -math.inf, math.nan)
LIMITS = (None, 0.1, 1.0, 1e9)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_device_decides_as_the_host(limit: float | None) -> None:
    """Equal bit for bit, for every kind of norm and loss."""
    for squares, loss in product(SQUARES, LOSSES):
        found = DeviceDecision.of(torch.tensor([squares, loss, 0.0], dtype=torch.float64), None, limit)
        norm = norm_of(squares)
        assert bool(found.skip) != (math.isfinite(norm) and math.isfinite(loss))
        if not found.skip:
            assert float(found.coefficient) == clip_coefficient(norm, limit)


@pytest.mark.parametrize("count", (0.0, -2.0, math.nan))
def test_an_update_without_targets_is_skipped(count: float) -> None:
    sums = torch.ones(3, dtype=torch.float64)
    assert DeviceDecision.of(sums, torch.tensor(count, dtype=torch.float64), 1.0).skip
    assert not DeviceDecision.of(sums, torch.tensor(3.0, dtype=torch.float64), 1.0).skip


def test_gradients_are_scaled_as_by_a_number() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5), torch.randn(3, 2, dtype=torch.float64), torch.randn(())]
    by_number = [gradient * 0.123456789012345 for gradient in gradients]
    scale(gradients, torch.tensor(0.123456789012345, dtype=torch.float64))
    assert all(torch.equal(one, other) for one, other in zip(gradients, by_number))
    scale([], torch.ones((), dtype=torch.float64))


def _muon(parameters: list[nn.Parameter], fused: bool) -> Muon:
    groups = [{"params": [p], "weight_decay": 0.1, "orthogonal": p.dim() == 2} for p in parameters]
    return Muon(groups, lr=0.01, wrap=lambda tensor, local: local, fused=fused)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, dampening=0.1, fused=True),
    "sgd without momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, fused=True),
    "muon": lambda ps: _muon(ps, True),
}


def _contents(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*parameters, *states)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit(name: str) -> None:
    """After the skipped step the optimizer goes on as if it had not been."""
    results = []
    for with_bad in (False, True):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
        optimizer = OPTIMIZERS[name](parameters)
        for number in range(4):
            if with_bad and number == 2:
                before = _contents(parameters, optimizer)
                for p in parameters:
                    p.grad = torch.full_like(p, math.nan)
                step_unless(optimizer, torch.tensor(True))
                assert all(torch.equal(a, b) for a, b in zip(before, _contents(parameters, optimizer), strict=True))
            for p in parameters:
                p.grad = torch.sin(p.detach() * (number + 1))
            step_unless(optimizer, torch.tensor(False) if number else None)
        results.append(_contents(parameters, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].isfinite().all()


def test_muons_fused_steps_are_its_own() -> None:
    """The AdamW steps of Muon on a GPU, by torch's fused kernel, against those on a CPU."""
    found = []
    for fused in (True, False):
        torch.manual_seed(1)
        parameters = [
            nn.Parameter(torch.randn(4, 3, dtype=torch.float64)),
            nn.Parameter(torch.randn(3, dtype=torch.float64)),
        ]
        optimizer = _muon(parameters, fused)
        for number in range(5):
            for p in parameters:
                p.grad = torch.sin(p.detach() * (number + 1))
            optimizer.step()
        found.append(_contents(parameters, optimizer))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance.few(60), atol=tolerance.few(60))


def test_who_waits_is_told_why() -> None:
    p = nn.Parameter(torch.zeros(2))
    assert why_the_host_waits(CPU, torch.optim.AdamW([p], fused=True), [p]) == "the run is on a cpu"
    gpu = torch.device("cuda", 0)
    assert "on the host" in why_the_host_waits(gpu, torch.optim.AdamW([p], fused=True), [p])


class OwnStep(torch.optim.AdamW):
    """A user's class, whose step may not look at the flag."""


def test_an_optimizer_of_the_users_own_is_stepped_by_the_host() -> None:
    p = nn.Parameter(torch.zeros(2, device="meta"))
    kinds = [OwnStep([p]), torch.optim.AdamW([p])]
    for optimizer in kinds:
        optimizer.defaults["fused"] = True
    own, known = (why_the_host_waits(torch.device("cuda", 0), optimizer, []) for optimizer in kinds)
    assert "OwnStep cannot skip" in own and known == ""


def test_a_result_is_read_once() -> None:
    """A result that the host knows waits for nothing, and is the same at each call."""
    seen: list[int] = []
    pending = PendingResult(lambda: seen.append(1) or "result")  # type: ignore[arg-type, return-value, func-returns-value]
    assert pending.known and [pending.result(), pending.result()] == ["result", "result"] and seen == [1]

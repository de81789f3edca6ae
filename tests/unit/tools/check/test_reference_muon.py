"""The reference's Muon against the engine's and against torch.optim.AdamW, and the bound of its step. Covers no known fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import tolerance
from tests.check_world import World, notes
from torch import nn

from shardwright.tools.check.record import Record, Scalars
from shardwright.tools.check.reference_muon import ReferenceMuon, orthogonal
from shardwright.tools.check.tolerance import ParameterAllowance, float64_tolerance
from shardwright.train.muon import orthogonalise


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_singular_values_and_newton_schulz_agree(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    # five iterations of three products each; an iteration makes a small singular value 3.4445 times as large
    bound = 3.4445**5 * tolerance.mixed(*[max(shape)] * 15)
    torch.testing.assert_close(orthogonal(matrix), orthogonalise(matrix), rtol=0, atol=bound)


def test_vectors_get_the_steps_of_adamw() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "orthogonal": False}
    muon = ReferenceMuon([group], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        adamw.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance.few(10) * float(theirs.abs().max()))


def test_allowed_gradient_errors_stay_within_the_bound(tmp_path: Path) -> None:
    """A matrix of nearly rank 1: its small singular values are magnified most."""
    torch.manual_seed(0)
    exact = torch.randn(8, 1, dtype=torch.float64) @ torch.randn(1, 12, dtype=torch.float64)
    exact += 1e-6 * torch.randn(8, 12, dtype=torch.float64)
    start, relative = torch.randn(8, 12, dtype=torch.float64), 1e-9

    def stepped(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = nn.Parameter(start.clone())
        p.grad = gradient
        optimizer = ReferenceMuon([{"params": [p], "weight_decay": 0.1, "orthogonal": True}], lr=1e-2)
        optimizer.step()
        return p.detach(), optimizer.state[p]["momentum_buffer"]

    right, buffer = stepped(exact)
    record = Record(tmp_path)
    record.write_tensors(1, "grad", {"p": exact})
    record.write_tensors(1, "momentum_buffer", {"p": buffer})
    allowance = ParameterAllowance(notes(World.draw(optimizer="muon"), momentum=0.95), float64_tolerance(relative))
    largest = exact.abs().max().item()
    allowance.grow(record, 1, Scalars(1, 1.0, 1.0, 1.0, 1e-2), {"p": largest}, relative)
    allowed = allowance.allowed("p", right, 1)
    for _ in range(20):
        signs = torch.randint(0, 2, exact.shape) * 2.0 - 1.0
        wrong, _ = stepped(exact + signs * relative * largest)
        assert ((wrong - right).abs() <= allowed).all()
    # tolerance: a thousandth of a step; a wrong one is of the size of the learning rate, 1e-2
    assert allowed.max() < 1e-3 * 1e-2  # a wrong step is of the size of the learning rate, 1e-2

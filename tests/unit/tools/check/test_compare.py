"""What `check` allows: bounds of gradients, states and steps, held against torch's own optimizers. Covers no known fault."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests import tolerance
from tests.check_world import DATA_RANKS, Fault, World, judge, notes, write
from torch import Tensor

from shardwright.tools.check.compare import compare_records, compare_tensor
from shardwright.tools.check.record import Record, Scalars
from shardwright.tools.check.tolerance import (
    FLOOR,
    ParameterAllowance,
    Tolerance,
    float64_tolerance,
    run_dtype_tolerance,
)


@pytest.mark.parametrize(("off", "passes"), [(0.9e-9, True), (1.1e-9, False)])
def test_a_gradient_may_be_off_by_r_of_its_largest_element(off: float, passes: bool, tmp_path: Path) -> None:
    def gradient(update: int, world: World) -> dict[str, Tensor]:
        g = world.gradient(update)
        if update == 0:
            g["blocks.0.w"].view(-1)[3] += off * g["blocks.0.w"].abs().max()
        return g

    found = judge(tmp_path, Fault(gradient=gradient))
    assert (found is None) == passes
    if found is not None:
        assert found.tensor is not None and found.tensor.name == "blocks.0.w"
        assert math.isclose(found.tensor.relative, off, rel_tol=tolerance.few(4) / off)
        assert math.isclose(found.tensor.used, off / 1e-9, rel_tol=tolerance.few(4) / off)


@pytest.mark.parametrize(("noise", "passes"), [(1e-17, True), (1e-8, False)])
def test_a_gradient_that_is_zero_may_be_rounding_noise(noise: float, passes: bool, tmp_path: Path) -> None:
    """The scale of a tensor is at least FLOOR of the largest gradient of the model."""
    world = World.draw()
    for parts in world.parts:
        for part in parts:
            part["blocks.0.norm"].zero_()

    def gradient(update: int, world: World) -> dict[str, Tensor]:
        g = world.gradient(update)
        return {**g, "blocks.0.norm": g["blocks.0.norm"] + noise}

    assert (judge(tmp_path, Fault(gradient=gradient), world) is None) == passes
    largest = max(g.abs().max().item() for g in world.gradient(0).values())
    # tolerance: an order of magnitude, between the two cases above
    assert 1e-17 < 1e-9 * FLOOR * largest < 1e-8


def test_one_target_more_fails(tmp_path: Path) -> None:
    found = judge(tmp_path, Fault(targets=lambda update: 31))
    assert found is not None and found.kind == "target_tokens" and found.update == 1


def test_not_a_number_and_other_shapes_fail() -> None:
    right = torch.ones(2, 3)
    assert compare_tensor("x", right, torch.full((2, 3), math.nan), 1.0, 1.0).differs
    assert compare_tensor("x", right, torch.ones(3, 2), 1.0, 1.0).differs
    assert not compare_tensor("x", right, right + 0.5, 1.0, 1.0).differs
    assert not compare_tensor("x", torch.empty(0), torch.empty(0), 0.0, 1.0).differs


def test_rows_that_differ_are_named() -> None:
    right = torch.zeros(6, 2)
    wrong = right.clone()
    wrong[2, 1], wrong[4, 0] = 1.0, -1.0
    assert compare_tensor("x", right, wrong, 0.1, 1.0).rows == (2, 4)


def test_ratio_and_residual() -> None:
    right = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    numbers = compare_tensor("x", right, 0.5 * right, 0.0, 3.0)
    assert numbers.ratio == pytest.approx(0.5, rel=tolerance.few(3)) and numbers.residual <= tolerance.few(3)
    assert numbers.difference == 1.5 and numbers.relative == 0.5


def _steps(
    kind: str, gradients: list[Tensor], start: Tensor, momentum: float
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Parameters and states after each step of torch's optimizer."""
    p = torch.nn.Parameter(start.clone())
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD([p], lr=1e-2, momentum=momentum, weight_decay=0.1)
    parameters, states = [], []
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
        parameters.append(p.detach().clone())
        states.append({k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)})
    return parameters, states


@pytest.mark.parametrize(("kind", "momentum"), [("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
@pytest.mark.parametrize("relative", [1e-9, 1e-3])
def test_allowed_gradient_errors_never_break_the_bound_of_the_step(
    kind: str, momentum: float, relative: float, tmp_path: Path
) -> None:
    """torch's optimizers, fed with gradients off by as much as is allowed, stay within the derived bound, which is tight."""
    torch.manual_seed(1)
    exact = [torch.randn(400, dtype=torch.float64) * torch.logspace(-14, 0, 400, dtype=torch.float64) for _ in range(3)]
    start = torch.randn(400, dtype=torch.float64)
    reference = Record(tmp_path)
    written = notes(World.draw(optimizer=kind), momentum=momentum)
    allowance = ParameterAllowance(written, Tolerance(relative, relative, 2.0**-52, ""))
    parameters, states = _steps(kind, exact, start, momentum)
    off = []
    for _ in range(8):
        signs = [torch.randint(0, 2, (400,)) * 2.0 - 1.0 for _ in exact]
        wrong = [g + s * relative * g.abs().max() for g, s in zip(exact, signs)]
        off.append(_steps(kind, wrong, start, momentum)[0])
    for update in (1, 2, 3):
        for state, tensor in states[update - 1].items():
            reference.write_tensors(update, state, {"p": tensor})
        scalars = Scalars(1, 1.0, 1.0, 1.0, 1e-2)
        allowance.grow(reference, update, scalars, {"p": exact[update - 1].abs().max().item()}, relative)
        allowed = allowance.allowed("p", parameters[update - 1], update)
        worst = max(((w[update - 1] - parameters[update - 1]).abs() / allowed).max().item() for w in off)
        assert worst <= 1.0
        if kind == "adamw":
            # where gradients are not tiny, a step that is wrong by a hundredth of the learning rate is refused
            # tolerance: a hundredth of the learning rate, 1e-4
            assert (allowed[-100:] < 1e-4 * max(1.0, relative / 1e-6)).all()


def test_drift_of_weights_widens_later_gradients_only(tmp_path: Path) -> None:
    """r grows by ten times the part of a step by which weights were allowed to drift apart, and by 0.1 at most."""
    world = World.draw()
    reference = write(tmp_path / "r", world, Fault(), notes(world))
    candidate = write(
        tmp_path / "c",
        world,
        Fault(gradient=lambda u, w: {n: g * (1 + 1e-10) for n, g in w.gradient(u).items()}),
    )
    comparison = compare_records(reference, candidate, float64_tolerance())
    assert comparison.passed
    used = [max(t.used for t in u.tensors["grad"]) for u in comparison.updates]
    # tolerance: the disturbance is of 1e-10, which float64 holds to 1e-6
    assert used[0] == pytest.approx(0.1, rel=1e-3)
    assert used[1] <= used[0]


def test_tolerance_of_the_run_dtype_follows_its_formula() -> None:
    t = run_dtype_tolerance("bf16", "fp32", "fp32", blocks=4, microbatches=4, ranks=2, tokens=768)
    by_hand = 4 / 3**0.5 * (2**-8 * 52**0.5 + 2**-24 * 768**0.5 + 2**-24 * 2**0.5)
    assert t.relative == pytest.approx(by_hand, rel=tolerance.few(10))
    assert t.loss == pytest.approx(by_hand / 768**0.5, rel=tolerance.few(12))
    assert t.master_eps == 2**-23
    assert "12 x 4 blocks + 4 microbatches" in t.formula and "0.065" in t.formula


def test_faults_are_found_at_the_tolerance_of_bf16(tmp_path: Path) -> None:
    tolerance = run_dtype_tolerance("bf16", "fp32", "fp32", blocks=4, microbatches=3, ranks=DATA_RANKS, tokens=30)
    assert judge(tmp_path / "right", Fault(), tolerance=tolerance) is None
    found = judge(
        tmp_path / "wrong",
        Fault(gradient=lambda u, w: {n: g / DATA_RANKS for n, g in w.gradient(u).items()}),
        tolerance=tolerance,
    )
    assert found is not None and found.diagnosis.name == "averaged"

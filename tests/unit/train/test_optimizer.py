"""Learning rates, Muon's step, groups of weight decay, casting and random numbers. Covers A37, A52, A69 and A129."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests import tolerance
from torch import nn

from shardwright.config.schema import Training
from shardwright.errors import ConfigError
from shardwright.parallel.mixed_precision import compute_in
from shardwright.train.muon import Muon, orthogonalise
from shardwright.train.optimizer import (
    ShardedParam,
    check_optimizer,
    decays,
    learning_rate_factor,
    make_optimizer,
)
from shardwright.train.rng import seed_microbatch, stream_seed


def training(**values: Any) -> Training:
    return Training.model_validate({"max_steps": 8, "global_batch_size": 1, **values})


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("polynomial", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {"timescale": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4}),
    ("warmup_stable_decay", {"num_decay_steps": 3}),
]


@pytest.mark.parametrize(("name", "kwargs"), SCHEDULES)
def test_learning_rates_are_those_of_transformers(name: str, kwargs: dict[str, Any]) -> None:
    """A52 A69: the rate of each update is what a scheduler stepped once per update gives; min_lr and lr_end are rates."""
    t = training(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=2, learning_rate=1e-3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = transformers.get_scheduler(name, optimizer, 2, 8, scheduler_specific_kwargs=kwargs)
    factor = learning_rate_factor(t, 8)
    for update in range(8):
        assert t.learning_rate * factor(update) == pytest.approx(optimizer.param_groups[0]["lr"], rel=tolerance.few(50))
        optimizer.step()
        scheduler.step()
    assert factor(5) == factor(5), "a function of the update: nothing moves on"


def test_linear_rates_by_hand() -> None:
    """A52: warm-up 4 of 8, then down to zero."""
    factor = learning_rate_factor(training(warmup_steps=4), 8)
    assert [factor(update) for update in range(9)] == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]
    constant = learning_rate_factor(training(lr_scheduler_type="constant"), 8)
    assert [constant(update) for update in (0, 7)] == [1, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "'cosin' is not known. The learning rate must be a function of the update alone"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "is not known"),
        ({"lr_scheduler_kwargs": {"cycles": 1}}, "linear does not know `cycles`. The arguments of linear are: none. Remove"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "training.lr_scheduler_kwargs for cosine_with_min_lr"),
    ],
)  # fmt: skip
def test_schedules_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        learning_rate_factor(training(**values), 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adamv"}, "training.optimizer = 'adamv' is not known. Did you mean `adamw`?"),
        ({"optimizer": "torch.optim:Adamm"}, "torch.optim has no `Adamm`. Did you mean `Adam`?"),
        ({"optimizer": "no_such_package:Adam"}, "cannot be imported"),
        ({"optimizer_kwargs": {"momentum": 0.9}}, "training.optimizer_kwargs: AdamW.__init__() got an unexpected"),
        ({"optimizer": "sgd", "optimizer_kwargs": {"momentum": -1.0}}, "Invalid momentum value: -1.0"),
        ({"optimizer": "sgd", "optimizer_kwargs": {"foreach": True}}, "These arguments are passed to sgd"),
        ({"optimizer": "torch.optim:LBFGS"}, "doesn't support per-parameter options"),
    ],
)  # fmt: skip
def test_optimizers_that_are_refused(values: dict[str, Any], message: str) -> None:
    """Before any process starts, without a traceback."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_optimizer(training(**values))
    check_optimizer(training(optimizer="torch.optim:NAdam", optimizer_kwargs={"momentum_decay": 1e-3}))


def test_weight_decay_by_name_and_whole_shape() -> None:
    """A37: matrices decay, whatever the shape of this rank's part; vectors, biases and norms do not."""
    patterns = training().no_decay
    assert decays("model.layers.0.mlp.up_proj.weight", (4, 3), patterns)
    assert decays("transformer.h.0.attn.c_attn.weight", (4, 3), patterns)
    assert not decays("model.layers.0.input_layernorm.weight", (4,), patterns)
    assert not decays("h.0.ln_1.weight", (1, 4), patterns)
    assert not decays("head.bias", (1, 4), patterns) and not decays("scale", (), patterns)
    one = nn.Parameter(torch.ones(0, 3))  # an empty part of a matrix
    whole = nn.Parameter(torch.ones(5, 3))
    (group,) = make_optimizer(training(weight_decay=0.5), [ShardedParam("w", whole, one, True)]).param_groups
    assert group["weight_decay"] == 0.5 and group["params"][0] is one


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_is_torchs_muon(shape: tuple[int, int]) -> None:
    """Bitwise torch.optim.Muon with adjust_lr_fn match_rms_adamw (Liu et al. 2025), decay and momentum included."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)) for _ in range(2))
    group = {"params": [ours], "weight_decay": 0.1, "orthogonal": True}
    _steps(Muon([group], lr=0.02, wrap=lambda p, local: local), [ours])
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    _steps(reference, [theirs])
    assert torch.equal(ours, theirs)


def test_the_rest_of_muon_is_adamw() -> None:
    """Vectors, embeddings and heads get torch.optim.AdamW's steps."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))
    _steps(Muon([{"params": [ours], "weight_decay": 0.1}], lr=0.02, wrap=lambda p, local: local), [ours])
    _steps(torch.optim.AdamW([theirs], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)), [theirs])
    assert torch.allclose(ours, theirs, rtol=tolerance.few(50), atol=0)


def test_orthogonalise() -> None:
    """Singular values come near 1 (the iteration stops between 0.7 and 1.2) and singular vectors stay."""
    torch.manual_seed(0)
    matrix = torch.randn(8, 5, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonalise(matrix) @ right.T
    assert ((found.diag() > 0.65) & (found.diag() < 1.25)).all()
    # five iterations of three products each; an iteration makes a small singular value 3.4445 times as large
    assert (found - found.diag().diag()).abs().max() <= 3.4445**5 * tolerance.mixed(*[8] * 15)
    assert torch.equal(orthogonalise(torch.zeros(3, 2)), torch.zeros(3, 2, dtype=torch.bfloat16))


def test_fp32_weights_move_where_bf16_ones_stand_still() -> None:
    """A129: w = 1, lr x g = 1e-4, 1000 steps: fp32 moves by 0.1, bf16 stays at 1."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        w = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = make_optimizer(training(optimizer="sgd", learning_rate=1e-4), [ShardedParam("w", w, w, True)])
        for _ in range(1000):
            w.grad = torch.ones_like(w)
            optimizer.step()
        found.append(w.item())
    assert found[0] == pytest.approx(0.9, abs=1000 * tolerance.unit_roundoff(torch.float32)) and found[1] == 1.0


def test_computing_in_bf16_keeps_what_is_stored() -> None:
    """casting.py: forward sees bf16, gradients arrive in fp32, names, state dict and ties stay."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    model["b"].weight = model["a"].weight
    model["b"].bias.requires_grad_(False)
    names, stored = list(dict(model.named_parameters())), model["a"].weight
    compute_in(model, torch.bfloat16)
    x = torch.randn(3, 4)
    out = model["norm"](model["b"](model["a"](x.bfloat16())))
    assert out.dtype == model["a"].weight.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert list(dict(model.named_parameters())) == names and model["a"]._parameters["weight"] is stored
    assert model["b"]._parameters["weight"] is stored and stored.grad.dtype == torch.float32
    assert model["b"]._parameters["bias"].grad is None
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32}
    assert isinstance(model["a"], nn.Linear) and type(model["a"]).__name__ == "Linear"
    before = type(model["a"])
    compute_in(model, torch.float32)
    assert type(model["a"]) is before and model["a"].weight.dtype == torch.bfloat16


def test_random_numbers_are_a_function_of_the_place() -> None:
    """Equal places draw equal numbers whatever was drawn before; other seeds, updates and microbatches draw others."""

    def draw(*place: int) -> tuple[float, float, float]:
        seed_microbatch(*place)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw(1, 2, 3)
    draw(9, 9, 9)
    assert draw(1, 2, 3) == first
    others = [draw(0, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 23, 3), draw(12, 3, 3)]
    for i in range(3):
        assert len({first[i], *(other[i] for other in others)}) == 6
    assert 0 <= stream_seed(1, 2) < 2**63 and stream_seed(1, 2) != stream_seed(12)

"""First values follow the model's own rules and depend on (seed, name) only: covers A36, A92.

The oracle is a normal build with torch or Transformers: equal constants, equal spread of what is drawn.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import tolerance
from tests.tiny_models import FAMILIES, spec_of
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright import torch_private
from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.models import build_model, materialise
from shardwright.models.initialization import seed_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(spec: Model, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(spec, dtype)
    materialise(model, spec, seed=seed, device=CPU)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_values_have_the_distribution_of_a_normal_build(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]()
    config.save_pretrained(tmp_path)
    torch.manual_seed(11)
    normal = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, value in made(spec_of(tmp_path, family, init="random")).named_parameters():
        want = normal.get_parameter(name)
        if want.std() == 0:
            assert torch.equal(value, want), name
            continue
        n = value.numel()
        assert abs(value.mean() - want.mean()) < 6 * want.std() / math.sqrt(n), name
        assert abs(value.std() / want.std() - 1) < 6 / math.sqrt(n), name
        assert not torch.equal(value, want), name


def test_rules_that_look_easy_to_miss(tmp_path: Path) -> None:
    """GPT-2 scales residual projections by depth; Llama zeroes the row of the padding token."""
    FAMILIES["gpt2"]().save_pretrained(tmp_path / "gpt2")
    spec = spec_of(tmp_path / "gpt2", init="random", config_overrides={"n_layer": 8})
    block = made(spec).transformer.h[3]
    # tolerance: the spread of a draw
    assert block.attn.c_attn.weight.std() == pytest.approx(0.02, rel=0.1)
    for part in (block.attn, block.mlp):
        assert part.c_proj.weight.std() == pytest.approx(0.02 / 4, rel=0.1)  # tolerance: the spread of a draw
    FAMILIES["llama_tied"]().save_pretrained(tmp_path / "llama")
    rows = made(spec_of(tmp_path / "llama", init="random")).lm_head.weight.abs().sum(1)
    assert torch.nonzero(rows == 0).flatten().tolist() == [3]


def test_values_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    """A36: not on torch's generator (which is left alone), the number of layers, or what else is drawn."""
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    spec = spec_of(tmp_path, init="random")
    torch.manual_seed(1)
    first = made(spec).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    deeper = made(spec_of(tmp_path, init="random", config_overrides={"num_hidden_layers": 4}))
    assert torch.equal(torch.get_rng_state(), before)
    again, other = deeper.state_dict(), made(spec, seed=1).state_dict()
    drawn = [name for name, value in first.items() if value.std() > 0]
    assert len(drawn) > 10
    for name, value in first.items():
        assert torch.equal(again[name], value), name
    assert not any(torch.equal(other[name], first[name]) for name in drawn)
    starts = {tuple(first[name].flatten()[:8].tolist()) for name in drawn}
    assert len(starts) == len(drawn) - 1  # the head is the embedding


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_the_same_draw_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    FAMILIES["gpt2"]().save_pretrained(tmp_path)
    spec = spec_of(tmp_path, init="random")
    single = made(spec).state_dict()
    for name, value in made(spec, dtype=dtype).state_dict().items():
        assert value.dtype == dtype and torch.equal(value, single[name].to(dtype)), name


def test_seeds_are_the_same_on_every_machine() -> None:
    """A stored value: another hash would start every run of old from other weights."""
    assert seed_of(42, "model.layers.0.mlp.up_proj.weight") == 7446857494269945920


class Direct(nn.Module):
    """Everything that a constructor may do on meta, and a few things that go wrong elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(400, 5) * 0.1 + 3)
        self.transposed = nn.Parameter(torch.randn(5, 300).t())
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.steps = nn.Parameter(torch.arange(6.0).reshape(2, 3) / 5)
        self.copied = nn.Parameter(self.drawn.detach().clone())
        self.linear = nn.Linear(50, 40)
        self.twin = copy.deepcopy(self.linear)
        self.attention = nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
        self.rows = nn.Parameter(torch.empty(4, 3))
        with torch.no_grad():
            for row in range(4):
                self.rows[row].fill_(row)
        self.orthogonal = nn.Parameter(torch.empty(7, 7))
        nn.init.orthogonal_(self.orthogonal)
        self.cut = nn.Parameter(torch.empty(90, 50))
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.6)
        self.sparse = nn.Parameter(torch.empty(50, 40))
        nn.init.sparse_(self.sparse, sparsity=0.25)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("noise", torch.rand(9), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.table = torch.linspace(0, 1, 5)


DIRECT = Model(model_name_or_path=f"{__name__}:Direct", init="random")


def test_functions_that_another_library_replaced_when_torch_first_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the functions that take a default device from their first use. Transformers replaces one while it builds."""
    torch_private.refresh_device_constructors()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "linspace", lambda *args, **kwargs: None)
        with torch.device("meta"):
            torch.empty(0)
    with torch.device("meta"):
        assert not torch.linspace(0, 1, 5).is_meta, "torch looks again by itself: the remedy is no longer needed"
    assert build_model(DIRECT, torch.float32).table.is_meta


def test_constructors_that_make_their_own_parameters() -> None:
    assert all(p.is_contiguous() for p in build_model(DIRECT, torch.float32).parameters())
    model = made(DIRECT)
    normal = Direct()
    for name in ("listed", "scalar", "steps", "rows", "mask", "count", "table"):
        assert torch.equal(getattr(model, name), getattr(normal, name)), name
        assert getattr(model, name).dtype == getattr(normal, name).dtype, name
    # tolerance: the mean and spread of a draw
    assert model.drawn.mean() == pytest.approx(3, abs=0.02) and model.drawn.std() == pytest.approx(0.1, rel=0.1)
    assert model.transposed.is_contiguous() and model.transposed.shape == (300, 5)
    bound = 1 / math.sqrt(50)
    assert 0.9 * bound < model.linear.weight.abs().max() <= bound and model.linear.bias.abs().max() <= bound
    torch.testing.assert_close(
        model.orthogonal @ model.orthogonal.t(),
        torch.eye(7),
        rtol=0,
        atol=tolerance.mixed(*model.orthogonal.shape, dtype=torch.float32),
    )
    # tolerance: the spread of a draw
    assert 0.59 < model.cut.abs().max() <= 0.6 and model.cut.std() == pytest.approx(0.31, rel=0.05)
    assert int((model.sparse == 0).sum()) == 13 * 40
    assert torch.equal(model.attention.out_proj.bias, torch.zeros(8))
    magnitude = model.normed.parametrizations.weight.original0
    direction = model.normed.parametrizations.weight.original1
    torch.testing.assert_close(
        magnitude,
        direction.norm(dim=1, keepdim=True),
        rtol=tolerance.positive(direction.shape[1], dtype=torch.float32),
        atol=0,
    )
    assert model.noise.min() >= 0 and model.noise.std() > 0.1


def test_a_copy_made_in_the_constructor_is_a_copy() -> None:
    model = made(DIRECT)
    assert torch.equal(model.copied, model.drawn)
    assert torch.equal(model.twin.weight, model.linear.weight) and model.twin.weight is not model.linear.weight


class Unset(nn.Module):
    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.one = nn.Parameter(torch.empty(2, 2))
        self.two = nn.Parameter(torch.empty(3))
        if half:
            with torch.no_grad():
                self.one.zero_()
                self.two[:2] = 1.0


def test_parameters_without_a_rule_are_refused_by_name() -> None:
    for half, said in ((False, "2 parameters never get a value: one, two"), (True, "never get a value: two")):
        spec = Model(model_name_or_path=f"{__name__}:Unset", init="random", kwargs={"half": half})
        model = build_model(spec, torch.float32)
        with pytest.raises(ModelError, match=said):
            materialise(model, spec, seed=0, device=CPU)


def test_a_copy_of_a_model_on_meta_can_be_materialised() -> None:
    model = build_model(DIRECT, torch.float32)
    twin = copy.deepcopy(model)
    materialise(model, DIRECT, seed=0, device=CPU)
    materialise(twin, DIRECT, seed=0, device=CPU)
    for (name, value), other in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(value, other), name

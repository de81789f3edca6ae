"""Models on meta: what is built, what is refused, where the parts are. Covers A65, A113, A133."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.tiny_models import FAMILIES, VOCABULARY, spec_of, write_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, Mamba2Config

from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.models import build_model, find_parts, materialise
from shardwright.models.build import read_config
from shardwright.models.model_parts import canonical_parameters

CPU = torch.device("cpu")
HERE = __name__


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_model(directory, "llama")
    return directory


def refusal(spec: Model) -> ConfigError | ModelError:
    with pytest.raises((ConfigError, ModelError)) as caught:
        build_model(spec, torch.float32)
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_names_shapes_ties_and_buffers_are_those_of_a_normal_build(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """A133: parameters follow the dtype, buffers stay as float32 builds them and have the same values."""
    config = FAMILIES[family]()
    config.save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spec = spec_of(tmp_path, family, init="random")
    model = build_model(spec, dtype)
    assert all(p.is_meta and p.is_contiguous() and p.dtype == dtype for p in model.parameters())
    ties = (("lm_head.weight",),) if config.tie_word_embeddings else ()
    assert tuple(group[1:] for group in find_parts(model).tied) == ties
    materialise(model, spec, seed=0, device=CPU)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in want.named_parameters()]
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(want.named_buffers()).keys()
    for name, value in want.named_buffers():
        assert torch.equal(buffers[name], value) and buffers[name].dtype == value.dtype, name
    if family != "gpt2":
        assert any(buffer.dtype == torch.float32 for buffer in buffers.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_off_and_logits_are_finite(tmp_path: Path, family: str) -> None:
    """A113: no keys and values are alive behind the forward pass."""
    FAMILIES[family]().save_pretrained(tmp_path)
    spec = spec_of(tmp_path, family, init="random")
    model = build_model(spec, torch.float64)
    materialise(model, spec, seed=0, device=CPU)
    output = model(torch.arange(12).view(2, 6))
    assert output.past_key_values is None
    assert output.logits.dtype == torch.float64 and bool(torch.isfinite(output.logits).all())


def test_parts_of_transformers_models(tmp_path: Path) -> None:
    FAMILIES["gpt2"]().save_pretrained(tmp_path)
    parts = find_parts(build_model(spec_of(tmp_path, init="random"), torch.float32))
    assert parts.blocks == ("transformer.h.0", "transformer.h.1")
    assert (parts.embedding, parts.norm, parts.head) == ("transformer.wte", "transformer.ln_f", "lm_head")
    assert parts.tied == (("transformer.wte.weight", "lm_head.weight"),)


class Nested(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(2, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)) for _ in range(depth))
        self.outlet = nn.Linear(4, 2)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_parts_of_plain_modules() -> None:
    parts = find_parts(build_model(Model(model_name_or_path=f"{HERE}:Nested", init="random"), torch.float32))
    assert parts.blocks == ("layers.0", "layers.1", "layers.2")
    assert (parts.embedding, parts.norm, parts.head, parts.tied) == (None, None, None, ())
    assert find_parts(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ReLU()})).blocks == ("a",)
    with pytest.raises(ModelError, match="Flat has no submodule with parameters"):
        find_parts(Flat())


def test_names_do_not_depend_on_wrappers() -> None:
    """A65: the same names with activation checkpointing, torch.compile, both, and neither."""
    plain = set(canonical_parameters(Nested()))
    for wrap in (
        lambda block: checkpoint_wrapper(block),
        lambda block: torch.compile(block),
        lambda block: torch.compile(checkpoint_wrapper(block)),
        lambda block: checkpoint_wrapper(torch.compile(block)),
    ):
        model = Nested()
        model.layers = nn.ModuleList(wrap(block) for block in model.layers)
        assert set(dict(model.named_parameters())) != plain
        assert set(canonical_parameters(model)) == plain
        assert find_parts(model).blocks == ("layers.0", "layers.1", "layers.2")
    assert set(canonical_parameters(torch.compile(Nested()))) == plain


def test_overrides_reach_the_config_and_layer_patterns_follow(tmp_path: Path) -> None:
    FAMILIES["gemma3"]().save_pretrained(tmp_path / "gemma3")
    FAMILIES["gpt2"]().save_pretrained(tmp_path / "gpt2")
    for layers in (1, 7):
        spec = spec_of(tmp_path / "gemma3", init="random", config_overrides={"num_hidden_layers": layers})
        model = build_model(spec, torch.float32)
        assert len(find_parts(model).blocks) == layers == len(model.config.layer_types)
    for key in ("n_layer", "num_hidden_layers"):
        spec = spec_of(tmp_path / "gpt2", init="random", config_overrides={key: 5})
        assert len(find_parts(build_model(spec, torch.float32)).blocks) == 5


def test_an_override_that_is_no_key_is_refused_with_the_nearest(llama: Path) -> None:
    error = refusal(spec_of(llama, config_overrides={"num_hiden_layers": 1}))
    assert "`num_hiden_layers` is not a key of LlamaConfig" in error.what
    assert error.fix == "Did you mean `num_hidden_layers`?"
    assert "not a multiple" in str(refusal(spec_of(llama, config_overrides={"hidden_size": 33, "head_dim": None})))


def test_frozen_parameters_and_patterns_that_match_nothing(tmp_path: Path) -> None:
    FAMILIES["llama_tied"]().save_pretrained(tmp_path)
    spec = spec_of(tmp_path, init="random", freeze=["lm_head.*", "model.layers.0.*"])
    model = build_model(spec, torch.float32)
    materialise(model, spec, seed=0, device=CPU)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in dict(model.named_parameters()) if "layers.0." in n} | {"model.embed_tokens.weight"}
    error = refusal(spec_of(tmp_path, init="random", freeze=["model.layer.0*"]))
    assert "`model.layer.0*` matches no parameter" in error.what


def test_directories_that_cannot_be_a_model(tmp_path: Path, llama: Path) -> None:
    assert "there is no directory" in refusal(spec_of(tmp_path / "nowhere")).what
    assert "has no config.json" in refusal(spec_of(tmp_path)).what
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(spec_of(tmp_path)).what
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert refusal(spec_of(tmp_path)).fix == "Did you mean `llama`?"
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "vit has no causal language model" in refusal(spec_of(tmp_path, init="random")).what
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    error = refusal(spec_of(tmp_path))
    assert "has no model.safetensors" in error.what and "model.init to random" in error.fix
    values = json.loads((llama / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "quantized" in refusal(spec_of(tmp_path, init="random")).what
    assert "model.kwargs has no effect" in refusal(spec_of(llama, kwargs={"a": 1})).what


def reads_a_value() -> nn.Module:
    return nn.Linear(2, int(torch.linspace(1, 3, 2)[0].item()))


def returns_no_module() -> int:
    return 3


def on_the_cpu() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def shares_memory() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("no_such_package.models:build", {}, "no_such_package.models cannot be imported"),
        (f"{HERE}:Nestd", {}, f"{HERE} has no `Nestd`. Did you mean `Nested`?"),
        (f"{HERE}:Nested", {"kwargs": {"deep": 3}}, "unexpected keyword argument 'deep'"),
        (f"{HERE}:Nested", {"init": "pretrained"}, "Set model.init to random"),
        (f"{HERE}:Nested", {"config_overrides": {"depth": 3}}, "model.config_overrides has no effect"),
        (f"{HERE}:reads_a_value", {}, "failed on the meta device"),
        (f"{HERE}:returns_no_module", {}, "returned int"),
        (f"{HERE}:on_the_cpu", {}, "weight was built on cpu"),
        (f"{HERE}:shares_memory", {}, "b.weight and a.weight are two parameters that share memory"),
    ],
)
def test_functions_that_cannot_build_a_model(path: str, more: dict, said: str) -> None:
    spec = Model.model_validate({"model_name_or_path": path, "init": "random", **more})
    assert said in str(refusal(spec))


def test_function_arguments_reach_the_function() -> None:
    spec = Model(model_name_or_path=f"{HERE}:Nested", init="random", kwargs={"depth": 5})
    model = build_model(spec, torch.float64)
    assert len(model.layers) == 5
    materialise(model, spec, seed=0, device=CPU)
    with pytest.raises(
        (ConfigError, ModelError), match=r"inlet\.weight is not as build_model left it: it is on cpu already"
    ):
        materialise(model, spec, seed=0, device=CPU)
    added = build_model(spec, torch.float64)
    added.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(ModelError, match=r"extra\.weight .* it was added later"):
        materialise(added, spec, seed=0, device=CPU)
    assert isinstance(VOCABULARY, int) and isinstance(model.inlet.weight, Tensor)


def test_a_config_may_hold_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    """`save_pretrained` writes a limit without end as an object, for JSON knows no infinity."""
    config = Mamba2Config(
        hidden_size=32, state_size=8, num_hidden_layers=1, num_heads=8, head_dim=8, n_groups=1, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    spec = Model.model_validate({"model_name_or_path": str(tmp_path), "init": "random"})
    assert read_config(spec).time_step_limit[1] == math.inf

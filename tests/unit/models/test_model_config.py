"""config_overrides: merged deep, under every name, with what Transformers derives; what has no effect is refused.

The oracle is arithmetic of rotary frequencies by hand, and the values of the config.json that was written.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tolerance

from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.models.build import build_model, read_config
from shardwright.models.materialise import materialise

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 40, "vocab_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
THETA, WIDTH = 1_000_000.0, 8
OLD = {**LLAMA, "rope_theta": THETA}
NEW = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
LLAMA3 = {**LLAMA, "rope_theta": 500_000.0, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 4, "rope_theta": 2e6, "rope_local_base_freq": 9e3,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
WRAPPED = {"model_type": "gemma3", "vision_config": {"hidden_size": 32},
           "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64}}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 3}


def spec_of(values: dict[str, Any], overrides: dict[str, Any], directory: Path) -> Model:
    (directory / "config.json").write_text(json.dumps(values))
    return Model(model_name_or_path=str(directory), init="random", config_overrides=overrides)


def plain(theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, WIDTH, 2) / WIDTH)


@pytest.mark.parametrize("file", [OLD, NEW], ids=["old file", "new file"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, plain(THETA) / 4),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, plain(THETA) / 4),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, plain(THETA) / 4),
        ({"rope_theta": 500.0}, plain(500.0)),
        ({"rope_parameters": {"rope_theta": 500.0}}, plain(500.0)),
        ({"rope_scaling": None}, plain(THETA)),
        ({}, plain(THETA)),
    ],
    ids=["scaling", "type", "parameters", "theta", "theta inside", "none", "nothing"],
)
def test_frequencies_keep_what_the_override_leaves(
    file: dict[str, Any], overrides: dict[str, Any], expected: torch.Tensor, tmp_path: Path
) -> None:
    """inv_freq of the model that is built, where the file and the override use either of the two ways to say it."""
    spec = spec_of(file, overrides, tmp_path)
    model = build_model(spec, torch.float32)
    materialise(model, spec, seed=0, device=torch.device("cpu"))
    found = model.get_buffer("model.rotary_emb.inv_freq")
    # one power, one division: a few roundings of float32
    assert torch.allclose(found, expected, rtol=tolerance.few(4, torch.float32), atol=0)


def test_a_factor_stays_with_its_type(tmp_path: Path) -> None:
    """{factor: 16} on llama3 changes the long wavelengths only, as its formula says."""
    rope = read_config(spec_of(LLAMA3, {"rope_scaling": {"factor": 16.0}}, tmp_path)).rope_parameters
    assert rope == {**LLAMA3["rope_scaling"], "factor": 16.0, "rope_theta": 500_000.0}  # type: ignore[dict-item]
    other = read_config(spec_of(LLAMA3, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, tmp_path))
    assert "low_freq_factor" not in other.rope_parameters and other.rope_parameters["rope_theta"] == 500_000.0


def test_yarn_takes_the_length_that_is_given(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = read_config(spec_of(OLD, {"rope_scaling": yarn, "max_position_embeddings": 512}, tmp_path))
    assert config.rope_parameters == {**yarn, "rope_theta": THETA} and config.max_position_embeddings == 512
    derived = read_config(spec_of(OLD, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, tmp_path))
    assert derived.rope_parameters["original_max_position_embeddings"] == 128


def test_each_kind_of_layer_has_its_own_frequencies(tmp_path: Path) -> None:
    full = read_config(spec_of(GEMMA, {"rope_parameters": {"full_attention": {"factor": 2.0}}}, tmp_path))
    assert full.rope_parameters == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e6},
    }
    with pytest.raises(ModelError, match=r"rope_parameters: \{full_attention or sliding_attention"):
        read_config(spec_of(GEMMA, {"rope_theta": 5.0}, tmp_path))


def test_overrides_of_a_text_config_leave_its_neighbours(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 7.0}}
    overrides = {"text_config": {"num_hidden_layers": 2, "rope_parameters": rope}}
    config = read_config(spec_of(WRAPPED, overrides, tmp_path))
    text = config.text_config
    assert (text.num_hidden_layers, text.hidden_size, config.vision_config.hidden_size) == (2, 64, 32)
    assert text.rope_parameters["full_attention"]["rope_theta"] == 7.0 and len(text.layer_types) == 2


@pytest.mark.parametrize(("asked", "layers"), [(2, ["sliding_attention"] * 2), (4, GEMMA["layer_types"])])
def test_kinds_of_layers_follow_their_number(asked: int, layers: list[str], tmp_path: Path) -> None:
    assert read_config(spec_of(GEMMA, {"num_hidden_layers": asked}, tmp_path)).layer_types == layers


def test_more_layers_go_on_where_the_config_knows_how(tmp_path: Path) -> None:
    file = {**GEMMA, "layer_types": ["sliding_attention"] * 4}
    kinds = read_config(spec_of(file, {"num_hidden_layers": 8}, tmp_path)).layer_types
    assert [kind == "full_attention" for kind in kinds] == [place == 5 for place in range(8)]
    with pytest.raises(ModelError, match=r"8 layers where `layer_types` of config\.json lists 4"):
        read_config(spec_of(GEMMA, {"num_hidden_layers": 8}, tmp_path))


@pytest.mark.parametrize(
    ("file", "overrides", "found"),
    [
        (GPT2, {"hidden_size": 64}, {"n_embd": 64}),
        (GPT2, {"n_embd": 64}, {"n_embd": 64}),
        ({**LLAMA, "head_dim": 16}, {"head_dim": None}, {"head_dim": 8}),
        ({**GPT2, "hidden_size": 48}, {"n_embd": 64}, {"n_embd": 64}),
        ({"model_type": "mixtral"}, {"num_experts": 3}, {"num_local_experts": 3}),
        ({"model_type": "qwen3_moe"}, {"num_local_experts": 3}, {"num_experts": 3}),
        ({"model_type": "deepseek_v3"}, {"num_local_experts": 16}, {"n_routed_experts": 16}),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, {"attn_config": {"attn_pdrop": 1}}, {}),
        ({"model_type": "gpt_neox", "rotary_pct": 0.25}, {"rotary_pct": 0.5}, {}),
    ],
)
def test_keys_count_under_each_of_their_names(
    file: dict[str, Any], overrides: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(spec_of(file, overrides, tmp_path))
    assert {key: getattr(config, key) for key in found} == found
    if file["model_type"] == "mpt":
        assert (config.attn_config.alibi, config.attn_config.attn_pdrop) == (False, 1)
    if file["model_type"] == "gpt_neox":
        assert config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("file", "overrides", "message"),
    [
        (GPT2, {"n_layers": 2}, "GPT2Config calls it `n_layer`."),
        (GPT2, {"n_ctx": 64}, "GPT2Config calls it `n_positions`."),
        (GPT2, {"n_laier": 2}, "Did you mean `n_layer`?"),
        (GPT2, {"num_experts": 3}, "`num_experts` is not a key of GPT2Config."),
        (GPT2, {"torch_dtype": "float32"}, "Set precision.master_dtype."),
        (GPT2, {"dtype": "bfloat16"}, "Set precision.master_dtype."),
        (GPT2, {"use_cache": True}, "Remove `use_cache`."),
        (OLD, {"attn_implementation": "eager"}, "Set model.attn_implementation."),
        ({"model_type": "deepseek_v3"}, {"num_experts": 16}, "DeepseekV3Config calls it `n_routed_experts`."),
        (WRAPPED, {"num_hidden_layers": 2}, "Write text_config: {num_hidden_layers: ...}."),
        (WRAPPED, {"text_config": {"num_hiden_layers": 2}}, "Did you mean `num_hidden_layers`?"),
        (OLD, {"rope_parameters": {"factor": 16.0}}, "`rope_parameters.factor` has no effect on rope_type default."),
        (LLAMA3, {"rope_scaling": {"beta_fast": 16.0}}, "`rope_scaling.beta_fast` has no effect on rope_type llama3."),
        ({"model_type": "phi3", "original_max_position_embeddings": 4096},
         {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 48,
                              "long_factor": [2.0] * 48, "original_max_position_embeddings": 32}},
         "the config has 4096"),
    ],
)  # fmt: skip
def test_an_override_without_effect_is_refused(
    file: dict[str, Any], overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(spec_of(file, overrides, tmp_path))
    assert message in str(caught.value)


def test_the_formula_of_llama3_by_hand(tmp_path: Path) -> None:
    """factor 16: wavelengths above 64 / 1 are 16 times as long, those below 64 / 4 as they were."""
    spec = spec_of(LLAMA3, {"rope_scaling": {"factor": 16.0}}, tmp_path)
    model = build_model(spec, torch.float32)
    materialise(model, spec, seed=0, device=torch.device("cpu"))
    found = model.get_buffer("model.rotary_emb.inv_freq").tolist()
    for value, base in zip(found, plain(500_000.0).tolist()):
        wavelength = 2 * math.pi / base
        smooth = (64 / wavelength - 1.0) / 3.0
        mixed = (1 - smooth) * base / 16 + smooth * base
        right = base / 16 if wavelength > 64 else base if wavelength < 16 else mixed
        assert math.isclose(value, right, rel_tol=tolerance.few(8, torch.float32))


def test_two_overrides_of_rotary_positions_at_once_are_refused(tmp_path: Path) -> None:
    both = {"rope_local_base_freq": 20_000.0, "rope_parameters": {"full_attention": {"factor": 8.0}}}
    with pytest.raises(ModelError, match=r"`rope_local_base_freq` beside `rope_parameters`"):
        read_config(spec_of(GEMMA, both, tmp_path))


def test_lists_as_long_as_the_layers_by_chance_are_kept(tmp_path: Path) -> None:
    file = {**OLD, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "eos_token_id": [1]}
    assert read_config(spec_of(file, {"num_hidden_layers": 2}, tmp_path)).architectures == ["LlamaForCausalLM"]
    file = {**OLD, "num_hidden_layers": 2, "eos_token_id": [1, 2]}
    assert read_config(spec_of(file, {"num_hidden_layers": 1}, tmp_path)).eos_token_id == [1, 2]

"""Parameters by name and size against Transformers models built on the meta device. Known-fault rows: none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from shardwright.arch.config_json import shape_from_config
from shardwright.arch.families import FAMILIES
from shardwright.arch.parameters import counts, named_sizes, parameters
from shardwright.arch.shape import generic_shape
from shardwright.errors import ConfigError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CASES = {
    "llama-biases": ("Llama", {**SMALL, "head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "granite": ("Granite", SMALL),
    "smollm3": ("SmolLM3", {**SMALL, "pad_token_id": 0}),
    "mistral": ("Mistral", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL),
    "qwen3-bias": ("Qwen3", {**SMALL, "attention_bias": True}),
    "gemma": ("Gemma", SMALL),
    "gemma2": ("Gemma2", SMALL),
    "gemma3": ("Gemma3Text", SMALL),
    "phi": ("Phi", {**SMALL, "qk_layernorm": True}),
    "phi3": ("Phi3", {**SMALL, "pad_token_id": 0}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 50}),
    "gpt2-inner": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 100, "vocab_size": 100}),
    "gpt_neox": ("GPTNeoX", {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}),
    "mpt": ("Mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}),
    "opt": (
        "OPT",
        {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
        | {"word_embed_proj_dim": 64, "max_position_embeddings": 50},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_transformers_name_and_size(case: str, tmp_path: Path) -> None:
    """Names and sizes of the whole model, from the config.json that save_pretrained writes."""
    kind, values = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shape = shape_from_config(tmp_path)
    assert named_sizes(shape) == wanted
    assert counts(shape).total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi", "Phi3"])
def test_keys_that_a_config_leaves_out_take_transformers_defaults(kind: str) -> None:
    """A config.json with nothing but its model_type describes the class's default model."""
    config = getattr(transformers, f"{kind}Config")()
    full, bare = shape_from_config(config.to_dict()), shape_from_config({"model_type": config.model_type})
    assert bare == full
    assert (full.layers, full.hidden, full.vocab) == (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    windows = [kind for kind in (getattr(config, "layer_types", None) or []) if kind == "sliding_attention"]
    assert full.window_layers == (config.num_hidden_layers if kind == "Mistral" else len(windows))


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX", "Mpt", "OPT", "Granite", "SmolLM3"])
def test_the_other_defaults(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    assert shape_from_config({"model_type": config.model_type}) == shape_from_config(config.to_dict())


def test_a_config_that_wraps_a_language_model_has_to_be_built() -> None:
    """gemma3's published config.json has a vision tower, which train builds too: 259,392 parameters here, not 212,672."""
    wrapped = {"model_type": "llama", "vision_config": {}, **SMALL}
    for config in (wrapped, {"model_type": "gemma3", "text_config": {"hidden_size": 2560}}):
        with pytest.raises(ConfigError, match=r"without building|do not follow"):
            shape_from_config(config)


def test_gpt3_has_175_billion_parameters() -> None:
    shape = generic_shape(layers=96, hidden=12288, heads=96, vocab=50257, learned_positions=2048)
    blocks = 96 * (12 * 12288**2 + 13 * 12288)
    assert counts(shape).total == blocks + (50257 + 2048) * 12288 + 2 * 12288
    assert {group.name for group in parameters(shape)} == {
        name.replace(".0.", ".{}.") for name in named_sizes(shape) if ".0." in name or "blocks" not in name
    }


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(ConfigError, match="Did you mean `llama`"):
        shape_from_config(tmp_path)
    assert "llama" in FAMILIES

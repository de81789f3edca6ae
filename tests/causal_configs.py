"""A small config of every kind in Transformers' table of causal language models.

Sizes are replaced in the default config wherever a key of a well-known name stands; what a kind needs beside that stands in
`_MORE`. Kinds that Transformers cannot build so are in `NOT_BUILT`, with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id"), 1),
    "vocab_size": 300,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "encoder_layers": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "rotary_dim": 4,
}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
}
NOT_BUILT = {
    "cohere_compass_text",
    "dbrx",
    "dots1",
    "dots3_note",
    "dots3_note_text",
    "gemma3n",
    "gemma3n_text",
    "zaya",
} | {*("gemma4_assistant", "musicgen", "musicgen_melody", "reformer", "zamba2")}
"""Kinds whose sizes contradict each other when they are small, or that need packages beside Transformers."""


def _small(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """`values` of a default config, and of the configs in it, with small sizes; what has no well-known name is left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            found[key] = {**_small(value, layers), "model_type": value["model_type"]}
        elif isinstance(value, int) and not isinstance(value, bool) and (key in _SIZES or key in _LAYERS):
            found[key] = layers if key in _LAYERS else _SIZES[key]
    return found


def small_config(kind: str) -> tuple[Any, torch.nn.Module] | None:
    """A small config of `kind` and its model on the meta device; None where no small config of it can be built."""
    make = CONFIG_MAPPING[kind]
    more = _MORE.get(kind, {})
    try:
        default = make().to_dict()
    except Exception:  # a kind whose defaults contradict each other
        return None
    for layers in (2, 4, 6, 8):  # some patterns of layers need more
        try:
            config = make(**{**_small(default, layers), **more})
            with torch.device("meta"):
                return config, AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception:  # Transformers says in many ways that sizes do not go together
            continue
    return None

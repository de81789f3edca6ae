"""How each model family names its parameters, and which keys of its config.json say what.

The defaults are those of the Transformers configuration classes, because a published config.json may leave them out.
A trait that is a string is the key of config.json that decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.errors import ConfigError, ModelError, did_you_mean


@dataclass(frozen=True)
class Family:
    """Names of modules (`{}` is the block's number) and traits of one family.

    mlp_tensors: tensors of the inner width that a plain MLP keeps for backward: 2 with a fused GELU, 5 with the tanh GELU
    written out, 1 with ReLU. copies_attention: partial rotary leaves heads and tokens in an order that costs a copy of
    the attention output. keeps_fused_qkv: V is a view, so all of a fused Q, K, V is kept beside rotated Q and K. All three
    as Transformers writes the family; measured by a test.
    qkv: three modules, or one that holds all three. up: the matrices from hidden to ffn; one name in a gated
    family holds gate and up. norms: the norms in a block over the hidden width. plain: key of config.json -> the value
    under which all of this holds; under another one the model is built to be counted.
    """

    name: str
    block: str = "model.layers.{}"
    embedding: str = "model.embed_tokens"
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    qk_norm: bool | str = False
    gated: bool = True
    norm_bias: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    parallel_block: bool = False
    extra_positions: int = 0
    matrix_in_first: bool = False
    mlp_tensors: int = 2
    copies_attention: bool = False
    keeps_fused_qkv: bool = False
    plain: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _defaults(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA = Family(
    "llama",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    defaults=_defaults(32000, 4096, 11008, 32, 32, None, 2048),
)
_QWEN2 = Family(
    "qwen2", qkv_bias=True, defaults=_defaults(151936, 4096, 22016, 32, 32, 32, 32768, max_window_layers=28)
)
_GEMMA = Family(
    "gemma",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    defaults=_defaults(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, tie_word_embeddings=True),
)
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    norms=_GEMMA_NORMS,
    defaults=_defaults(
        256000,
        2304,
        9216,
        26,
        8,
        4,
        8192,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
        sliding_window_pattern=2,
    ),
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    qk_norm=True,
    defaults={**_GEMMA2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
)
_FAMILIES = (
    _LLAMA,
    replace(_LLAMA, name="granite"),
    replace(
        _LLAMA, name="smollm3", defaults=_defaults(128256, 2048, 11008, 36, 16, 4, 32768, tie_word_embeddings=True)
    ),
    Family("mistral", defaults=_defaults(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096)),
    _QWEN2,
    replace(
        _QWEN2,
        name="qwen3",
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        defaults={**_QWEN2.defaults, "head_dim": 128},
    ),
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    Family(
        "phi",
        final_norm="model.final_layernorm",
        out="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        norms=("input_layernorm",),
        qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        qk_norm="qk_layernorm",
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel_block=True,
        mlp_tensors=5,
        copies_attention=True,
        defaults=_defaults(51200, 2048, 8192, 24, 32, None, 2048),
    ),
    Family(
        "phi3",
        qkv=("self_attn.qkv_proj",),
        up=("mlp.gate_up_proj",),
        copies_attention=True,
        keeps_fused_qkv=True,
        defaults=_defaults(32064, 3072, 8192, 32, 32, None, 4096),
    ),
    Family(
        "gpt2",
        block="transformer.h.{}",
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norms=("ln_1", "ln_2"),
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        matrix_in_first=True,
        mlp_tensors=5,
        plain={"add_cross_attention": False},
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        defaults={
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "gpt_neox",
        block="gpt_neox.layers.{}",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        gated=False,
        norm_bias=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias=True,
        parallel_block=True,
        copies_attention=True,
        keeps_fused_qkv=True,
        defaults=_defaults(50432, 6144, 24576, 44, 64, None, 2048, attention_bias=True),
    ),
    Family(
        "mpt",
        block="transformer.blocks.{}",
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        norms=("norm_1", "norm_2"),
        gated=False,
        plain={"expansion_ratio": 4},
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        defaults={
            "vocab_size": 50368,
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "max_seq_len": 2048,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "opt",
        block="model.decoder.layers.{}",
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        out="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        extra_positions=2,
        mlp_tensors=1,
        plain={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        keys={"intermediate_size": "ffn_dim"},
        defaults={**_defaults(50272, 768, 0, 12, 12, None, 2048, tie_word_embeddings=True), "ffn_dim": 3072},
    ),
    Family(
        "gpt",
        block="blocks.{}",
        embedding="embedding",
        positions="positions",
        final_norm="norm",
        head="head",
        qkv=("attention.qkv",),
        out="attention.out",
        up=("mlp.up",),
        down="mlp.down",
        norms=("norm_1", "norm_2"),
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

_GENERIC = "gpt"
"""The names of a shape that comes from flags or from counted parameters; no config.json is of this family."""
_WRAPPED = ("text_config", "vision_config", "audio_config")
_QUANTIZED = ("quantization_config", "compression_config")


def family_of(name: str) -> Family:
    """The family `name` (a config.json's `model_type`). Raises `ConfigError` for one that is not known."""
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type = {name!r} is not a family whose parameters are known without building the model.",
            did_you_mean(name, FAMILIES),
            "Give the shape as flags (--layers, --hidden, --heads, --ffn, --vocab), or name a model of shardwright.arch.known.",
        )
    return FAMILIES[name]


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the parameters of this config.json follow from its family, without building the model.

    They do not where the config wraps the config of a language model: the parts around the language model have parameters too.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.name == _GENERIC or any(key in config for key in _WRAPPED):
        return False
    projected = config.get("word_embed_proj_dim")  # OPT: a matrix between a narrower embedding and the blocks
    if projected not in (None, config.get("hidden_size", projected)):
        return False
    return all(config.get(key, value) == value for key, value in family.plain.items())


def refuse_quantized(config: Mapping[str, Any], place: object) -> None:
    """Raises `ModelError` where the config.json at `place`, or a config inside of it, describes quantized weights."""
    inside = [config, *(config[key] for key in _WRAPPED if isinstance(config.get(key), Mapping))]
    if any(part.get(key) for part in inside for key in _QUANTIZED):
        raise ModelError(
            f"{place} holds quantized weights.", "They cannot be trained.", "Use the weights before quantization."
        )

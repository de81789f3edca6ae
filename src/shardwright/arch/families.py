"""How each model family names its parameters, and which keys of its config.json give its sizes.

Default sizes are those of the Transformers configuration classes (5.24), because a published config.json may leave keys out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.errors import ConfigError, ModelError, did_you_mean


@dataclass(frozen=True)
class Family:
    """Names of modules, and traits, of one family. A trait that is a string is the key of config.json that decides the trait.

    `mlp_tensors`, `copies_attention` and `keeps_fused_qkv` describe the family's module in Transformers; a test measures them.
    """

    name: str  # `model_type` of the config.json
    block: str = "model.layers.{}"  # `{}` is the number of the block
    embedding: str = "model.embed_tokens"
    positions: str = ""  # the table of learned positions, empty without one
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    )  # three modules, or one fused module
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = (
        "mlp.gate_proj",
        "mlp.up_proj",
    )  # from hidden to ffn; one name in a gated family: gate and up, fused
    down: str = "mlp.down_proj"
    norms: tuple[str, ...] = (
        "input_layernorm",
        "post_attention_layernorm",
    )  # the norms of a block over the hidden width
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    qk_norm: bool | str = False  # queries and keys are normalised per head
    gated: bool = True  # the MLP has a gate
    norm_bias: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    parallel_block: bool = False  # attention and MLP read the same input
    extra_positions: int = 0  # rows of the position table beyond `max_position_embeddings`
    transposed_weights: bool = False  # weights are stored as [in, out]: Transformers' Conv1D
    mlp_tensors: int = (
        2  # tensors of width ffn that an MLP without gate keeps for backward: fused GELU 2, tanh GELU 5, ReLU 1
    )
    copies_attention: bool = False  # partial rotary reorders heads and tokens, which costs a copy of attention's output
    keeps_fused_qkv: bool = False  # V is a view: the fused Q, K, V is kept beside rotated Q and K
    plain: Mapping[str, Any] = field(
        default_factory=dict
    )  # the values of keys under which this row holds; else models are built
    keys: Mapping[str, str] = field(default_factory=dict)  # Llama's key -> this family's key, where the two differ
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by Llama's keys


def _sizes(
    vocab: int, hidden: int, ffn: int | None, layers: int, heads: int, kv_heads: int | None, positions: int, **more: Any
) -> dict[str, Any]:
    """Defaults of a family; `ffn` None: 4 x hidden."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_LLAMA = Family("llama", **_BIASES, mlp_bias="mlp_bias", defaults=_sizes(32000, 4096, 11008, 32, 32, None, 2048))
_QWEN2 = Family("qwen2", qkv_bias=True, defaults=_sizes(151936, 4096, 22016, 32, 32, 32, 32768, max_window_layers=28))
_GEMMA = Family("gemma", **_BIASES, defaults=_sizes(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, **_TIED))
_GEMMA2_SIZES = _sizes(
    256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, sliding_window=4096, sliding_window_pattern=2, **_TIED
)
_GEMMA3_SIZES = {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
_GEMMA2_NORMS = (*_GEMMA.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA2 = replace(_GEMMA, name="gemma2", norms=_GEMMA2_NORMS, defaults=_GEMMA2_SIZES)
# Layer norms and biases, and an MLP without a gate: the blocks of GPT-2 and similar models.
_GPT = Family(
    "gpt", "blocks.{}", "embedding", "positions", "norm", "head", ("attention.qkv",), "attention.out", ("mlp.up",), "mlp.down",
    ("norm_1", "norm_2"), gated=False, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip

_FAMILIES = (
    _LLAMA,
    replace(_LLAMA, name="granite"),
    replace(_LLAMA, name="smollm3", defaults=_sizes(128256, 2048, 11008, 36, 16, 4, 32768, **_TIED)),
    Family("mistral", defaults=_sizes(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096)),
    _QWEN2,
    replace(_QWEN2, name="qwen3", qk_norm=True, **_BIASES, defaults={**_QWEN2.defaults, "head_dim": 128}),
    _GEMMA,
    _GEMMA2,
    replace(_GEMMA2, name="gemma3_text", qk_norm=True, defaults={**_GEMMA2_SIZES, **_GEMMA3_SIZES}),
    Family(
        "phi", final_norm="model.final_layernorm", out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2",
        norms=("input_layernorm",), qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"), qk_norm="qk_layernorm",
        gated=False, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, parallel_block=True,
        mlp_tensors=5, copies_attention=True, defaults=_sizes(51200, 2048, 8192, 24, 32, None, 2048),
    ),
    Family(
        "phi3", qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",), copies_attention=True, keeps_fused_qkv=True,
        defaults=_sizes(32064, 3072, 8192, 32, 32, None, 4096),
    ),
    replace(
        _GPT, name="gpt2", block="transformer.h.{}", embedding="transformer.wte", positions="transformer.wpe",
        final_norm="transformer.ln_f", head="lm_head", qkv=("attn.c_attn",), out="attn.c_proj", up=("mlp.c_fc",),
        down="mlp.c_proj", norms=("ln_1", "ln_2"), transposed_weights=True, mlp_tensors=5, plain={"add_cross_attention": False},
        keys={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
        },
        defaults=_sizes(50257, 768, None, 12, 12, None, 1024, **_TIED),
    ),
    Family(
        "gpt_neox", "gpt_neox.layers.{}", "gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm",
        qkv=("attention.query_key_value",), out="attention.dense", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h",
        gated=False, norm_bias=True, **_BIASES, mlp_bias=True, parallel_block=True, copies_attention=True, keeps_fused_qkv=True,
        defaults=_sizes(50432, 6144, 24576, 44, 64, None, 2048, attention_bias=True),
    ),
    Family(
        "mpt", "transformer.blocks.{}", "transformer.wte", final_norm="transformer.norm_f", qkv=("attn.Wqkv",),
        out="attn.out_proj", up=("ffn.up_proj",), down="ffn.down_proj", norms=("norm_1", "norm_2"), gated=False,
        plain={"expansion_ratio": 4},
        keys={
            "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        defaults=_sizes(50368, 2048, None, 24, 16, None, 2048, **_TIED),
    ),
    replace(
        _GPT, name="opt", block="model.decoder.layers.{}", embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions", final_norm="model.decoder.final_layer_norm", head="lm_head", qkv=_LLAMA.qkv,
        out="self_attn.out_proj", up=("fc1",), down="fc2", norms=("self_attn_layer_norm", "final_layer_norm"),
        extra_positions=2, mlp_tensors=1,
        plain={
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        keys={"intermediate_size": "ffn_dim"}, defaults=_sizes(50272, 768, 3072, 12, 12, None, 2048, **_TIED),
    ),
    _GPT,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

_WRAPPED = ("text_config", "vision_config", "audio_config")
_QUANTIZED = ("quantization_config", "compression_config")


def family_of(name: str) -> Family:
    """The family `name`, the `model_type` of a config.json. Raises `ConfigError` for an unknown family."""
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type = {name!r} is not a known family: its parameters do not follow from the config.json alone.",
            did_you_mean(name, FAMILIES),
            "Give the sizes as flags (--layers, --hidden, --heads, --ffn, --vocab), or name a well-known model (llama-3-8b).",
        )
    return FAMILIES[name]


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the parameters follow from this config.json, without building the model.

    They do not follow from a config that wraps the config of a language model: the other parts have parameters too.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family is _GPT or any(key in config for key in _WRAPPED):
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
            f"{place} holds quantized weights.",
            "Quantized weights cannot be trained.",
            "Use the weights before quantization.",
        )

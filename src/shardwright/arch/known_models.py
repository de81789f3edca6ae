"""Shapes of well-known models, so that `plan --model llama-3-8b` needs no file.

Sizes are those of the published config.json, or of the table in the paper where no weights were published.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from shardwright.arch.config_json import shape_from_config
from shardwright.arch.shape import Shape, generic_shape
from shardwright.errors import ConfigError, did_you_mean

# name: (layers, hidden, heads, kv_heads, ffn), then what differs from the defaults of the family.
_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_Sizes = tuple[int, int, int, int, int]
_LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192}
_LLAMA31 = {**_LLAMA3, "max_position_embeddings": 131072}
_QWEN25 = {"model_type": "qwen2", "vocab_size": 152064}
_QWEN25_TIED = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
_QWEN3_TIED = {**_QWEN3, "tie_word_embeddings": True}
_MISTRAL = {"model_type": "mistral", "sliding_window": None}
_GEMMA = {"model_type": "gemma", "head_dim": 256}
_GEMMA2 = {"model_type": "gemma2", "head_dim": 256}
_GEMMA3 = {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 1024}
_PHI3 = {"model_type": "phi3"}
_NEOX = {"model_type": "gpt_neox"}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192}

_PUBLISHED: dict[str, tuple[_Sizes, Mapping[str, object]]] = {
    "llama-2-7b": ((32, 4096, 32, 32, 11008), _LLAMA2),
    "llama-2-13b": ((40, 5120, 40, 40, 13824), _LLAMA2),
    "llama-2-70b": ((80, 8192, 64, 8, 28672), _LLAMA2),
    "llama-3-8b": ((32, 4096, 32, 8, 14336), _LLAMA3),
    "llama-3-70b": ((80, 8192, 64, 8, 28672), _LLAMA3),
    "llama-3.1-8b": ((32, 4096, 32, 8, 14336), _LLAMA31),
    "llama-3.1-70b": ((80, 8192, 64, 8, 28672), _LLAMA31),
    "llama-3.1-405b": ((126, 16384, 128, 8, 53248), _LLAMA31),
    "llama-3.2-1b": ((16, 2048, 32, 8, 8192), {**_LLAMA31, "head_dim": 64, "tie_word_embeddings": True}),
    "llama-3.2-3b": ((28, 3072, 24, 8, 8192), {**_LLAMA31, "head_dim": 128, "tie_word_embeddings": True}),
    "llama-3.3-70b": ((80, 8192, 64, 8, 28672), _LLAMA31),
    "qwen2.5-0.5b": ((24, 896, 14, 2, 4864), _QWEN25_TIED),
    "qwen2.5-1.5b": ((28, 1536, 12, 2, 8960), _QWEN25_TIED),
    "qwen2.5-3b": ((36, 2048, 16, 2, 11008), _QWEN25_TIED),
    "qwen2.5-7b": ((28, 3584, 28, 4, 18944), _QWEN25),
    "qwen2.5-14b": ((48, 5120, 40, 8, 13824), _QWEN25),
    "qwen2.5-32b": ((64, 5120, 40, 8, 27648), _QWEN25),
    "qwen2.5-72b": ((80, 8192, 64, 8, 29568), _QWEN25),
    "qwen3-0.6b": ((28, 1024, 16, 8, 3072), _QWEN3_TIED),
    "qwen3-1.7b": ((28, 2048, 16, 8, 6144), _QWEN3_TIED),
    "qwen3-4b": ((36, 2560, 32, 8, 9728), _QWEN3_TIED),
    "qwen3-8b": ((36, 4096, 32, 8, 12288), _QWEN3),
    "qwen3-14b": ((40, 5120, 40, 8, 17408), _QWEN3),
    "qwen3-32b": ((64, 5120, 64, 8, 25600), _QWEN3),
    "mistral-7b": ((32, 4096, 32, 8, 14336), {**_MISTRAL, "vocab_size": 32768}),
    "mistral-7b-v0.1": ((32, 4096, 32, 8, 14336), {"model_type": "mistral", "sliding_window": 4096}),
    "mistral-nemo-12b": ((40, 5120, 32, 8, 14336), {**_MISTRAL, "vocab_size": 131072, "head_dim": 128}),
    "mistral-large-123b": ((88, 12288, 96, 8, 28672), {**_MISTRAL, "vocab_size": 32768}),
    "gemma-2b": ((18, 2048, 8, 1, 16384), _GEMMA),
    "gemma-7b": ((28, 3072, 16, 16, 24576), _GEMMA),
    "gemma-2-2b": ((26, 2304, 8, 4, 9216), _GEMMA2),
    "gemma-2-9b": ((42, 3584, 16, 8, 14336), _GEMMA2),
    "gemma-2-27b": ((46, 4608, 32, 16, 36864), {**_GEMMA2, "head_dim": 128}),
    "gemma-3-1b": ((26, 1152, 4, 1, 6912), {**_GEMMA3, "vocab_size": 262144, "sliding_window": 512}),
    "gemma-3-4b": ((34, 2560, 8, 4, 10240), _GEMMA3),
    "gemma-3-12b": ((48, 3840, 16, 8, 15360), _GEMMA3),
    "gemma-3-27b": ((62, 5376, 32, 16, 21504), {**_GEMMA3, "head_dim": 128}),
    "phi-2": ((32, 2560, 32, 32, 10240), {"model_type": "phi"}),
    "phi-3-mini": ((32, 3072, 32, 32, 8192), _PHI3),
    "phi-3-medium": ((40, 5120, 40, 10, 17920), _PHI3),
    "phi-4": ((40, 5120, 40, 10, 17920), {**_PHI3, "vocab_size": 100352, "max_position_embeddings": 16384}),
    "gpt-neox-20b": ((44, 6144, 64, 64, 24576), _NEOX),
    "pythia-1b": ((16, 2048, 8, 8, 8192), {**_NEOX, "vocab_size": 50304}),
    "pythia-6.9b": ((32, 4096, 32, 32, 16384), _NEOX),
    "pythia-12b": ((36, 5120, 40, 40, 20480), {**_NEOX, "vocab_size": 50688}),
    "smollm2-135m": ((30, 576, 9, 3, 1536), _SMOLLM2),
    "smollm2-360m": ((32, 960, 15, 5, 2560), _SMOLLM2),
    "smollm2-1.7b": ((24, 2048, 32, 32, 8192), _SMOLLM2),
    "smollm3-3b": ((36, 2048, 16, 4, 11008), {"model_type": "smollm3"}),
}

# name: (layers, hidden, heads, vocab, rows of the position table). GPT blocks with biases and a tied head.
# gpt2-*: Radford et al. 2019. gpt-3-175b: Brown et al. 2020 (arXiv:2005.14165), table 2.1.
# megatron-*: Narayanan et al. 2021 (arXiv:2104.04473), table 1; 22b and 175b: Korthikanti et al. 2022
# (arXiv:2205.05198), table 3. mpt-*: llm-foundry, scripts/train/yamls/pretrain.
_GPT: dict[str, tuple[int, int, int, int, int]] = {
    "gpt2": (12, 768, 12, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 50257, 1024),
    "gpt-3-175b": (96, 12288, 96, 50257, 2048),
    "megatron-1.7b": (24, 2304, 24, 51200, 2048),
    "megatron-3.6b": (30, 3072, 32, 51200, 2048),
    "megatron-7.5b": (36, 4096, 32, 51200, 2048),
    "megatron-18b": (40, 6144, 48, 51200, 2048),
    "megatron-22b": (48, 6144, 64, 51200, 2048),
    "megatron-39b": (48, 8192, 64, 51200, 2048),
    "megatron-76b": (60, 10240, 80, 51200, 2048),
    "megatron-145b": (80, 12288, 96, 51200, 2048),
    "megatron-175b": (96, 12288, 96, 51200, 2048),
    "megatron-310b": (96, 16384, 128, 51200, 2048),
    "megatron-530b": (105, 20480, 128, 51200, 2048),
    "megatron-1t": (128, 25600, 160, 51200, 2048),
    "mpt-125m": (12, 768, 12, 50368, 2048),
    "mpt-350m": (24, 1024, 16, 50368, 2048),
    "mpt-760m": (24, 1536, 12, 50368, 2048),
    "mpt-1b": (24, 2048, 16, 50368, 2048),
    "mpt-3b": (32, 2560, 20, 50368, 2048),
    "mpt-7b": (32, 4096, 32, 50368, 2048),
    "mpt-13b": (40, 5120, 40, 50368, 2048),
    "mpt-30b": (48, 7168, 56, 50368, 2048),
    "mpt-70b": (80, 8192, 64, 50368, 2048),
}


@cache
def known_shape(name: str) -> Shape:
    """The shape of a well-known model; upper case, an owner before `/`, and `_` for `-` are understood.

    Raises `ConfigError` with the nearest name.
    """
    key = name.lower().rsplit("/", 1)[-1].replace("_", "-").removesuffix("-hf")
    if key in _GPT:
        layers, hidden, heads, vocab, positions = _GPT[key]
        return generic_shape(
            layers=layers, hidden=hidden, heads=heads, vocab=vocab, learned_positions=positions, name=key
        )
    if key not in _PUBLISHED:
        raise ConfigError(
            f"{name!r} is neither a model directory nor a well-known model.", did_you_mean(key, (*_PUBLISHED, *_GPT))
        )
    sizes, rest = _PUBLISHED[key]
    return shape_from_config({**dict(zip(_KEYS, sizes)), **rest, "_name_or_path": key})

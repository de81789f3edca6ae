"""The shape of a transformer language model, read from its config.json without torch or Transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.arch.families import Family, family_of, is_known
from shardwright.arch.shape import Shape
from shardwright.errors import ConfigError

_WINDOW = ("sliding_window", "attention_chunk_size", "window_size")
_LAYER_KINDS = ("layer_types", "attention_layers")
_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def _value(config: Mapping[str, Any], family: Family, key: str) -> Any:
    """The value of Llama's key `key` in the family's config, or its default."""
    value = config.get(family.keys.get(key, key))
    return family.defaults.get(key) if value is None else value


def windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """(window, number of layers with it) of a config that Transformers has completed."""
    window = next((config[key] for key in _WINDOW if config.get(key)), None)
    kinds = next((config[key] for key in _LAYER_KINDS if isinstance(config.get(key), list)), None)
    count = layers if kinds is None else sum(kind in _WINDOWED for kind in kinds)
    if window is None or count == 0 or config.get("use_sliding_window") is False:
        return None, 0
    return int(window), count


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, int]:
    """(window, number of layers with it) of a config.json that leaves keys out, by the rules of its class in Transformers."""
    window = config["sliding_window"] if "sliding_window" in config else family.defaults.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None, 0
    if isinstance(config.get("layer_types"), list):
        return windows({**config, "sliding_window": window}, layers)
    pattern = config.get("sliding_window_pattern", family.defaults.get("sliding_window_pattern"))
    if pattern:
        return int(window), layers - layers // int(pattern)
    if family.name in ("qwen2", "qwen3", "smollm3"):
        if not config.get("use_sliding_window"):
            return None, 0
        return int(window), max(layers - int(_value(config, family, "max_window_layers")), 0)
    return int(window), layers


def read_config(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping in a config.json: a mapping itself, the file, or the directory that holds it."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_float)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.",
            "",
            "Give a Hugging Face directory or the path of a config.json.",
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return config


def _float(found: dict[str, Any]) -> Any:
    """The number that Transformers (5.x) writes as `{"__float__": "Infinity"}`, since JSON has no infinity."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def shape_from_config(source: str | Path | Mapping[str, Any]) -> Shape:
    """The shape that a config.json describes: `source` is the file, its directory, or the mapping itself.

    Raises `ConfigError` for an unknown family, for a model with parts that do not follow from its family, and for heads that do
    not divide.
    """
    config = read_config(source)
    if "model_type" not in config:
        raise ConfigError(
            "The config has no `model_type`.", "The key names the model's family.", "Add the key, for example `llama`."
        )
    family = family_of(str(config["model_type"]))
    if not is_known(config):
        raise ConfigError(
            f"The parameters of this {family.name} do not follow from its config.json alone.",
            "The model has parts beside a plain language model.",
            "Give the model's directory to `shardwright plan`: the model is then built, and its parameters are counted.",
        )

    def value(key: str) -> Any:
        return _value(config, family, key)

    def trait(decides: bool | str) -> bool:
        return bool(value(decides)) if isinstance(decides, str) else decides

    layers, hidden, heads = (int(value(key)) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = int(value("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}.")
    positions = int(value("max_position_embeddings") or 0)
    window, window_layers = _windows(config, family, layers)
    return Shape(
        family=family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(value("head_dim") or hidden // heads),
        ffn=int(value("intermediate_size") or 4 * hidden),
        vocab=int(value("vocab_size")),
        gated=family.gated,
        tied=bool(value("tie_word_embeddings")),
        norm_bias=family.norm_bias,
        norms_per_block=len(family.norms),
        qk_norm=trait(family.qk_norm),
        qkv_bias=trait(family.qkv_bias),
        out_bias=trait(family.out_bias),
        mlp_bias=trait(family.mlp_bias),
        head_bias=family.head_bias,
        learned_positions=positions + family.extra_positions if family.positions else 0,
        window=window if window_layers else None,
        window_layers=window_layers,
        parallel_block=family.parallel_block,
        max_positions=positions,
        name=str(config.get("_name_or_path") or ""),
    )

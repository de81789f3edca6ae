"""The shape of a transformer language model, read from its config.json, and every parameter it has.

No torch and no transformers: a config.json is JSON, and the names and sizes follow from the family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwright.arch.families import Family, family_of, is_known
from shardwright.arch.shape import Group, Matmul, Part, Shape, Split
from shardwright.errors import ConfigError

_WINDOW = ("sliding_window", "attention_chunk_size", "window_size")
_LAYER_KINDS = ("layer_types", "attention_layers")
_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def _value(config: Mapping[str, Any], family: Family, key: str) -> Any:
    name = family.keys.get(key, key)
    value = config.get(name)
    return family.defaults.get(name) if value is None else value


def _trait(config: Mapping[str, Any], family: Family, trait: bool | str) -> bool:
    return bool(_value(config, family, trait)) if isinstance(trait, str) else trait


def windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """(window, number of windowed layers) that a config which Transformers has completed says."""
    window = next((config[key] for key in _WINDOW if config.get(key)), None)
    kinds = next((config[key] for key in _LAYER_KINDS if isinstance(config.get(key), list)), None)
    count = layers if kinds is None else sum(kind in _WINDOWED for kind in kinds)
    if window is None or count == 0 or config.get("use_sliding_window") is False:
        return None, 0
    return int(window), count


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, int]:
    """(window, number of windowed layers) of a config.json that leaves keys out, by the rules of the family's class."""
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
            f"{path} cannot be read: {error.strerror}.", "", "Name a Hugging Face directory or config.json."
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return config


def _float(found: dict[str, Any]) -> Any:
    """The number that Transformers writes as `{"__float__": "Infinity"}`, since JSON has no infinity."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def shape_from_config(source: str | Path | Mapping[str, Any]) -> Shape:
    """The shape that a Hugging Face config.json describes.

    `source` is the file, its directory, or the mapping itself. Raises `ConfigError` for a family that is not known, for
    one with parts that do not follow from it, and for heads that do not divide.
    """
    config = read_config(source)
    if "model_type" not in config:
        raise ConfigError("The config has no `model_type`.", "It names the family.", "Add it, for example `llama`.")
    family = family_of(str(config["model_type"]))
    name = str(config.get("_name_or_path") or "")
    if not is_known(config):
        raise ConfigError(
            f"The parameters of this {family.name} do not follow from its config.json alone.",
            "The model has parts beside a plain language model.",
            "Install torch and Transformers: the model is then built, and its parameters are counted.",
        )
    numbers = {
        key: _value(config, family, key)
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    }
    for key, value in numbers.items():
        if value is None:
            raise ConfigError(
                f"The config has no `{family.keys.get(key, key)}`.", f"{family.name} has no default for it."
            )
    layers, hidden, heads, vocab = (int(value) for value in numbers.values())
    kv_heads = int(_value(config, family, "num_key_value_heads") or heads)
    head_dim = int(_value(config, family, "head_dim") or hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}.")
    ffn = _value(config, family, "intermediate_size") or 4 * hidden
    positions = int(_value(config, family, "max_position_embeddings") or 0)
    window, window_layers = _windows(config, family, layers)
    return Shape(
        family=family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(ffn),
        vocab=vocab,
        gated=family.gated,
        tied=bool(_value(config, family, "tie_word_embeddings")),
        norm_bias=family.norm_bias,
        norms_per_block=len(family.norms),
        qk_norm=_trait(config, family, family.qk_norm),
        qkv_bias=_trait(config, family, family.qkv_bias),
        out_bias=_trait(config, family, family.out_bias),
        mlp_bias=_trait(config, family, family.mlp_bias),
        head_bias=family.head_bias,
        learned_positions=positions + family.extra_positions if family.positions else 0,
        window=window if window_layers else None,
        window_layers=window_layers,
        parallel_block=family.parallel_block,
        max_positions=positions,
        name=name,
    )


def generic_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = False,
    tied: bool = True,
    biases: bool = True,
    learned_positions: int = 0,
    name: str = "",
) -> Shape:
    """A GPT of these sizes: pre-norm blocks of attention and MLP; ffn defaults to 4 x hidden, head_dim to hidden / heads."""
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"hidden = {hidden} is not divisible by heads = {heads}.", "Heads are equally wide.", "Give head_dim."
        )
    return Shape(
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn or 4 * hidden,
        vocab=vocab,
        gated=gated,
        tied=tied,
        norm_bias=biases,
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=biases,
        learned_positions=learned_positions,
        max_positions=learned_positions,
        name=name,
    )


def _linear(
    names: str, fan_in: int, fan_out: int, bias: bool, count: int, part: Part, split: Split, units: int, in_first: bool
) -> Iterator[Group]:
    size = (fan_in, fan_out) if in_first else (fan_out, fan_in)
    yield Group(f"{names}.weight", size, count, part, split, units)
    if bias:
        # The bias of a row-parallel product is added once, after the sum: every rank holds it.
        yield Group(f"{names}.bias", (fan_out,), count, part, None if split == "row" else split, units)


def _norm(name: str, width: int, bias: bool, count: int) -> Iterator[Group]:
    yield Group(f"{name}.weight", (width,), count, "norm")
    if bias:
        yield Group(f"{name}.bias", (width,), count, "norm")


def _block(s: Shape, family: Family) -> Iterator[Group]:
    at, first = family.block, family.matrix_in_first
    for name in family.norms:
        yield from _norm(f"{at}.{name}", s.hidden, s.norm_bias, s.layers)
    widths: tuple[int, ...] = (s.query_width, s.kv_width, s.kv_width)
    pieces: tuple[int, ...] = (s.heads, s.kv_heads, s.kv_heads)
    if len(family.qkv) == 1:
        widths, pieces = (sum(widths),), (s.kv_heads,)
    for name, width, units in zip(family.qkv, widths, pieces):
        yield from _linear(f"{at}.{name}", s.hidden, width, s.qkv_bias, s.layers, "attention", "column", units, first)
    if s.qk_norm:
        for name in family.qk_norms:
            yield from _norm(f"{at}.{name}", s.head_dim, s.norm_bias, s.layers)
    yield from _linear(
        f"{at}.{family.out}", s.query_width, s.hidden, s.out_bias, s.layers, "attention", "row", s.heads, first
    )
    for name in family.up:
        width = 2 * s.ffn if s.gated and len(family.up) == 1 else s.ffn
        yield from _linear(f"{at}.{name}", s.hidden, width, s.mlp_bias, s.layers, "mlp", "column", s.ffn, first)
    yield from _linear(f"{at}.{family.down}", s.ffn, s.hidden, s.mlp_bias, s.layers, "mlp", "row", s.ffn, first)


@lru_cache(maxsize=256)
def parameters(shape: Shape) -> tuple[Group, ...]:
    """Every parameter of the model, by name and size, blocks folded into one group each.

    A tied head is the embedding and is not listed again. Names and sizes equal those of the Transformers model.
    """
    if shape.counted is not None:
        return shape.counted.groups
    s, family = shape, family_of(shape.family)
    groups = [Group(f"{family.embedding}.weight", (s.vocab, s.hidden), 1, "embedding", "vocabulary", s.vocab)]
    if s.learned_positions:
        groups.append(Group(f"{family.positions}.weight", (s.learned_positions, s.hidden), 1, "positions"))
    groups += _block(s, family)
    groups += _norm(family.final_norm, s.hidden, s.norm_bias, 1)
    if not s.tied:
        groups.append(Group(f"{family.head}.weight", (s.vocab, s.hidden), 1, "head", "vocabulary", s.vocab))
    if s.head_bias:
        groups.append(Group(f"{family.head}.bias", (s.vocab,), 1, "head", "vocabulary", s.vocab))
    return tuple(groups)


def named_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """{fully qualified name: size} of every parameter, blocks written out."""
    return {group.name.format(index): group.size for group in parameters(shape) for index in range(group.count)}


@dataclass(frozen=True)
class Counts:
    """Elements by place. `block` is one block; `head` is 0 where it is tied to the embedding.

    block_split: the part of a block that tensor parallelism divides; block_whole: the part every rank holds.
    """

    embedding: int
    positions: int
    block_split: int
    block_whole: int
    final_norm: int
    head: int
    total: int

    @property
    def block(self) -> int:
        return self.block_split + self.block_whole


@lru_cache(maxsize=256)
def counts(shape: Shape) -> Counts:
    """Parameters of the model by place; `total` counts a tied matrix once."""
    place = dict.fromkeys(("embedding", "positions", "block_split", "block_whole", "final_norm", "head"), 0)
    block = family_of(shape.family).block + "."
    for group in parameters(shape):
        if group.name.startswith(block):
            place["block_split" if group.split else "block_whole"] += group.numel
        elif group.part == "norm":
            place["final_norm"] += group.numel
        else:
            place[group.part] += group.numel
    total = sum(group.numel * group.count for group in parameters(shape))
    return Counts(**place, total=total)


@lru_cache(maxsize=256)
def matrix_weights(shape: Shape) -> tuple[int, int]:
    """(matrix elements of a block, of the head): what multiplies every token. A tied head counts: it multiplies too."""
    block = family_of(shape.family).block + "."
    inside = [g for g in parameters(shape) if g.name.startswith(block) and len(g.size) > 1]
    return sum(g.numel * g.count for g in inside) // shape.layers, shape.vocab * shape.hidden


@lru_cache(maxsize=256)
def matmuls(shape: Shape) -> tuple[Matmul, ...]:
    """The weight products of one block, each on all tokens; attention's own two products are not here."""
    s = shape
    qkv = s.query_width + 2 * s.kv_width
    return (
        Matmul("qkv", s.hidden, qkv, "column"),
        Matmul("out", s.query_width, s.hidden, "row"),
        Matmul("up", s.hidden, (2 if s.gated else 1) * s.ffn, "column"),
        Matmul("down", s.ffn, s.hidden, "row"),
    )

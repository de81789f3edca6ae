"""Makes a run that is too large for this machine small, and keeps what matters for a check.

Kept: the family and its options, the ratio of query to key-value heads, of hidden to head width and of feed-forward to
hidden, tying, the remainder of the vocabulary modulo every axis size up to 8, at least one layer of each kind and at least
four. Float64 needs, in bytes per parameter: 8 x (parameter, gradient, two moments, gradient bucket) on each rank, and one
whole copy on rank 0 while it writes. The disk holds 8 x 4 for each update of each record: the reference's, and one for each
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError
from shardwright.units import format_bytes, format_count

SHARE = 0.6
"""Share of the free memory and of the free disk that a check may use."""

WORK_FLOPS = 2e12
"""Limit of the floating-point operations of one layout's updates: some minutes on a CPU."""

SMALL = {"heads": 2, "head_dim": 16, "layers": 4, "rows": 2, "microbatches": 3, "max_length": 128}
_VOCABULARY_UNIT = 840  # the least common multiple of 1 to 8

_NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "feed_forward": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "window_layers": ("max_window_layers",),
}


@dataclass(frozen=True)
class Size:
    """The quantities that the cost of a check follows from; `activation_width` counts numbers per token."""

    parameters: int
    activation_width: int
    microbatch_tokens: int
    update_tokens: int

    def memory_bytes(self, ranks: int) -> int:
        """Peak over all processes of a check in float64."""
        activations = 8 * self.microbatch_tokens * self.activation_width
        return ranks * (40 * self.parameters + activations) + 8 * self.parameters

    def disk_bytes(self, updates: int, records: int) -> int:
        """Parameters at the start; gradients, parameters and two moments of each update; in each record."""
        return records * 8 * self.parameters * (1 + 4 * updates)

    def flops(self, updates: int) -> float:
        """Forward and backward of the updates: 6 per parameter and token."""
        return 6.0 * self.parameters * self.update_tokens * updates


def activation_width(config: dict[str, Any], max_length: int) -> int:
    """About how many numbers forward keeps per token: 16 widths and 3 feed-forward widths a layer, attention, four logits."""
    hidden, layers, vocabulary = (_value(config, key) for key in ("hidden", "layers", "vocabulary"))
    feed_forward = _value(config, "feed_forward") or 4 * hidden
    heads = _value(config, "heads")
    return layers * (16 * hidden + 3 * feed_forward + 2 * heads * max_length) + 4 * vocabulary


def _key(config: dict[str, Any], meaning: str) -> str | None:
    return next((name for name in _NAMES[meaning] if name in config), None)


def _value(config: dict[str, Any], meaning: str) -> int:
    key = _key(config, meaning)
    return int(config[key] or 0) if key is not None else 0


def shrunk_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a Transformers config to override for a small model of the same kind. Values that are small stay."""
    hidden, layers, heads, vocabulary = (_value(config, m) for m in ("hidden", "layers", "heads", "vocabulary"))
    kv_heads = _value(config, "kv_heads") or heads
    head_dim = _value(config, "head_dim") or hidden // heads
    new_kv = min(kv_heads, SMALL["heads"])
    new_heads = new_kv * (heads // kv_heads)
    new_head_dim = min(head_dim, SMALL["head_dim"])
    widths = round(hidden / head_dim)  # hidden in units of the head's width; not always the number of heads
    new_hidden = new_head_dim * max(1, round(widths * new_heads / heads))
    new: dict[str, int] = {
        "hidden": new_hidden,
        "heads": new_heads,
        "kv_heads": new_kv,
        "head_dim": new_head_dim,
        "layers": min(layers, max(SMALL["layers"], _layers_of_each_kind(config))),
        "vocabulary": min(vocabulary, _VOCABULARY_UNIT + vocabulary % _VOCABULARY_UNIT),
    }
    if feed_forward := _value(config, "feed_forward"):
        new["feed_forward"] = max(1, round(feed_forward * new_hidden / hidden))
    if new["layers"] < layers and (window_layers := _value(config, "window_layers")):
        new["window_layers"] = min(window_layers, new["layers"])
    overrides: dict[str, Any] = {}
    for meaning, value in new.items():
        key = _key(config, meaning)
        if key is not None and config[key] is not None:
            overrides[key] = value
    if factors := _shrunk_factors(config.get("rope_parameters") or {}, head_dim, new_head_dim):
        overrides["rope_parameters"] = factors
    if config.get("layer_types"):
        overrides["layer_types"] = config["layer_types"][: new["layers"]]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(config.get(key), int):
            overrides[key] = config[key] % new["vocabulary"]
        elif isinstance(config.get(key), list):
            overrides[key] = [token % new["vocabulary"] for token in config[key]]
    return {key: value for key, value in overrides.items() if value != config[key]}


def _shrunk_factors(rope: dict[str, Any], head_dim: int, new_head_dim: int) -> dict[str, list[float]]:
    """The lists of `rope` with a number for each frequency of a head, cut down to the frequencies of the smaller head."""
    lists = {key: rope[key] for key in ("short_factor", "long_factor") if isinstance(rope.get(key), list)}
    if new_head_dim == head_dim:
        return {}
    counts = {key: max(1, len(factors) * new_head_dim // head_dim) for key, factors in lists.items()}
    return {
        key: [factors[i * len(factors) // counts[key]] for i in range(counts[key])] for key, factors in lists.items()
    }


def _layers_of_each_kind(config: dict[str, Any]) -> int:
    """The fewest first layers among which every kind of layer occurs."""
    kinds = config.get("layer_types") or []
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)


def shrunk_rows(run: RunFile, data_ranks: int) -> RunFile:
    """`run` with shorter rows, fewer of them in a microbatch, and fewer microbatches; at least two where there were."""
    t = run.training
    rows = min(t.per_device_train_batch_size, SMALL["rows"])
    before = t.global_batch_size // (t.per_device_train_batch_size * data_ranks)
    microbatches = min(before if before > 1 else SMALL["microbatches"], SMALL["microbatches"])
    training = t.model_copy(
        update={"per_device_train_batch_size": rows, "global_batch_size": rows * microbatches * data_ranks}
    )
    data = run.data.model_copy(update={"max_length": min(run.data.max_length, SMALL["max_length"])})
    return run.model_copy(update={"training": training, "data": data})


@dataclass(frozen=True)
class Limits:
    """What a check may use: bytes of memory and disk, floating-point operations per layout."""

    memory_bytes: int
    disk_bytes: int
    flops: float = WORK_FLOPS

    def exceeded(self, size: Size, ranks: int, updates: int, records: int) -> str:
        """Why `size` does not fit, or nothing."""
        memory, disk, flops = size.memory_bytes(ranks), size.disk_bytes(updates, records), size.flops(updates)
        if memory > self.memory_bytes:
            return f"{format_bytes(memory)} of memory where {format_bytes(self.memory_bytes)} may be used"
        if disk > self.disk_bytes:
            return f"{format_bytes(disk)} of disk where {format_bytes(self.disk_bytes)} may be used"
        if flops > self.flops:
            return f"{flops:.1e} floating-point operations a layout where {self.flops:.0e} are the limit"
        return ""


def describe_shrinking(config: dict[str, Any], overrides: dict[str, Any], before: int, after: int, reason: str) -> str:
    """The line that reports what was shrunk and why."""
    changed = ", ".join(f"{key} {config[key]} -> {value}" for key, value in overrides.items() if isinstance(value, int))
    return (
        f"The model is shrunk from {format_count(before)} to {format_count(after)} parameters ({reason}): {changed}; "
        "ids are taken modulo the vocabulary, weights are random."
    )


def refuse(reason: str) -> ConfigError:
    """The error for a model that is too large and cannot be shrunk."""
    return ConfigError(
        f"This model is too large to check here: {reason}.",
        "Only models from a config.json can be shrunk.",
        "Check a smaller variant of your function (model.kwargs), with the same kinds of layers.",
    )

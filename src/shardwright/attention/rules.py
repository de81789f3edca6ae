"""What is refused of a model whose core attention is replaced: whatever would lose or mix tokens, by name.

Both replacements need it: that of context parallelism, and that of packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.attention.calls import AttentionCall, Seen, blocks_without_attention
from shardwright.errors import ModelError
from shardwright.models.model_parts import find_parts
from shardwright.models.position_tables import numbers_from_elsewhere

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Replacement:
    """What replaces the core attention, and the words for what would go wrong.

    known: arguments of attention that it understands beside those that every attention has.
    """

    name: str
    fix: str
    bypassed: str
    convolution: str
    not_causal: str
    known: tuple[str, ...] = ()


def check_attention(model: nn.Module, values: dict[str, Any], seen: Seen, by: Replacement) -> None:
    """Raises `ModelError` unless tokens of `model` see each other through calls that `by` understands.

    values: the model's config. seen: its calls in one forward.
    """
    _check_numbering(model, by)
    _check_mixing(model, seen, by)
    for call in seen.calls:
        _check_call(call, by)
    _check_windows(type(model).__name__, values, seen, by)


def _named(values: Any, key: str) -> Iterator[Any]:
    """Every value of `key` in nested mappings."""
    if isinstance(values, dict):
        if values.get(key) is not None:
            yield values[key]
        for value in values.values():
            yield from _named(value, key)


def check_config(name: str, values: dict[str, Any], by: Replacement) -> None:
    """Raises `ModelError` for what the config of model `name` says already, before the model is looked into."""
    for kinds in _named(values, "layer_types"):
        for kind in kinds:
            if kind not in LAYER_TYPES:
                raise ModelError(
                    f"{name} has layers of type {kind}.",
                    f"{by.name} knows {' and '.join(LAYER_TYPES)}.",
                    by.fix,
                )


def _check_numbering(model: nn.Module, by: Replacement) -> None:
    """Refuses a model that by itself numbers tokens otherwise than from 0; here positions from 0 are given to the model."""
    if table := numbers_from_elsewhere(model):
        raise ModelError(
            f"{type(model).__name__} does not give its first token position 0 of `{table}`.",
            f"{by.name} gives the model positions from 0, which are not those of its pretraining.",
            by.fix,
        )


def _check_mixing(model: nn.Module, seen: Seen, by: Replacement) -> None:
    """Refuses blocks that mix tokens by anything else than the core attention."""
    name = type(model).__name__
    if missing := blocks_without_attention(model, seen.calls):
        raise ModelError(
            f"`{missing[0]}` of {name} does not call attention through AttentionInterface ({len(missing)} blocks).",
            by.bypassed,
            by.fix,
        )
    for block in find_parts(model).blocks:
        for path, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Conv1d):
                raise ModelError(f"`{block}.{path}` of {name} is a convolution over tokens.", by.convolution, by.fix)


def _check_call(call: AttentionCall, by: Replacement) -> None:
    if not call.causal:
        raise ModelError(f"`{call.module}` is not causal.", by.not_causal, by.fix)
    if unknown := [name for name in call.others if name not in by.known]:
        raise ModelError(f"`{call.module}` asks for {', '.join(unknown)}.", f"{by.name} does not know it.", by.fix)


def _check_windows(name: str, values: dict[str, Any], seen: Seen, by: Replacement) -> None:
    """Refuses windows that the config has and the calls do not name: they would be in a mask that is not built."""
    kinds = values.get("layer_types")
    if kinds:
        expected = sum(kind == "sliding_attention" for kind in kinds)
    else:
        used = values.get("sliding_window") is not None and values.get("use_sliding_window") is not False
        expected = len(seen.calls) if used else 0
    if sum(call.window is not None for call in seen.calls) < expected:
        raise ModelError(
            f"{name} has {expected} layers with a sliding window that they do not pass to attention.",
            "It would be lost.",
            by.fix,
        )

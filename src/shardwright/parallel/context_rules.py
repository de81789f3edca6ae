"""What context parallelism refuses of a model: whatever would make a rank's tokens miss the rest of their row, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardwright.config.schema import RunFile
from shardwright.errors import ModelError
from shardwright.models.adapters import find_parts
from shardwright.models.attention_calls import AttentionCall, Seen, blocks_without_attention, look_into

LAYER_TYPES = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ALONE = "Set parallelism.cp_size to 1."


def check_context_model(model: nn.Module, run: RunFile) -> None:
    """Raises `ModelError` unless every token of `model` (on meta) sees its row through the core attention alone.

    The blocks' calls of attention are observed in one forward on meta.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise ModelError(
            f"{name} with cp_size = {run.parallelism.cp_size}.",
            "Each rank holds part of every row: the core attention must be replaced, which Transformers' models allow.",
            _ALONE,
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{name} does not take position_ids.",
            "Each rank holds part of every row, which would be numbered from 0 on each of them.",
            _ALONE,
        )
    values: dict[str, Any] = config.to_dict()
    _check_config(name, values)
    seen = look_into(model)
    _check_dropout(name, values, seen.calls)
    _check_mixing(model, seen)
    for call in seen.calls:
        _check_call(call, run)
    _check_windows(name, values, seen)


def _named(values: Any, key: str) -> Iterator[Any]:
    """Every value of `key` in nested mappings."""
    if isinstance(values, dict):
        if values.get(key) is not None:
            yield values[key]
        for value in values.values():
            yield from _named(value, key)


def _check_config(name: str, values: dict[str, Any]) -> None:
    for rope in _named(values, "rope_type"):
        if rope in LENGTH_DEPENDENT_ROPE:
            raise ModelError(
                f"{name} has rope_type {rope}.",
                "Its frequencies follow the highest position in the input, which differs between ranks.",
                _ALONE,
            )
    for kinds in _named(values, "layer_types"):
        for kind in kinds:
            if kind not in LAYER_TYPES:
                raise ModelError(
                    f"{name} has layers of type {kind}.",
                    f"Context parallelism knows {' and '.join(LAYER_TYPES)}.",
                    _ALONE,
                )


def _check_dropout(name: str, values: dict[str, Any], calls: Iterable[AttentionCall]) -> None:
    """Refuses dropout inside attention; elsewhere each rank draws masks for its own tokens."""
    drawn = sorted({call.dropout for call in calls} - {0.0})
    if drawn:
        keys = [key for key, p in values.items() if "drop" in key and "att" in key and p in drawn]
        zeros = ", ".join(f"{key}: 0.0" for key in keys)
        raise ModelError(
            f"{name} has dropout with p = {', '.join(f'{p:g}' for p in drawn)} inside attention.",
            "Attention over pieces of a row is merged from blocks of scores, without masks between them.",
            f"Set model.config_overrides to {{{zeros}}}." if keys else "Set it to 0.",
        )


def _check_mixing(model: nn.Module, seen: Seen) -> None:
    """Refuses blocks that mix tokens by anything else than the core attention."""
    name = type(model).__name__
    if missing := blocks_without_attention(model, seen.calls):
        raise ModelError(
            f"`{missing[0]}` of {name} does not call attention through AttentionInterface ({len(missing)} blocks).",
            "Its tokens would see this rank's part of the row only.",
            _ALONE,
        )
    for block in find_parts(model).blocks:
        for path, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Conv1d):
                raise ModelError(
                    f"`{block}.{path}` of {name} is a convolution over tokens.",
                    "At the edges of this rank's part it would miss its neighbours.",
                    _ALONE,
                )


def _check_call(call: AttentionCall, run: RunFile) -> None:
    wrong = [
        (not call.causal, "is not causal", "The split of a row follows from causality."),
        (
            bool(call.others),
            f"asks for {', '.join(call.others)}",
            "The core attention of cp does not know it.",
        ),
    ]
    for refused, what, why in wrong:
        if refused:
            raise ModelError(f"`{call.module}` {what}.", why, _ALONE)
    window, length = call.window, run.data.max_length
    if window is not None and window < length and run.parallelism.cp_attention == "ring":
        raise ModelError(
            f"`{call.module}` has a sliding window of {window} of {length} tokens.",
            "The ring knows causality only.",
            "Set parallelism.cp_attention to all_gather.",
        )


def _check_windows(name: str, values: dict[str, Any], seen: Seen) -> None:
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
            _ALONE,
        )

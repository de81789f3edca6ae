"""Refuses models, by name, in which a rank's tokens would not see the rest of their row under context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwright.attention.calls import AttentionCall, trace_forward
from shardwright.attention.rules import Replacement, check_attention, check_compiled_attention, check_config
from shardwright.config.schema import RunFile
from shardwright.errors import ModelError
from shardwright.models.rotary import follows_length

_ALONE = "Set parallelism.cp_size to 1."
_CONTEXT = Replacement(
    name="Context parallelism",
    fix=_ALONE,
    bypassed="Tokens would see this rank's part of the row only.",
    convolution="The convolution would miss the tokens beside this rank's part of the row.",
    not_causal="Rows are split for causal attention.",
)


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
            "Each rank holds part of every row, and the model would number each part from 0.",
            _ALONE,
        )
    values: dict[str, Any] = config.to_dict()
    if follows_length(model):
        raise ModelError(
            f"{name} has rotary frequencies that follow the length of a document (rope_type longrope or dynamic).",
            "Each rank holds part of every row, and does not see where the documents of the row end.",
            _ALONE,
        )
    check_config(name, values, _CONTEXT)
    seen = trace_forward(model)
    _check_dropout(name, values, seen.calls)
    check_attention(model, values, seen, _CONTEXT)
    for call in seen.calls:
        _check_ring(call, run)
    if run.memory.compile:
        check_compiled_attention(seen.calls)


def _check_dropout(name: str, values: dict[str, Any], calls: Iterable[AttentionCall]) -> None:
    """Refuses dropout inside attention; elsewhere each rank draws masks for its own tokens."""
    drawn = sorted({call.dropout for call in calls} - {0.0})
    if drawn:
        keys = [key for key, p in values.items() if "drop" in key and "att" in key and p in drawn]
        zeros = ", ".join(f"{key}: 0.0" for key in keys)
        raise ModelError(
            f"{name} has dropout with p = {', '.join(f'{p:g}' for p in drawn)} inside attention.",
            "Attention over pieces of a row is merged from blocks of scores, which have no dropout masks.",
            f"Set model.config_overrides to {{{zeros}}}." if keys else "Set this dropout to 0.",
        )


def _check_ring(call: AttentionCall, run: RunFile) -> None:
    window, length = call.window, run.data.max_length
    if window is not None and window < length and run.parallelism.cp_attention == "ring":
        raise ModelError(
            f"`{call.module}` has a sliding window of {window} of {length} tokens.",
            "Ring attention has no windows.",
            "Set parallelism.cp_attention to all_gather.",
        )

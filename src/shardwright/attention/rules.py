"""Which models may have their core attention replaced, for context parallelism or packed rows; others are refused by name.

A model is refused where its tokens would be lost, or would see other documents or later tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwright.attention.calls import AttentionCall, ForwardTrace, blocks_without_attention, trace_forward
from shardwright.attention.compiled import COMPILED_IS_PLAIN
from shardwright.errors import ModelError
from shardwright.models.model_parts import find_parts, is_transformers
from shardwright.models.position_tables import numbers_from_elsewhere
from shardwright.units import counted

LAYER_TYPES = ("full_attention", "sliding_attention")
PADDED_ON_THE_LEFT = ("cpmant",)
"""Families that read from the ids where a row begins, and expect padding before the row."""
_CAUSAL_KEYS = ("is_decoder", "causal")
"""Keys by which a config makes an encoder a decoder, whose tokens do not see later ones."""


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


_FIX = "Set data.batching to bucket or pad."
_PACKED = Replacement(
    name="The core attention of packed rows",
    fix=_FIX,
    bypassed="Tokens of one document would see other documents of the row.",
    convolution="The convolution would mix tokens of two documents.",
    not_causal="The core attention of packed rows is causal.",
    known=("softcap", "s_aux"),
)


def check_attention(model: nn.Module, values: dict[str, Any], trace: ForwardTrace, by: Replacement) -> None:
    """Raises `ModelError` unless tokens of `model` see each other through calls that `by` understands.

    values: the model's config. trace: of one forward.
    """
    name = type(model).__name__
    if table := numbers_from_elsewhere(model):
        raise ModelError(
            f"{name} does not give its first token position 0 of `{table}`.",
            f"{by.name} gives the model positions from 0, which are not those of its pretraining.",
            by.fix,
        )
    _check_mixing(model, trace, by)
    for call in trace.calls:
        if not call.causal:
            raise ModelError(f"`{call.module}` is not causal.", by.not_causal, by.fix)
        if unknown := [argument for argument in call.others if argument not in by.known]:
            raise ModelError(
                f"`{call.module}` asks for {', '.join(unknown)}.", f"{by.name} does not support it.", by.fix
            )
    _check_windows(name, values, trace, by)


def _named(values: Any, key: str) -> Iterator[Any]:
    """Every value of `key` in nested mappings."""
    if isinstance(values, dict):
        if values.get(key) is not None:
            yield values[key]
        for value in values.values():
            yield from _named(value, key)


def check_config(name: str, values: dict[str, Any], by: Replacement) -> None:
    """Raises `ModelError` for what the config of model `name` says already, before a forward is traced."""
    for kind in (kind for kinds in _named(values, "layer_types") for kind in kinds):
        if kind not in LAYER_TYPES:
            raise ModelError(
                f"{name} has layers of type {kind}.", f"{by.name} knows {' and '.join(LAYER_TYPES)}.", by.fix
            )


def _check_mixing(model: nn.Module, trace: ForwardTrace, by: Replacement) -> None:
    """Refuses blocks that mix tokens by anything else than the core attention."""
    name, blocks = type(model).__name__, find_parts(model).blocks
    if missing := blocks_without_attention(blocks, trace.calls):
        raise ModelError(
            f"`{missing[0]}` of {name} does not call attention through AttentionInterface ({counted(len(missing), 'block')}).",
            by.bypassed,
            by.fix,
        )
    for block in blocks:
        for path, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Conv1d):
                raise ModelError(f"`{block}.{path}` of {name} is a convolution over tokens.", by.convolution, by.fix)


def _check_windows(name: str, values: dict[str, Any], trace: ForwardTrace, by: Replacement) -> None:
    """Refuses windows that the config has and the calls do not name: they would be in a mask that is not built."""
    if kinds := values.get("layer_types"):
        expected = sum(kind == "sliding_attention" for kind in kinds)
    else:
        used = values.get("sliding_window") is not None and values.get("use_sliding_window") is not False
        expected = len(trace.calls) if used else 0
    if sum(call.window is not None for call in trace.calls) < expected:
        raise ModelError(
            f"{name} has {expected} layers with a sliding window that they do not pass to attention.",
            "The window would be lost.",
            by.fix,
        )


def check_compiled_attention(calls: Iterable[AttentionCall]) -> None:
    """Raises `ModelError` for a call of attention that a compiled block does not make over documents or pieces of rows."""
    for call in calls:
        asked = [*call.others, *(["a sliding window"] if call.window is not None else [])]
        asked += ["dropout"] if call.dropout else []
        if asked:
            raise ModelError(
                f"`{call.module}` asks for {', '.join(asked)}, with memory.compile.",
                COMPILED_IS_PLAIN,
                "Set memory.compile to false.",
            )


def check_packed_model(model: nn.Module, cp_size: int = 1, compiled: bool = False) -> None:
    """Raises `ModelError` unless documents of one row cannot see each other in `model` (on meta)."""
    name, takes = type(model).__name__, inspect.signature(model.forward).parameters
    named = ("position_ids",) if is_transformers(model) else ("documents", "position_ids")
    if missing := [argument for argument in named if argument not in takes]:
        raise ModelError(
            f"{name} does not take {' and '.join(missing)}, with data.batching pack.",
            "Rows hold several documents: each must see itself only, and be numbered from 0.",
            f"{_FIX} A module of your own can take `documents` and `position_ids`, both [rows, tokens].",
        )
    if not is_transformers(model):
        return
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        raise ModelError(f"{name} does not hand `documents` on to attention.", _PACKED.bypassed, _FIX)
    config: Any = model.config
    # attention over pieces of rows knows neither softcap nor sinks
    values, by = config.to_dict(), _PACKED if cp_size == 1 else replace(_PACKED, known=())
    check_config(name, values, by)
    trace = trace_forward(model, documents=True)
    check_attention(model, values, trace, by)
    if compiled:
        check_compiled_attention(trace.calls)
    if lost := [call.module for call in trace.calls if not call.documents]:
        raise ModelError(
            f"`{lost[0]}` of {name} does not get `documents` ({len(lost)} calls of attention).", _PACKED.bypassed, _FIX
        )


def check_padded_model(model: nn.Module) -> None:
    """Raises `ModelError` where padding after a row reaches the tokens of `model` (on meta), which keeps its own attention.

    Tokens that see later tokens would also see the token that they have to predict. A model that does not run on meta is
    judged by its key of `_CAUSAL_KEYS`.
    """
    config: Any = getattr(model, "config", None)
    if not is_transformers(model) or config._attn_implementation not in ("sdpa", "eager"):
        return  # a core attention of ours is causal
    name, keys = type(model).__name__, {key: getattr(config, key, None) for key in _CAUSAL_KEYS}
    decoder, off = any(keys.values()), next((key for key, value in keys.items() if value is False), "")
    if config.model_type in PADDED_ON_THE_LEFT:
        raise ModelError(
            f"{name} expects padding at the start of a row.",
            "Rows are padded at the end, and the model would take this padding for tokens.",
            "Take another model.",
        )
    not_causal = ""
    calls: tuple[AttentionCall, ...] = ()
    try:
        calls = trace_forward(model).calls
        not_causal = next((call.module for call in calls if not call.causal), "")
    except ModelError:
        source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
        off = next((key for key, value in keys.items() if value is False and key in source), "")
        not_causal = name if off else ""
    if not_causal and not decoder:  # a decoder may hide later tokens by the mask that it makes
        raise ModelError(
            f"`{not_causal}` is not causal: each token sees later tokens.",
            "The model would see the token that it has to predict, and the padding at the end of the row.",
            f"Set model.config_overrides to {{{off}: true}}." if off else "Take a causal model.",
        )
    if masked := next((call.module for call in calls if "attention_mask" in call.others), ""):
        raise ModelError(
            f"`{masked}` of {name} makes an attention mask of its own.",
            "What this mask hides may depend on the width of a row and on its padding.",
            "Take another model.",
        )

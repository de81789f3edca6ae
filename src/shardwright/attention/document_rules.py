"""What packed rows refuse of a model: whatever would let a document see another one of its row, by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shardwright.attention.calls import look_into
from shardwright.attention.rules import Replacement, check_attention, check_config
from shardwright.errors import ModelError
from shardwright.models.model_parts import is_transformers

_FIX = "Set data.batching to bucket or pad."
_PACKED = Replacement(
    name="The core attention of packed rows",
    fix=_FIX,
    bypassed="Its tokens would see other documents of their row.",
    convolution="It would reach over the boundary of a document.",
    not_causal="The core attention of packed rows is.",
    known=("softcap", "s_aux"),
)
_CONTEXT = Replacement(**{**vars(_PACKED), "known": ()})


def check_packed_model(model: nn.Module, cp_size: int = 1) -> None:
    """Raises `ModelError` unless documents of one row cannot see each other in `model` (on meta).

    The blocks' calls of attention are observed in one forward on meta, to which documents are given.
    """
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
    values, by = config.to_dict(), _PACKED if cp_size == 1 else _CONTEXT
    check_config(name, values, by)
    seen = look_into(model, documents=True)
    check_attention(model, values, seen, by)
    if lost := [call.module for call in seen.calls if not call.documents]:
        raise ModelError(
            f"`{lost[0]}` of {name} is not told of documents ({len(lost)} calls of attention).",
            _PACKED.bypassed,
            _FIX,
        )


_CAUSAL_KEYS = ("is_decoder", "causal")
"""Keys by which a config makes an encoder a decoder, whose tokens do not see those behind them."""
PADDED_ON_THE_LEFT = ("cpmant",)
"""Families that read from the ids where a row begins, and expect padding before it."""


def check_padded_model(model: nn.Module) -> None:
    """Raises `ModelError` where padding behind a row reaches the tokens of `model` (on meta), which keeps its own attention.

    Tokens that see later tokens would also see the token that they have to predict. A model that cannot be looked into is
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
    ahead, masked = "", ""
    try:
        calls = look_into(model).calls
        ahead = next((call.module for call in calls if not call.causal), "")
        masked = next((call.module for call in calls if "attention_mask" in call.others), "")
    except ModelError:
        source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
        off = next((key for key, value in keys.items() if value is False and key in source), "")
        ahead = name if off else ""
    if ahead and not decoder:  # a decoder may say it in the mask that it makes
        raise ModelError(
            f"`{ahead}` is not causal: each token sees later tokens.",
            "The model would see the token that it has to predict, and the padding at the end of the row.",
            f"Set model.config_overrides to {{{off}: true}}." if off else "Take a causal model.",
        )
    if masked:
        raise ModelError(
            f"`{masked}` of {name} makes an attention mask of its own.",
            "What this mask hides may depend on the width of a row and on its padding.",
            "Take another model.",
        )

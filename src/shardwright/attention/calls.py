"""What the blocks of a Transformers model ask of the core attention, and their dropout: traced in one forward on meta."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.errors import ModelError
from shardwright.models.rotary import shapes_alone

PROBE = "shardwright_probe"
_TOKENS = 4
_DOCUMENTS = object()
_UNDERSTOOD = {"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "output_attentions"}
"""Arguments that do not change what attention computes here: nothing is cached, and positions are in the keys already."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the core attention in a forward pass.

    module: fully qualified name.
    window: keys that a query sees, None for all before it.
    others: names of arguments that another core attention would have to know (softcap, sinks, biases, masks).
    documents: whether the argument `documents` reached it.
    """

    module: str
    causal: bool
    dropout: float
    window: int | None
    others: tuple[str, ...]
    documents: bool = False


@dataclass(frozen=True)
class ForwardTrace:
    """What one forward of a training step does. dropout: every probability above 0 outside of attention."""

    calls: tuple[AttentionCall, ...]
    dropout: tuple[float, ...]


class _Dropouts(TorchFunctionMode):
    """Collects the probability of each dropout in training, of modules and functions alike."""

    def __init__(self) -> None:
        super().__init__()
        self.probabilities: set[float] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is nn.functional.dropout and named.get("training", True):
            self.probabilities.add(named["p"] if "p" in named else args[1] if len(args) > 1 else 0.5)
        return function(*args, **named)


def trace_forward(model: nn.Module, documents: bool = False) -> ForwardTrace:
    """What `model` (on meta, see `build_model`) does in one forward of a training step. The model is not changed.

    documents: the model is called with an argument of that name, as for packed rows.

    Raises `ModelError` where the model's attention cannot be replaced, or where the model does not run on meta.
    """
    name = type(model).__name__
    replaceable = getattr(model, "_can_set_attn_implementation", None)
    if replaceable is None or not replaceable():
        raise ModelError(
            f"The attention of {name} cannot be replaced.",
            "Only Transformers models that call attention through AttentionInterface can have another core attention.",
        )
    names = {id(module): path for path, module in model.named_modules()}
    calls: list[AttentionCall] = []

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        documents: object = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        asked = {**others, "attention_mask": attention_mask}
        unknown = tuple(
            n for n, value in asked.items() if value is not None and value is not False and n not in _UNDERSTOOD
        )
        path, told = names[id(module)], documents is _DOCUMENTS
        calls.append(AttentionCall(path, causal, dropout, sliding_window, unknown, told))
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None

    dropouts = _Dropouts()
    with _attention(model, probe), shapes_alone(model), torch.no_grad(), dropouts:
        _forward_on_meta(model, {"documents": _DOCUMENTS} if documents else {})
    return ForwardTrace(tuple(calls), tuple(sorted(dropouts.probabilities - {0.0})))


def _forward_on_meta(model: nn.Module, more: dict[str, object]) -> None:
    """One forward on tensors without values, in bf16: torch refuses grouped products in other dtypes on meta."""
    tensors = {
        name: torch.empty_like(t, device="meta", dtype=torch.bfloat16 if t.is_floating_point() else t.dtype)
        for name, t in model.named_parameters()
    }
    tensors |= {name: torch.empty_like(b, device="meta") for name, b in model.named_buffers()}
    any_model: Any = model
    width = any_model.get_input_embeddings().embedding_dim
    inputs = {
        "inputs_embeds": torch.empty((1, _TOKENS, width), dtype=torch.bfloat16, device="meta"),
        "position_ids": torch.arange(_TOKENS, device="meta").unsqueeze(0),
        "use_cache": False,
        **more,
    }
    try:
        torch.func.functional_call(model, tensors, kwargs=inputs)
    except Exception as error:  # whatever a model's code may raise on tensors without values
        raise ModelError(
            f"{type(model).__name__} does not run on the meta device: {type(error).__name__}: {error}",
            "One forward there shows what its blocks ask of attention.",
        ) from error


@contextmanager
def _attention(model: nn.Module, function: Any) -> Iterator[None]:
    """Within, `function` is the core attention of `model`, which is in training mode and groups products by expert."""
    from transformers import AttentionInterface

    setter: Any = model
    config, training = setter.config, model.training
    before, experts = config._attn_implementation, config._experts_implementation
    AttentionInterface.register(PROBE, function)
    setter.set_attn_implementation(PROBE)
    if setter._can_set_experts_implementation():  # experts one by one follow the values of the router
        setter.set_experts_implementation("grouped_mm")
    model.train()
    try:
        yield
    finally:
        model.train(training)
        setter.set_attn_implementation(before)
        if setter._can_set_experts_implementation():
            setter.set_experts_implementation(experts)


def blocks_without_attention(blocks: Iterable[str], calls: Iterable[AttentionCall]) -> list[str]:
    """The `blocks` from which none of `calls` comes."""
    called = [call.module for call in calls]
    return [block for block in blocks if not any(c.startswith(f"{block}.") for c in called)]

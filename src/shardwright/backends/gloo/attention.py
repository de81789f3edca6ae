"""Attention of whole rows in bf16 on a CPU: torch's kernel forward, and backward in float32 where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.attention.core import Attention, own_backward_is_faster

NAME = "shardwright_bf16"


def replace_attention(model: nn.Module) -> None:
    """Gives a Transformers model that attends by `sdpa` the same with the faster backward; any other stays as it is."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    replaceable = getattr(model, "_can_set_attn_implementation", None)
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa" or replaceable is None or not replaceable():
        return
    AttentionInterface.register(NAME, bf16_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    setter: Any = model
    setter.set_attn_implementation(NAME)


def bf16_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention output [B, T, N, H] of queries [B, N, T, H]. Transformers computes all but plain causal attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    more = any(others.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    plain = attention_mask is None and causal and not dropout and not more and query.shape[2] == key.shape[2]
    if not (plain and torch.is_grad_enabled() and own_backward_is_faster(query, key, value)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Attention.apply(query, key, value, scale, True).transpose(1, 2).contiguous(), None

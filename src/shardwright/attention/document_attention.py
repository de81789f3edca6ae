"""The core attention of packed rows: each token sees the tokens of its own document before it, and itself.

B rows, T tokens of a row, N query heads, K kv heads, H head width, G documents of the same L tokens, R real tokens of all
rows. On the CPU, documents of the same length are one call without a mask: about as fast as a T x T mask in rows of 256
tokens, faster in longer ones, and never slower than one call a document (benchmarks/document_attention.py). On a GPU in 16
bits one flash call takes all documents by their lengths. No call's result depends on what other documents hold.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.attention.compiled import COMPILED_IS_PLAIN, attend_documents
from shardwright.attention.core import Attention, fits_cuda_flash, own_backward_is_faster
from shardwright.attention.packed_rows import PackedRows
from shardwright.errors import ModelError
from shardwright.torch_private import flash_attention_by_lengths

NAME = "shardwright_documents"


def isolate_documents(model: nn.Module) -> None:
    """Makes the core attention of `model` keep documents apart, which reach it as the keyword argument `documents`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, document_attention)
    setter: Any = model
    setter.set_attn_implementation(NAME)


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: PackedRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [B, T, N, H] of queries [B, N, T, H]; zeros for padding.

    sliding_window: a query sees that many keys, its own among them. softcap: scores become softcap x tanh(score / softcap).
    s_aux: [N], a score of each head that takes its share of the softmax and has no value (an attention sink).
    documents: None where each row is one document.
    """
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} asks for a mask inside attention.", "The mask does not keep documents apart."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = softcap is None and s_aux is None and sliding_window is None and not dropout
    options: dict[str, Any] = {"scale": scale, "dropout": dropout, "softcap": softcap, "sinks": s_aux}
    if documents is None:
        return _causal(query, key, value, window=sliding_window, **options), None
    if not torch.compiler.is_compiling():
        return _attend(query, key, value, documents, sliding_window, options), None
    if not plain:
        raise ModelError(f"{type(module).__name__} is compiled.", COMPILED_IS_PLAIN)
    return attend_documents(query, key, value, documents.documents, scale)[0].transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedRows,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """[B, T, N, H]. options: of `_causal`."""
    if documents.whole:
        return _causal(query, key, value, window=window, **options)
    shape = query.shape[0], query.shape[2]
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    flash = options["softcap"] is None and options["sinks"] is None and fits_cuda_flash(query, value)
    order = documents.dense if flash else documents.grouped
    q, k, v = (order.take(t) for t in rows)
    if flash:  # one call for all documents, whatever their lengths
        ends, longest = documents.ends, documents.longest
        left = -1 if window is None else window - 1
        lengths = (ends, ends, longest, longest)
        windows = {"scale": options["scale"], "window_size_left": left, "window_size_right": 0}
        # causal, no mask of dropout
        out = flash_attention_by_lengths(q, k, v, *lengths, options["dropout"], True, False, **windows)[0]
    else:
        sizes = [count * length for count, length in documents.groups]
        outs = []
        for group, *parts in zip(documents.groups, q.split(sizes), k.split(sizes), v.split(sizes)):
            own_q, own_k, own_v = (part.unflatten(0, group).transpose(1, 2) for part in parts)
            outs.append(_causal(own_q, own_k, own_v, window=window, **options).flatten(0, 1))
        out = torch.cat(outs)
    return order.put(out).unflatten(0, shape)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[G, L, N, H]: each of the L queries [G, N, L, H] sees the keys [G, K, L, H] up to its own."""
    length, repeats = query.shape[2], query.shape[1] // key.shape[1]
    mask, written_out = None, softcap is not None or sinks is not None
    if written_out or (window is not None and window < length):
        mask = _band(length, window or length, query.device)
        key, value = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (key, value))
    if mask is None and not dropout and own_backward_is_faster(query, key, value):
        return Attention.apply(query, key, value, scale, True).transpose(1, 2)
    if not written_out:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)
    assert mask is not None
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    # in float32 whatever the dtype, as models with a softcap compute it
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., :length]
    return (F.dropout(weights, dropout) @ value).transpose(1, 2)


@lru_cache(maxsize=64)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] bool: query i sees the keys i - window + 1 to i."""
    distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)

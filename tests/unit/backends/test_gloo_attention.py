"""The core attention of bf16 on CPUs: torch's outputs, gradients no worse, and only where it is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests import tolerance
from tests.tiny_models import FAMILIES
from torch import Tensor, nn

from shardwright.attention import document_attention
from shardwright.attention.core import Attention, backward_in_float32
from shardwright.backends.gloo.attention import replace_attention


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bf16_gradients_are_no_worse_than_torchs(kv_heads: int) -> None:
    """In bf16 on a CPU backward computes in float32: outputs are torch's, gradients as near to float64's or nearer."""
    torch.manual_seed(0)
    drawn = [torch.randn(3, heads, 50, 16) for heads in (4, kv_heads, kv_heads)]
    grad = torch.randn(3, 50, 4, 16)

    def run(dtype: torch.dtype, function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in drawn]
        out = function(*inputs)
        given = grad.to(torch.bfloat16).to(dtype)
        return [out.detach().double(), *(g.double() for g in torch.autograd.grad(out, inputs, given))]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention.document_attention(nn.Module(), q, k, v, None)[0]

    assert backward_in_float32(drawn[0].bfloat16()) and not backward_in_float32(drawn[0])
    exact = run(torch.float64, plain)
    errors = []
    for function in (ours, plain):
        found = run(torch.bfloat16, function)
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)])
    mine, theirs = errors
    assert mine[0] == theirs[0]
    assert all(
        own <= 1.05 * other and own <= tolerance.in_norm(2, torch.bfloat16) for own, other in zip(mine[1:], theirs[1:])
    ), errors
    own = run(torch.float64, lambda q, k, v: Attention.apply(q, k, v, 0.25, True).transpose(1, 2))
    bound = tolerance.mixed(50, 50, 16)
    assert all((a - b).abs().max() <= bound * b.abs().max() for a, b in zip(own, exact))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_rows_of_one_document_take_the_float32_backward(family: str) -> None:
    """A model that attends by sdpa does in bf16 on a CPU, with the same logits; a mask is left to Transformers."""
    config = FAMILIES[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16().eval()
    ids = torch.randint(0, config.vocab_size, (2, 9))
    before = model(input_ids=ids, use_cache=False).logits
    replace_attention(model)
    after = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(before, after)
    names = {type(node).__name__ for node in _graph(after)}
    assert "AttentionBackward" in names
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    masked = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert "AttentionBackward" not in {type(node).__name__ for node in _graph(masked)}


def _graph(tensor: Tensor) -> set[Any]:
    """Every node that `tensor` was made by."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions]
    return found

"""float64 throughout a check: what models round to float32 on their way stays float64."""

from __future__ import annotations

import torch
from tests.places import TINY
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.tools.check.force_float64 import ForceFloat64


def test_float64_tensors_stay_and_others_are_converted_as_asked() -> None:
    """By `float`, by `to` with a place or a name, and by the dtype of an operation; a softmax of thirds tells them apart."""
    wide, narrow, third = torch.ones(3, dtype=torch.float64) / 3, torch.ones(3), 1 / 3
    with ForceFloat64():
        assert {t.dtype for t in (wide.float(), wide.to(torch.float32), wide.to(dtype=torch.float32))} == {
            torch.float64
        }
        assert wide.to("cpu", torch.float32).dtype == torch.float64
        assert nn.functional.softmax(wide, dim=-1, dtype=torch.float32).tolist() == [third] * 3
        assert wide.sum(dtype=torch.float32).dtype == torch.float64
        assert wide.to(torch.bfloat16).dtype == torch.bfloat16 and wide.half().dtype == torch.float16
        assert narrow.to(torch.float32).dtype == narrow.float().dtype == torch.float32
    assert wide.float().dtype == torch.float32


def test_rounding_inside_a_model_no_longer_decides() -> None:
    """Inputs that change by 4e-12 move a Llama's gradients by about as much; with norms in float32 far more."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_config(config).double()
    x = torch.randn(2, 64, config.hidden_size, dtype=torch.float64)

    def gradient(inputs: torch.Tensor) -> torch.Tensor:
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.grad = None
        model(inputs_embeds=inputs, use_cache=False).logits.square().mean().backward()
        return weight.grad

    def moved() -> float:
        before = gradient(x)
        return ((gradient(x * (1 + 2.0**-38)) - before).abs().max() / before.abs().max()).item()

    rounded = moved()
    with ForceFloat64():
        exact = moved()
    assert exact < 32 * 2.0**-38 < rounded

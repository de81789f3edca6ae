"""Every causal family of Transformers: plan counts what train builds, or refuses. Known-fault rows: none.

The oracle is Transformers alone: the parameters of its model, and the FLOPs that torch counts in a forward on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.causal_configs import KINDS, NOT_BUILT, small_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardwright.arch import counts
from shardwright.arch.families import FAMILIES
from shardwright.arch.flops import model_flops
from shardwright.arch.inventory import named_sizes
from shardwright.arch.of_model import shape_of_model
from shardwright.arch.shape import Shape
from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.models.inventory import inventory

LENGTH = 37
LARGEST = 20_000_000
"""Parameters of a model whose forward runs here."""


def planned(directory: Path, **section: Any) -> Shape:
    """The shape that plan works with, its model built in this process."""

    def build(given: dict[str, Any]) -> dict[str, Any]:
        return inventory(Model.model_validate({**given, "init": "random"}))

    return shape_of_model(str(directory), build, {"attn_implementation": "eager", **section})


def forward_flops(config: Any) -> int:
    """FLOPs of a row of LENGTH tokens through Transformers' own model."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((1, LENGTH), 5), use_cache=False)
    return int(counter.get_total_flops())


def test_what_plan_answers_is_what_transformers_builds(tmp_path: Path) -> None:
    """Parameters equal, by name where the family is known; FLOPs equal to those of a forward; all else is refused."""
    torch.manual_seed(0)
    answered, built = set(), set()
    for kind in KINDS:
        made = small_config(kind)
        if made is None:
            continue
        built.add(kind)
        config, model = made
        config.save_pretrained(tmp_path)
        try:
            shape = planned(tmp_path)
        except (ConfigError, ModelError):
            continue
        answered.add(kind)
        sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert counts(shape).total == sum(parameter.numel() for parameter in model.parameters()), kind
        if shape.counted is None:
            assert named_sizes(shape) == sizes, kind
        whole = Shape(
            **{**vars(shape), "window": None, "window_layers": 0}
        )  # the kernel multiplies masked keys too
        if counts(shape).total < LARGEST:
            assert model_flops(whole, LENGTH).total * LENGTH / 3 == forward_flops(config), kind
    assert set(KINDS) - built <= NOT_BUILT
    assert {*FAMILIES} - {"gpt"} <= answered
    assert {
        "gemma3",
        "got_ocr2",
        "cohere2",
        "olmo2",
        "falcon",
        "bloom",
        "nemotron",
        "glm4",
        "starcoder2",
    } <= answered
    assert not answered & {
        "mixtral",
        "qwen3_moe",
        "ernie4_5_moe",
        "olmoe",
        "gpt_oss",
        "mamba",
        "rwkv",
        "bart",
    }

"""Every causal family of Transformers: plan counts what train builds, or refuses. Known-fault rows: none.

The oracle is Transformers alone: the parameters of its model, and the products of a forward on the CPU, counted by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.causal_configs import KINDS, NOT_BUILT, small_config
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.arch.families import FAMILIES
from shardwright.arch.flops import block_matmul_weights, model_flops
from shardwright.arch.model_shape import shape_from_inventory, shape_of_model
from shardwright.arch.parameters import counts, named_sizes
from shardwright.arch.shape import Shape
from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError, ShardwrightError
from shardwright.models.parameter_inventory import inventory

LENGTH = 19
transformers.logging.set_verbosity_error()  # advice about configs that nobody trains
LARGEST = 3_000_000
"""Parameters of a model whose forward runs here."""


PARTS = 8
ANSWERED = {
    *FAMILIES,
    "gemma3",
    "got_ocr2",
    "cohere2",
    "olmo2",
    "falcon",
    "bloom",
    "nemotron",
    "glm4",
    "starcoder2",
} - {"gpt"}
REFUSED = {"mixtral", "qwen3_moe", "ernie4_5_moe", "olmoe", "gpt_oss", "granitemoe", "jetmoe", "mamba", "rwkv", "bart"}


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products and convolutions while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, ops = func(*args, **(kwargs or {})), torch.ops.aten
        if func in (ops.mm.default, ops.bmm.default):
            self.flops += 2 * out.numel() * args[0].shape[-1]
        elif func in (ops.addmm.default, ops.baddbmm.default):
            self.flops += 2 * out.numel() * args[1].shape[-1]
        elif func is ops.convolution.default:
            self.flops += 2 * out.numel() * args[1][0].numel()
        return out


def planned(directory: Path, **section: Any) -> Shape:
    """The shape that plan works with, its model built in this process."""

    def build(given: dict[str, Any]) -> dict[str, Any]:
        return inventory(Model.model_validate({**given, "init": "random"}))

    return shape_of_model(str(directory), build, {"attn_implementation": "eager", **section})


def forward_flops(model: torch.nn.Module) -> int:
    """FLOPs of a row of LENGTH tokens through Transformers' own model on the CPU; its values do not matter."""
    model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    with Products() as counter, torch.no_grad():
        model(input_ids=torch.full((1, LENGTH), 5), use_cache=False)
    return counter.flops


def what_differs(shape: Shape, model: torch.nn.Module) -> list[str]:
    """What plan says otherwise than Transformers: parameters, their names where the family is known, FLOPs."""
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    wrong = [] if counts(shape).total == total else [f"{counts(shape).total} of {total} parameters"]
    if shape.counted is None and named_sizes(shape) != sizes:
        wrong.append("names or sizes")
    whole = replace(shape, window=None, window_layers=0)  # the kernel multiplies masked keys too
    if total < LARGEST:
        said, found = model_flops(whole, LENGTH).total * LENGTH / 3, forward_flops(model)
        wrong += [] if said == found else [f"{said} of {found} FLOPs"]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_plan_answers_is_what_transformers_builds(part: int, tmp_path: Path) -> None:
    """Parameters equal, by name where the family is known; FLOPs equal to those of a forward; all else is refused."""
    torch.manual_seed(0)
    kinds, answered, wrong = KINDS[part::PARTS], set(), {}
    for kind in kinds:
        made = small_config(kind)
        assert (made is None) == (kind in NOT_BUILT), kind
        if made is None:
            continue
        config, model = made
        config.save_pretrained(tmp_path)
        try:
            shape = planned(tmp_path)
        except (ConfigError, ModelError):
            continue
        answered.add(kind)
        if found := what_differs(shape, model):
            wrong[kind] = found
    assert not wrong
    assert ANSWERED & set(kinds) <= answered
    assert not REFUSED & answered


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "head_dim": 16,
}
BLOCK = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
"""Matrix weights of a block of TEXT."""


def written(place: Path, **config: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", **TEXT, "quantization_config": {"bits": 4}}, "holds quantized weights"),
        ({"model_type": "olmo2", **TEXT, "quantization_config": {"bits": 8}}, "holds quantized weights"),
        (
            {"model_type": "gemma3", "text_config": {**TEXT, "quantization_config": {"quant_method": "gptq"}}},
            "holds quantized weights",
        ),
        ({"model_type": "t5", "d_model": 32, "num_layers": 2}, "no causal language model"),
        ({"model_type": "gpt", **TEXT}, "'gpt' is unknown to the installed Transformers"),
        ({"model_type": "ernie4_5_moe", **TEXT, "moe_num_experts": 8, "moe_k": 2}, "cannot be planned"),
    ],
)
def test_what_train_refuses_is_not_planned(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "model", **config)
    with pytest.raises(ShardwrightError, match=message) as planning:
        planned(directory)
    if "cannot be planned" not in message:
        with pytest.raises(ModelError, match=message) as training:
            inventory(Model(model_name_or_path=str(directory), init="random", attn_implementation="eager"))
        assert str(planning.value) == str(training.value)


def test_overrides_and_everything_around_the_language_model_count(tmp_path: Path) -> None:
    """By hand: Llama with one block less; the first two of MoE's blocks are dense; a tower of vision changes no FLOPs."""
    llama = written(tmp_path / "llama", model_type="llama", **TEXT)
    assert planned(llama, config_overrides={"num_hidden_layers": 2}).layers == 2
    with pytest.raises(ModelError, match="`num_layer` is not a key"):
        planned(llama, config_overrides={"num_layer": 2})
    dense = written(tmp_path / "dense", model_type="glm4_moe", **TEXT, first_k_dense_replace=3)
    shape = planned(dense)
    assert model_flops(shape, 10).blocks == 6 * 3 * BLOCK
    with pytest.raises(ConfigError, match="A token uses some experts only"):
        planned(dense, config_overrides={"first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2})
    sight = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    sees = written(tmp_path / "sees", model_type="gemma3", text_config=TEXT, vision_config=sight, mm_tokens_per_image=4)
    shape = planned(sees)
    assert (shape.layers, model_flops(shape, 10).blocks) == (3, 6 * 3 * BLOCK)
    assert named_sizes(shape).keys() >= {"model.vision_tower.encoder.layers.3.mlp.fc1.weight"}


def test_windows_of_a_family_that_is_counted(tmp_path: Path) -> None:
    """Cohere 2: every fourth layer sees the whole row, the others a window of 8 keys."""
    sliding = planned(written(tmp_path, model_type="cohere2", **{**TEXT, "num_hidden_layers": 4}, sliding_window=8))
    assert (sliding.window, sliding.window_layers) == (8, 3)
    assert model_flops(sliding, 32).attention == 3 * 4 * 64 * (32 + 3 * 8)


def test_an_unknown_architecture_is_counted_from_its_parameters() -> None:
    """A family that is not in the table: parameters exact, matrix elements those of the model."""
    small = {**TEXT, "intermediate_size": 96, "vocab_size": 100}
    config = transformers.Olmo2Config(**small, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    inventory = {
        "name": "olmo2",
        "config": config.to_dict(),
        "parameters": sizes,
        "blocks": [f"model.layers.{index}" for index in range(3)],
        "embedding": "model.embed_tokens",
        "head": "lm_head",
        "head_weights": 100 * 64,
        "products": 100 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96),
        "attention_width": 3 * 64,
        "uncounted": "",
    }
    shape = shape_from_inventory(inventory)
    assert counts(shape).total == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.vocab) == (3, 64, 4, 2, 100)
    inside = [size for name, size in sizes.items() if ".layers.0." in name and len(size) == 2]
    assert block_matmul_weights(shape) == sum(rows * columns for rows, columns in inside)
    assert (shape.ffn, shape.attention_width) == (96, 64)
    with pytest.raises(ConfigError, match="A token uses some experts only"):
        shape_from_inventory({**inventory, "config": {**inventory["config"], "num_experts": 4}, "products": 6400 + 99})
    for other in ({"attention_width": -1}, {"products": inventory["products"] + 0.5}):
        with pytest.raises(ConfigError, match="not just attention and a product of each token"):
            shape_from_inventory({**inventory, **other})
    with pytest.raises(ConfigError, match="fails on tensors without values \\(no data\\)"):
        shape_from_inventory({**inventory, "products": None, "uncounted": "no data"})


def test_a_plain_module_is_counted_too() -> None:
    """No config and no embedding: three blocks of unequal size are spread evenly, nothing is lost."""
    inventory = {
        "name": "module",
        "config": {},
        "head_weights": 80,
        "products": 80 + 8 * (8 + 9 + 10),
        "attention_width": 0,
        "uncounted": "",
        "parameters": {"head.weight": (10, 8), **{f"net.{i}.weight": (8, 8 + i) for i in range(3)}},
        "blocks": ["net.0", "net.1", "net.2"],
        "embedding": None,
        "head": "head",
    }
    shape = shape_from_inventory(inventory)
    assert counts(shape).total == 80 + 8 * (8 + 9 + 10)
    assert shape.hidden == 8
    uneven = {"head.weight": (10, 8), **{f"net.{i}.weight": (8, 8 + 2 * i) for i in range(3)}, "net.0.bias": (8,)}
    shape = shape_from_inventory({**inventory, "parameters": uneven, "products": 10_000})
    assert counts(shape).total == 80 + 8 * (8 + 10 + 12) + 8

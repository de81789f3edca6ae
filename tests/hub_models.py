"""Small models of families whose weights have other names in files than in the model, one or more for each kind of rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

_ROPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def _gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**_ROPE, head_dim=8, sliding_window=8)
    return transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=_VISION, mm_tokens_per_image=4,
        boi_token_index=90, eoi_token_index=91, image_token_index=92,
    )  # fmt: skip


def _mistral3() -> Any:
    text = transformers.MistralConfig(**_ROPE, head_dim=8)
    vision = transformers.PixtralVisionConfig(**_VISION, head_dim=4)
    return transformers.Mistral3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_index=92)


HUB_FAMILIES: dict[str, Callable[[], Any]] = {
    # experts stacked, gate and up joined
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_ROPE, **_EXPERTS, head_dim=8),
    # the same under other names, and the block renamed
    "mixtral": lambda: transformers.MixtralConfig(**_ROPE, num_local_experts=4, num_experts_per_tok=2),
    # some layers dense, a buffer that is saved
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_ROPE, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    # renamed whole
    "granitemoe": lambda: transformers.GraniteMoeConfig(**_ROPE, num_local_experts=4, num_experts_per_tok=2),
    # a head renamed
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in _ROPE.items() if k != "num_key_value_heads"}),
    # dims exchanged
    "aria_text": lambda: transformers.AriaTextConfig(**_ROPE, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    # one stored tensor cut into several
    "hrm_text": lambda: transformers.HrmTextConfig(**_ROPE),
    # a text model inside a model with a vision tower
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    # tied weights saved under the name that comes second in the model
    "camembert": lambda: transformers.CamembertConfig(
        **{k: v for k, v in _ROPE.items() if k != "num_key_value_heads"} | {"pad_token_id": 1}, is_decoder=True
    ),
}  # fmt: skip


def auto(family: str) -> Any:
    """The class of Transformers that builds and loads `family`."""
    return AutoModelForImageTextToText if family == "mistral3" else AutoModelForCausalLM


def filled(family: str, seed: int = 0) -> nn.Module:
    """The model of `family` with a random value in each element of each parameter and saved buffer."""
    torch.manual_seed(seed)
    model = auto(family).from_config(HUB_FAMILIES[family](), dtype=torch.float32, attn_implementation="eager")
    held = model.state_dict()
    with torch.no_grad():
        for tensor in held.values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.2)
    return model.eval()


def stored(directory: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors of a directory."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, and for each the same bits."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:6]
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name

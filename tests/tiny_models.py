"""Small models of every tested family, and directories with their weights as Transformers writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from shardwright.config.schema import Model

VOCABULARY = 4097  # odd: no number of ranks but 1, 17 and 241 divides it

_ROPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_ROPE, pad_token_id=3),
    "llama_tied": lambda: transformers.LlamaConfig(**_ROPE, pad_token_id=3, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_ROPE),
    "qwen3": lambda: transformers.Qwen3Config(**_ROPE, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_ROPE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
    ),
    "gemma2": lambda: transformers.Gemma2Config(**_ROPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_ROPE),
}


def write_model(
    directory: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any
) -> torch.nn.Module:
    """Writes random weights of `family` with Transformers' save_pretrained; gives the saved model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: a constant would hide a mix-up
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(directory, **save)
    return model


def spec_of(directory: Path | str, family: str = "", init: str = "pretrained", **more: Any) -> Model:
    """The model section of a run file for a directory of `write_model`."""
    attention = "eager" if family == "gemma2" else "sdpa"
    return Model.model_validate(
        {"model_name_or_path": str(directory), "init": init, "attn_implementation": attention, **more}
    )

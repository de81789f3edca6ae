"""The kinds of files in the directory of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken",
)  # fmt: skip
"""Files that decide how text and chats become tokens."""

MODEL_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
OTHER_FILES = ("*processor_config.json", "*.py", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files that users of an exported directory need: processors of images and sound, code, terms of use."""

FOREIGN_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ckpt", "*.index.json",
)  # fmt: skip
"""Weights in any format, which an export does not copy: it writes its own."""


def matching(directory: Path, patterns: Iterable[str]) -> list[str]:
    """Files of `directory` under any of the patterns, as paths in it."""
    found = {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
    return sorted(str(file.relative_to(directory)) for file in found)

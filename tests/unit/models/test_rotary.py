"""Rotary frequencies by document: rows with padding and packed rows against Transformers' own models, each document alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shardwright.attention.document_attention import isolate_documents
from shardwright.attention.packed_rows import PackedRows
from shardwright.attention.rules import check_packed_model
from shardwright.config.schema import Model
from shardwright.models import build_model, materialise
from shardwright.models.rotary import decide_by_document, follows_length, lengths_of

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "factor": 4.0,
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0], "original_max_position_embeddings": 8}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, Callable[[], Any]] = {
    "longrope": lambda: transformers.Phi3Config(
        **SIZES, max_position_embeddings=32, original_max_position_embeddings=8, rope_parameters=dict(LONG)
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **SIZES, max_position_embeddings=8, rope_parameters=dict(DYNAMIC)
    ),
    "by layer": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, max_position_embeddings=8, layer_types=["sliding_attention", "full_attention"],
        sliding_window=64, rope_parameters={"full_attention": dict(DYNAMIC),
                                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ),
}  # fmt: skip
LENGTHS = (12, 5, 10, 12)
"""Two lengths beyond the 8 trained for, the longer one first: what it leaves must not reach those behind it."""
ROUNDING = 64 * 2.0**-24
"""Of logits of size 1: tables in float32, a few roundings in each of two blocks, and products of 32 in float64."""


def built(kind: str, directory: Path) -> Any:
    MODELS[kind]().save_pretrained(directory)
    spec = Model(model_name_or_path=str(directory), init="random")
    model = build_model(spec, torch.float64)
    check_packed_model(model)
    materialise(model, spec, seed=0, device=torch.device("cpu"))
    return model


def rows(width: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = document
    return documents, ids


def alone(kind: str, model: Any, document: Tensor) -> Tensor:
    """Logits of one document in a model of Transformers that has seen no other."""
    other = transformers.AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager").double()
    other.load_state_dict(model.state_dict(), strict=False)
    for name, buffer in model.named_buffers():
        other.get_buffer(name).data = buffer.clone()
    with torch.no_grad():
        return other.eval()(input_ids=document.unsqueeze(0), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", MODELS)
def test_documents_have_the_frequencies_of_their_own_length(kind: str, tmp_path: Path) -> None:
    """Rows that end in padding, rows that hold several documents, and forwards after longer ones."""
    model = built(kind, tmp_path).eval()
    documents, ids = rows(20)
    right = [alone(kind, model, document) for document in documents]
    decide_by_document(model)
    padded = PackedRows.of_lengths(LENGTHS, 20, torch.device("cpu")).position_ids
    numbers = torch.tensor([[0] * 12 + [1] * 5 + [-1] * 5, [0] * 10 + [1] * 12])
    packed = PackedRows(numbers, torch.device("cpu"))
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=padded, use_cache=False).logits
        for row, expected in enumerate(right):
            assert torch.allclose(found[row, : len(expected)], expected, rtol=0, atol=ROUNDING)
        again = model(input_ids=ids[1:2, :5], use_cache=False).logits[0]
        assert torch.allclose(again, right[1], rtol=0, atol=ROUNDING)
        isolate_documents(model)
        together = torch.zeros(2, 22, dtype=torch.long)
        for number, (row, start, end) in enumerate(packed.spans):
            together[row, start:end] = documents[number]
        named = {"position_ids": packed.position_ids, "documents": packed, "use_cache": False}
        logits = model(input_ids=together, **named).logits
    for (row, start, end), expected in zip(packed.spans, right):
        assert torch.allclose(logits[row, start:end], expected, rtol=0, atol=ROUNDING)


def test_the_longest_row_decides_without_it(tmp_path: Path) -> None:
    """What is mended: Transformers gives the short row of a batch other logits than the row alone."""
    model = built("longrope", tmp_path).eval()
    documents, ids = rows(12)
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False).logits[1, :5]
    assert (found - alone("longrope", model, documents[1])).abs().max() > 10 * ROUNDING


def test_only_such_models_are_changed(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert not follows_length(build_model(Model(model_name_or_path=str(tmp_path), init="random"), torch.float32))
    assert follows_length(built("dynamic", tmp_path))


def test_lengths_are_read_from_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    assert lengths_of(positions).tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]
    # a part of a row that begins inside of a document
    assert lengths_of(torch.tensor([[4, 5, 0]])).tolist() == [[6, 6, 1]]

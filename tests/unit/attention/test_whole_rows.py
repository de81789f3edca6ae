"""Rows of one document: Transformers reads nothing on the host, and its masks stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.causal_configs import small_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, masking_utils

from shardwright.attention.whole_rows import SEARCH, one_document_each

FAMILIES = (
    "llama",
    "gemma3_text",
    "gemma2",
    "gpt_oss",
    "cohere2",
    "mistral",
    "gpt2",
    "llama4_text",
    "modernbert-decoder",
    "phi3",
)
"""Full, sliding and chunked attention, softcaps and sinks, positions learned and rotary."""
READS = torch.ops.aten._local_scalar_dense.default


class _Reads(TorchDispatchMode):
    """Counts the values that are read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is READS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_of_transformers(family: str) -> None:
    """Logits are equal bit for bit, in rows longer than a window or a chunk, and without a read."""
    built = small_config(family)
    assert built is not None
    config = built[0]
    for key in ("sliding_window", "attention_chunk_size"):
        if getattr(config, key, None):
            setattr(config, key, 8)
    torch.manual_seed(0)
    for attention in ("sdpa", "eager"):
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        except ValueError:  # the family has no sdpa
            continue
        ids = torch.randint(2, 100, (2, 24))
        with torch.no_grad(), _Reads() as before:
            right = model(ids, use_cache=False).logits
        with torch.no_grad(), one_document_each(), _Reads() as reads:
            found = model(ids, use_cache=False).logits
        assert torch.equal(found, right)
        assert reads.count == 0 and (before.count or family == "gpt_oss")


def test_the_search_is_put_back() -> None:
    before = getattr(masking_utils, SEARCH)
    with pytest.raises(RuntimeError), one_document_each():
        assert getattr(masking_utils, SEARCH) is not before
        raise RuntimeError
    assert getattr(masking_utils, SEARCH) is before

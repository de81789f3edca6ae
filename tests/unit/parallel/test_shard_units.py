"""What zero* gathers together, and what of it once a microbatch. Known-fault rows: none."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.tiny_models import FAMILIES
from torch import Tensor, nn

from shardwright.models.model_parts import find_parts
from shardwright.parallel.apply import shard_units


class Scaled(nn.Embedding):
    """Computes with its weight: the gradient of the factor reads it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm()


def model(family: str) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())


def test_ends_are_gathered_once() -> None:
    """The embedding is not read by backward, norm and head stay between forward and backward; blocks are neither."""
    llama = model("llama")
    units = shard_units(llama, find_parts(llama), "block")
    assert [(unit.is_lookup, unit.is_last) for unit in units] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize("replaced", ["class", "method"])
def test_an_embedding_of_its_own_is_gathered_for_backward(replaced: str) -> None:
    """A subclass, and a module whose forward was replaced, may compute with the weight."""
    llama = model("llama")
    if replaced == "class":
        llama.model.embed_tokens = Scaled(64, 32, device="meta")
    else:
        plain = llama.model.embed_tokens.forward
        llama.model.embed_tokens.forward = lambda ids: plain(ids)
    assert not shard_units(llama, find_parts(llama), "block")[0].is_lookup


def test_tied_embeddings_stay_in_the_root() -> None:
    tied = model("llama_tied")
    units = shard_units(tied, find_parts(tied), "block")
    assert not any(unit.is_lookup for unit in units) and len(units) <= 3

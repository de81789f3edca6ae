"""Stages split from models, run one after another in one process against the whole model. Rows A82, A83 (names), A21.

The oracle is Transformers' own forward and backward of the unsplit model, from the same weights.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import FAMILIES, spec_of
from torch import Tensor, nn

from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.layout.pipeline_schedules import head_blocks, split_blocks
from shardwright.models import build_model, find_parts, materialise
from shardwright.parallel.pipeline.stages import PipelineSplit, build_stages, plan_split

IDS = torch.arange(2 * 12).view(2, 12) * 11 % 97
CPU = torch.device("cpu")


def written(directory: Path, family: str, layers: int, **config: Any) -> Model:
    """The model section for a directory with only a config of `layers` blocks."""
    made = FAMILIES[family]()
    values = {
        **made.to_dict(),
        "n_layer" if family == "gpt2" else "num_hidden_layers": layers,
        "vocab_size": 97,
    }
    values |= {"pad_token_id": 3} if values.get("pad_token_id") is not None else {}
    if values.get("layer_types"):
        kinds = ["sliding_attention", "full_attention"] if "gemma" in family else ["full_attention"]
        values["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    values |= {"sliding_window": 4} if "gemma" in family else {}
    type(made).from_dict({**values, **config}).save_pretrained(directory)
    return spec_of(directory, family, init="random")


def pieces(spec: Model, stages: int, rank_stages: list[list[int]]) -> list[tuple[nn.Module, Any]]:
    """(pruned model, its stages) of each rank, filled in float64."""
    found = []
    for mine in rank_stages:
        model = build_model(spec, torch.float64)
        split = split_of(model, spec, stages)
        own = build_stages(model, split, mine)
        materialise(nn.ModuleList([model, *own]), spec, seed=5, device=CPU)
        found.append((model, own))
    return found


def split_of(model: nn.Module, spec: Model, stages: int) -> PipelineSplit:
    return plan_split(model, find_parts(model), spec, stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_are_the_model(family: str, tmp_path: Path) -> None:
    """Logits and gradients bitwise, Gemma's sliding and full blocks among them; 3 stages on 2 ranks, 5 blocks (A82)."""
    spec = written(tmp_path, family, 5)
    whole = build_model(spec, torch.float64)
    materialise(whole, spec, seed=5, device=CPU)
    right = whole(IDS, use_cache=False).logits
    right.square().mean().backward()
    ranks = pieces(spec, 3, [[0, 2], [1]])
    stages = sorted((stage for _, own in ranks for stage in own), key=lambda stage: stage.index)
    hidden: Any = IDS
    for stage in stages:
        hidden = stage(hidden, use_cache=False)
    assert torch.equal(hidden.logits, right)
    hidden.logits.square().mean().backward()
    gradients = dict(whole.named_parameters())
    names = [name for model, _ in ranks for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(gradients), "each parameter on exactly one rank, under its own name"
    for model, _ in ranks:
        for name, p in model.named_parameters():
            assert p.grad is not None and torch.equal(p.grad, gradients[name].grad), name  # type: ignore[arg-type]


def test_each_rank_fills_only_its_stages(tmp_path: Path) -> None:
    """A21: what other stages hold is gone before anything is filled; the tied embedding is on both ends, by one name."""
    spec = written(tmp_path, "qwen3", 5)
    names = []
    for mine in ([0], [1]):
        model = build_model(spec, torch.float32)
        parts, split = find_parts(model), split_of(model, spec, 2)
        build_stages(model, split, mine)
        assert all(p.is_meta for p in model.parameters())
        names.append([name for name, _ in model.named_parameters()])
        assert split.tied == ("model.embed_tokens.weight",)
        own = split.parts_of(parts, mine)
        assert own.blocks == split.blocks[mine[0]] and bool(own.head) == (mine == [1])
    assert set(names[0]) & set(names[1]) == {"model.embed_tokens.weight"}
    assert sum(".layers." in name for name in names[0]) == 11 * len(split.blocks[0])


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (28, 4), (30, 4), (7, 3), (4, 4)])
def test_every_block_is_on_one_stage(layers: int, stages: int, tmp_path: Path) -> None:
    """A82: 30 blocks on 4 stages keep all 30, in order."""
    spec = written(tmp_path, "llama", layers)
    split = split_of(build_model(spec, torch.float32), spec, stages)
    assert [name for names in split.blocks for name in names] == [f"model.layers.{i}" for i in range(layers)]
    assert all(split.blocks)


def test_too_few_blocks_are_refused(tmp_path: Path) -> None:
    """A82: 3 blocks on 2 x 2 virtual stages."""
    spec = written(tmp_path, "llama", 3)
    with pytest.raises(ConfigError, match="3 blocks cannot fill 4 pipeline stages"):
        split_of(build_model(spec, torch.float32), spec, 4)


def test_the_head_weighs_what_its_weights_say(tmp_path: Path) -> None:
    """A head of 6.9 blocks: 10 blocks on 2 stages are 8 and 2, where halves would give the last stage 70% of the work."""
    spec = written(tmp_path, "llama", 10, vocab_size=1600)
    split = split_of(build_model(spec, torch.float32), spec, 2)
    block, head = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48, 1600 * 32
    # tolerance: by hand, to three digits
    assert head / block == pytest.approx(6.67, abs=0.01) and head_blocks(block, head) == head / block
    assert tuple(map(len, split.blocks)) == split_blocks(10, 2, head / block) == (8, 2)


class ScaledModel(transformers.LlamaModel):
    """Scales hidden states before the first block, outside of the embedding, as Gemma does in some versions."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=embedded * 2, **kwargs)


class ScaledLlama(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = ScaledModel(config)


class ExtraLlama(transformers.LlamaForCausalLM):
    """Has a parameter outside of all parts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.Linear(3, 3)


def tiny(kind: str, freeze: str = "") -> nn.Module:
    """A model on meta of one of the classes of this file."""
    config = FAMILIES["llama"]()
    with torch.device("meta"):
        return {
            "scaled": ScaledLlama,
            "extra": ExtraLlama,
            "plain": lambda c: nn.Sequential(nn.Linear(3, 3)),
        }[kind](config)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("scaled", "changes hidden states outside of its blocks"),
        ("extra", "`extra` is used neither only before its blocks nor only after them"),
        ("plain", "needs a Transformers causal language model"),
    ],
)
def test_models_that_the_cut_would_change_are_refused_by_name(kind: str, text: str, monkeypatch: Any) -> None:
    """A model that scales between embedding and blocks would do so on every stage."""
    monkeypatch.setattr("shardwright.parallel.pipeline.stages.materialise", lambda model, *a, **k: _rotary(model))
    with pytest.raises(ModelError, match=text):
        split_of(tiny(kind), Model(model_name_or_path="x", init="random"), 2)


def _rotary(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def test_a_stage_without_a_trained_parameter_is_refused(tmp_path: Path) -> None:
    """Its rank would have no optimizer, and nothing would come back through it."""
    spec = written(tmp_path, "llama", 4).model_copy(update={"freeze": ["*embed*", "*layers.0*", "*layers.1*"]})
    with pytest.raises(ModelError, match="leaves pipeline stage 0 of 4 without a trained parameter"):
        split_of(build_model(spec, torch.float32), spec, 4)
    split_of(build_model(spec, torch.float32), spec, 1)


def test_trying_the_cut_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Buffers stay on meta, every module stays, and torch's generator is not moved."""
    spec = written(tmp_path, "gemma3", 3)
    model = build_model(spec, torch.float32)
    before, state = [(n, id(m)) for n, m in model.named_modules()], torch.get_rng_state()
    held = copy.copy(dict(model.named_buffers()))
    split_of(model, spec, 2)
    assert [(n, id(m)) for n, m in model.named_modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    now: dict[str, Tensor] = dict(model.named_buffers())
    assert held.keys() == now.keys() and all(now[name] is held[name] for name in held)

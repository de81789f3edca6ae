"""Weights under the names that the hub has, read and written: bit for bit what Transformers reads and writes.

The oracle is Transformers' own from_pretrained and save_pretrained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hub_models import HUB_FAMILIES, assert_same, auto, filled, stored
from tests.tiny_models import spec_of
from torch import Tensor, nn

from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.export import save_pretrained
from shardwright.models import build_model, find_parts, materialise, safetensors_io
from shardwright.models.initialization import Recipe
from shardwright.models.materialise import RECIPES, check_weights, unsplit_model_of, weight_notices
from shardwright.models.tensor_tracing import traced
from shardwright.models.weights import Weights

CPU = torch.device("cpu")


def loaded(spec: Model, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(spec, dtype)
    materialise(model, spec, seed=0, device=CPU)
    return model


def eager(directory: Path, **more: Any) -> Model:
    return spec_of(directory, attn_implementation="eager", **more)


@pytest.mark.parametrize("family", HUB_FAMILIES)
def test_every_kind_of_rule_is_followed_both_ways(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as Transformers reads; written as Transformers writes what it has read, and what it has built."""
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 100)
    made = filled(family)
    made.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    oracle = auto(family).from_pretrained(tmp_path / "hub", dtype=torch.float32)
    model = loaded(eager(tmp_path / "hub"))
    assert_same(model.state_dict(), oracle.state_dict())
    oracle.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, eager(tmp_path / "hub"), tmp_path / "ours", max_shard_bytes=20_000)
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    new = eager(tmp_path / "hub", init="random")
    save_pretrained(loaded(new), new, tmp_path / "new")
    assert stored(tmp_path / "new").keys() == stored(tmp_path / "hub").keys()


@pytest.mark.parametrize("family", ["mixtral", "gemma3"])
def test_files_under_the_names_of_the_built_model_are_read_and_written_so(tmp_path: Path, family: str) -> None:
    model = filled(family)
    model.save_pretrained(tmp_path / "hub")
    tied = set(model.all_tied_weights_keys)
    built = {name: value.clone() for name, value in model.state_dict().items() if name not in tied}
    for file in (tmp_path / "hub").glob("*.safetensors"):
        file.unlink()
    save_file(built, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    mine = loaded(eager(tmp_path / "hub"))
    assert_same(mine.state_dict(), model.state_dict())
    save_pretrained(mine, eager(tmp_path / "hub"), tmp_path / "out")
    assert_same(stored(tmp_path / "out"), built)


def rewritten(directory: Path, **named: str) -> None:
    """Renames tensors: each key is replaced by its value in every name."""
    held = {}
    for name, value in load_file(directory / "model.safetensors").items():
        for old, new in named.items():
            name = name.replace(old, new)
        held[name] = value
    save_file(held, directory / "model.safetensors", {"format": "pt"})


def test_names_of_older_files(tmp_path: Path) -> None:
    """A language model nested twice (files of some releases), gamma and beta of old BERTs, the model without its head."""
    gemma = filled("gemma3")
    gemma.save_pretrained(tmp_path / "gemma")
    rewritten(tmp_path / "gemma", **{"language_model.model.": "model.language_model.model."})
    assert_same(loaded(eager(tmp_path / "gemma")).state_dict(), gemma.state_dict())
    bert = filled("camembert")
    bert.save_pretrained(tmp_path / "bert")
    rewritten(tmp_path / "bert", **{"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"})
    assert_same(loaded(eager(tmp_path / "bert")).state_dict(), bert.state_dict())
    moe = filled("qwen3_moe")
    moe.save_pretrained(tmp_path / "moe")
    rewritten(tmp_path / "moe", **{"model.layers": "layers", "model.norm": "norm", "model.embed": "embed"})
    assert_same(loaded(eager(tmp_path / "moe")).state_dict(), moe.state_dict())


def test_a_part_of_stacked_experts_is_read_from_those_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled("qwen3_moe")
    model.save_pretrained(tmp_path)
    meta = build_model(eager(tmp_path), torch.float32)
    experts = meta.get_submodule("model.layers.1.mlp.experts")
    recipe: Recipe = vars(experts)[RECIPES]["gate_up_proj"]
    weights = Weights(tmp_path, recipe.whole)
    read: list[str] = []
    real = safetensors_io.read_slice

    def spy(entry: Any, box: Any, out: Tensor) -> None:
        read.append(next(name for name, known in weights._entries.items() if known is entry))
        real(entry, box, out)

    monkeypatch.setattr("shardwright.models.weights.read_slice", spy)
    want = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    path = "model.layers.1.mlp.experts"
    for box, names in (
        ((slice(1, 3), slice(0, 16), slice(0, 16)), {f"{path}.{n}.{k}_proj.weight" for n in (1, 2) for k in ("gate", "up")}),
        ((slice(0, 4), slice(8, 16), slice(0, 16)), {f"{path}.{n}.up_proj.weight" for n in range(4)}),
        ((slice(3, 4), slice(4, 7), slice(5, 9)), {f"{path}.3.gate_proj.weight"}),
        ((slice(4, 4), slice(0, 16), slice(0, 16)), set()),
    ):  # fmt: skip
        read.clear()
        out = torch.empty([part.stop - part.start for part in box])
        weights.read(recipe, box, out)
        assert torch.equal(out, want[box]) and set(read) == names and len(read) == len(names)


def test_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    filled("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, first = load_file(file), "model.layers.0.mlp.experts.0.up_proj.weight"
    save_file({n: v for n, v in whole.items() if "experts.3." not in n}, file, {"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"gate_up_proj is \[3, 16, 16\] in the files \(made of 6 tensors\) and \[4, 16, 16\]",
    ):
        loaded(eager(tmp_path))
    save_file({n: v for n, v in whole.items() if "up_proj" not in n}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"gate_up_proj cannot be made from \S+experts\.0\.gate_proj\.weight"):
        check_weights(build_model(eager(tmp_path), torch.float32), eager(tmp_path))
    save_file(whole | {first: whole[first][:5].clone()}, file, {"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"layers\.0\.mlp\.experts\.gate_up_proj cannot be made from",
    ):
        loaded(eager(tmp_path))
    stacked = torch.zeros(4, 16, 16)
    save_file(whole | {"model.layers.0.mlp.experts.gate_up_proj": stacked}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"are both model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        loaded(eager(tmp_path))


def test_what_belongs_to_no_module_is_said_and_a_part_of_a_module_is_refused(tmp_path: Path) -> None:
    model = filled("mixtral")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, spec = load_file(file), eager(tmp_path)
    meta = build_model(spec, torch.float32)
    assert weight_notices(meta, spec) == []
    extra = {
        "mtp.head.weight": torch.zeros(3),
        "model.vision.patch": torch.zeros(2),
        "model.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file(whole | extra, file, {"format": "pt"})
    said = weight_notices(meta, spec)
    assert len(said) == 1 and "2 weights in the files belong to no module" in said[0]
    assert "model.vision.patch, mtp.head.weight" in said[0]
    assert_same(loaded(spec).state_dict(), model.state_dict())
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
    ):
        save_file(whole | {name: torch.zeros(3)}, file, {"format": "pt"})
        with pytest.raises(ModelError, match=rf"1 not in the model: {name}"):
            check_weights(meta, spec)


def test_an_operation_that_computes_is_made_from_whole_tensors() -> None:
    """And parts of what moves elements are parts: against the same operations of torch on values."""
    torch.manual_seed(0)
    values = {name: torch.randn(5, 6) for name in "abcd"}

    def moved(t: dict[str, Tensor]) -> list[Tensor]:
        stacked = torch.stack([t["a"], t["b"]], dim=1)
        joined = torch.cat([stacked, torch.stack([t["c"], t["d"]], dim=-2)], dim=0)
        mixed = joined.reshape(5, 2, 2, 6).transpose(1, 2).reshape(10, 2, 6).contiguous()
        turned = joined.transpose(0, -1)
        cut = [
            joined[2:7],
            joined[-1],
            joined[:, 1],
            *joined.split([3, 7]),
            *joined.unbind(1),
            *turned.chunk(3),
        ]
        return [
            joined,
            mixed,
            turned,
            *cut,
            cut[0][:, :1].squeeze(1),
            mixed * 2 + joined,
            joined.to(torch.float64),
        ]

    def read(name: str, box: tuple[slice, ...], out: Tensor) -> None:
        out.copy_(values[name][box])

    lazy = moved({name: traced(name, value.shape, value.dtype) for name, value in values.items()})
    for found, want in zip(lazy, moved(values), strict=True):
        assert found.shape == want.shape and found.dtype == want.dtype
        for _ in range(5):
            box = tuple(slice(*sorted(torch.randint(0, size + 1, (2,)).tolist())) for size in want.shape)
            out = torch.full([part.stop - part.start for part in box], torch.nan, dtype=want.dtype)
            found.origin.fill(box, out, read)  # type: ignore[attr-defined]
            assert torch.equal(out, want[box])
    with pytest.raises(NotImplementedError, match="writes into a tensor"):
        lazy[0].add_(1)


def test_the_blocks_of_a_model_with_a_vision_tower_are_those_of_its_text_model() -> None:
    for family in ("gemma3", "mistral3"):
        parts = find_parts(filled(family))
        assert parts.blocks == ("model.language_model.layers.0", "model.language_model.layers.1")
        assert parts.norm == "model.language_model.norm"


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen3_moe", "camembert"])
def test_what_text_does_not_reach_is_frozen_and_said(tmp_path: Path, family: str) -> None:
    """A weight without a gradient would still decay. The oracle is which parameters get no gradient from text in torch."""
    made = filled(family)
    made.save_pretrained(tmp_path)
    made(input_ids=torch.arange(2, 12)[None]).logits.square().sum().backward()
    unreached = {name for name, parameter in made.named_parameters() if parameter.grad is None}
    model = build_model(eager(tmp_path), torch.float32)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == unreached
    assert bool(unreached) == (family in ("gemma3", "mistral3"))
    said = "\n".join(weight_notices(model, eager(tmp_path)))
    assert said.startswith(f"frozen: {len(unreached)} parameters" if unreached else "") and bool(said) == bool(
        unreached
    )


def test_a_model_of_a_function_keeps_its_names() -> None:
    spec = Model.model_validate({"model_name_or_path": "tests.odd_models:odd_model", "init": "random"})
    whole = unsplit_model_of(build_model(spec, torch.float32))
    assert whole is not None and whole.hub is None
    assert unsplit_model_of(nn.Linear(2, 2)) is None

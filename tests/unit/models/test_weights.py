"""Weights are read as Transformers reads them, or refused: covers A29.

The oracle is Transformers' from_pretrained on the same directory.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import FAMILIES, spec_of, write_model
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.models import build_model, materialise, safetensors_io

CPU = torch.device("cpu")


def loaded(spec: Model, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(spec, dtype)
    materialise(model, spec, seed=0, device=CPU)
    return model


def same(model: nn.Module, want: nn.Module) -> None:
    values = dict(model.named_parameters(remove_duplicate=False))
    assert values.keys() == dict(want.named_parameters(remove_duplicate=False)).keys()
    for name, value in want.named_parameters(remove_duplicate=False):
        assert torch.equal(values[name], value) and values[name].dtype == value.dtype, name


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    held = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        if value is None:
            del held[name]
        else:
            held[name] = value
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "float64")])
def test_every_family_is_read_bit_for_bit(
    tmp_path: Path, family: str, stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file, or shards of 100 kB; through a buffer smaller than most tensors; widened exactly."""
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 1000)
    more = {"max_shard_size": "100KB"} if stored == "float32" else {}
    write_model(tmp_path, family, dtype=getattr(torch, stored), **more)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    same(loaded(spec_of(tmp_path, family), getattr(torch, dtype)), want)


def test_a_model_saved_without_its_head_and_old_names_that_nobody_needs(tmp_path: Path) -> None:
    model = write_model(tmp_path, "gpt2")
    model.transformer.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in held
    change(tmp_path, **{"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)})
    same(loaded(spec_of(tmp_path)), model)


def test_a_bf16_master_narrows_and_float64_into_float32_does_not(tmp_path: Path) -> None:
    model = write_model(tmp_path / "single", "llama")
    for name, value in loaded(spec_of(tmp_path / "single"), torch.bfloat16).named_parameters():
        assert torch.equal(value, model.get_parameter(name).bfloat16()), name
    write_model(tmp_path / "double", "llama", dtype=torch.float64)
    with pytest.raises(ModelError, match=r"is torch\.float64 in the files and torch\.float32 in the model"):
        loaded(spec_of(tmp_path / "double"))


def test_two_names_of_a_tied_tensor_must_be_equal(tmp_path: Path) -> None:
    """A29: a checkpoint that holds both is accepted when they are equal and refused when they are not."""
    model = write_model(tmp_path, "llama_tied")
    change(tmp_path, **{"lm_head.weight": model.lm_head.weight.detach().clone()})
    same(loaded(spec_of(tmp_path)), model)
    change(tmp_path, **{"lm_head.weight": model.lm_head.weight.detach() + 1})
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight and lm_head\.weight differ"):
        loaded(spec_of(tmp_path))
    change(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": model.lm_head.weight.detach() + 2})
    assert torch.equal(loaded(spec_of(tmp_path)).model.embed_tokens.weight, model.lm_head.weight + 2)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"9 not in the model: model\.layers\.1\.\S+"):
        loaded(spec_of(tmp_path, config_overrides={"num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"9 missing from the files: model\.layers\.2\.\S+"):
        loaded(spec_of(tmp_path, config_overrides={"num_hidden_layers": 3}))
    with pytest.raises(ModelError) as caught:
        loaded(spec_of(tmp_path, config_overrides={"vocab_size": 4000}))
    assert "model.embed_tokens.weight is [4097, 32] in the files and [4000, 32] in the model" in str(caught.value)
    assert "vocab_size" in caught.value.why
    change(tmp_path, **{"model.norm.weight": torch.zeros(32, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int64 in the files"):
        loaded(spec_of(tmp_path))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", max_shard_size="300KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    for damaged in (whole[:-10], whole[:6], b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:]):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=file.name):
            loaded(spec_of(tmp_path))
    file.unlink()
    with pytest.raises(ModelError, match=rf"{file.name} is missing"):
        loaded(spec_of(tmp_path))


def test_two_sets_of_weights_in_one_directory_are_refused(tmp_path: Path) -> None:
    """Transformers reads the single file then; an index that names only that file is one set."""
    model = write_model(tmp_path, "llama", max_shard_size="300KB")
    model.save_pretrained(tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"has model\.safetensors and model\.safetensors\.index\.json"):
        loaded(spec_of(tmp_path))
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (tmp_path / "one" / "model.safetensors.index.json").write_text(json.dumps(index))
    same(loaded(spec_of(tmp_path / "one")), model)

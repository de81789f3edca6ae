"""What `check` changes in a run, and that it keeps what matters when it shrinks a model. Covers no known fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.places import ROOT
from tests.tiny_models import FAMILIES

from shardwright.config import load_run_file
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.models.dropout import silence_dropout
from shardwright.tools.check.adjust import adjust
from shardwright.tools.check.rows import Changes, CheckedRows, masked_labels
from shardwright.tools.check.shrink import Limits, Size, activation_width, shrunk_config


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Any:
    monkeypatch.chdir(ROOT)
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_run_file("examples/tiny.yaml", {"data.cache_dir": str(tmp_path), **named}).run


def test_tiny_example_is_checked_as_it_is_but_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, monkeypatch)
    adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=3)
    assert adjusted.lines == () and adjusted.changes == Changes() and adjusted.updates == 3
    dtypes = {key: value for key, value in adjusted.run.precision.model_dump().items() if key.endswith("_dtype")}
    assert len(dtypes) == 3 and {*dtypes.values()} == {"fp64"}
    assert adjusted.run.training == run.training
    assert adjust(run, dtype="run", data_ranks=2, device="cpu", updates=3).run == run


def test_compiled_blocks_are_left_out_where_they_compute_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama's norms do; GPT-2 computes in the model's dtype throughout. In the run's own dtypes nothing is changed."""
    run = _run(tmp_path, monkeypatch, memory__compile=True)
    adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=3)
    assert not adjusted.run.memory.compile
    assert "memory.compile is off: LlamaRMSNorm computes in float32" in adjusted.lines[0]
    assert adjust(run, dtype="run", data_ranks=2, device="cpu", updates=3).run.memory.compile
    run = _run(tmp_path, monkeypatch, memory__compile=True, model__model_name_or_path="examples/gpt2-tiny")
    assert adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=3).run.memory.compile


def test_one_microbatch_becomes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, monkeypatch, training__per_device_train_batch_size=4)
    adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=1)
    assert adjusted.run.training.per_device_train_batch_size == 1
    assert adjusted.run.training.global_batch_size == 8
    assert "4 -> 1, so that 4 microbatches are accumulated" in adjusted.lines[0]


def test_equal_rows_are_thinned_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of equal length would hide a mean of means; both sides then see the same fewer labels, and count them."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "x" * (24 * 17 - 1)}))  # and one end-of-text: 24 full rows
    data = {"data__train": [str(tmp_path / "long.jsonl")], "data__max_length": 17}
    run = _run(tmp_path, monkeypatch, training__max_steps=2, **data)
    adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=3)
    assert adjusted.updates == 2 and adjusted.changes.mask_labels
    assert "2 updates only" in adjusted.lines[0]
    whole = CheckedRows(adjusted.run, adjusted.changes, data_rank=0, data_ranks=1).update(0)
    parts = [CheckedRows(adjusted.run, adjusted.changes, data_rank=d, data_ranks=2).update(0) for d in range(2)]
    counts = [int((m.labels != IGNORE_INDEX).sum()) for m in whole.microbatches]
    assert whole.target_tokens == sum(counts) == parts[0].target_tokens == parts[1].target_tokens
    assert len(set(counts)) > 1
    for d, part in enumerate(parts):
        for m in part.microbatches:
            assert m.index % 2 == d and torch.equal(m.labels, whole.microbatches[m.index].labels)


def test_thinning_masks_some_of_every_four_but_never_all() -> None:
    labels = torch.tensor([5, 6, 7, 8, 9, IGNORE_INDEX])
    assert masked_labels(labels, 6).tolist() == [5, IGNORE_INDEX, 7, 8, IGNORE_INDEX, IGNORE_INDEX]
    assert masked_labels(labels, 8).tolist() == labels.tolist()


def test_dropout_can_be_silenced_wherever_it_stands() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.3
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.2))

    model = Attention()
    silence_dropout(model)
    assert model.attention_dropout == 0.0 and model.inner[1].p == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shrunk_model_keeps_what_matters(family: str) -> None:
    """Ratios of heads, width and feed-forward, the vocabulary's remainders, tying, every kind of layer; and it runs."""
    big: dict[str, Any] = {"vocab_size": 50_257, "pad_token_id": 50_256, "eos_token_id": [7, 50_255]}
    if family == "gpt2":
        big |= {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "eos_token_id": 50_256}
    else:
        big |= {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 128}
        big |= {"num_key_value_heads": 4, "intermediate_size": 5632}
    kind = type(FAMILIES[family]())
    config = kind(**{**FAMILIES[family]().to_dict(), **big, **({"layer_types": None} if family != "gpt2" else {})})
    before = config.to_dict()
    small = {**before, **shrunk_config(before)}
    for size in range(2, 9):
        assert small["vocab_size"] % size == 50_257 % size
    assert small["pad_token_id"] < small["vocab_size"] < 2000
    assert small.get("tie_word_embeddings") == before.get("tie_word_embeddings")
    if family == "gpt2":
        assert (small["n_head"], small["n_layer"], small["n_embd"]) == (2, 4, 32)
    else:
        assert small["num_attention_heads"] // small["num_key_value_heads"] == 4
        assert small["hidden_size"] == 8 * small["head_dim"] == 128
        assert small["intermediate_size"] / small["hidden_size"] == 5632 / 2048
        assert small["num_hidden_layers"] >= 4
        kinds = before.get("layer_types") or []
        assert set(small.get("layer_types") or []) == set(kinds)
    model_class = __import__("transformers").AutoModelForCausalLM
    model = model_class.from_config(kind(**small))
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert model(input_ids=torch.arange(6)[None]).logits.shape == (1, 6, small["vocab_size"])


def test_small_models_stay_as_they_are() -> None:
    for family in ("llama", "qwen3"):
        config = FAMILIES[family]().to_dict()
        assert set(shrunk_config({**config, "vocab_size": 257})) <= {
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
        }


def test_sizes_by_hand() -> None:
    """1,000 parameters on 2 ranks: 2 x 40 + 8 bytes each, activations 8 bytes x tokens x width a rank."""
    size = Size(parameters=1000, activation_width=50, microbatch_tokens=10, update_tokens=80)
    assert size.memory_bytes(2) == 2 * (40_000 + 8 * 10 * 50) + 8000
    assert size.disk_bytes(3, 5) == 5 * 8 * 1000 * 13
    assert size.flops(3) == 6 * 1000 * 80 * 3
    assert Limits(10**6, 10**6).exceeded(size, 2, 3, 5) == ""
    assert "of memory where 1.0 kB" in Limits(1000, 10**6).exceeded(size, 2, 3, 5)
    assert "of disk where 1.0 kB" in Limits(10**6, 1000).exceeded(size, 2, 3, 5)
    assert "operations a layout" in Limits(10**6, 10**6, flops=1e6).exceeded(size, 2, 3, 5)
    config = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 10,
    }
    assert activation_width(config, 16) == 2 * (16 * 4 + 3 * 8 + 2 * 2 * 16) + 4 * 10


def test_a_model_too_large_is_shrunk_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {
        "num_hidden_layers": 16,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    }
    overrides |= {"head_dim": 64, "num_key_value_heads": 4, "vocab_size": 32_001}
    run = _run(tmp_path, monkeypatch, model__config_overrides=overrides, training__global_batch_size=64)
    adjusted = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=3)
    assert adjusted.run.training.global_batch_size == 6 and adjusted.run.data.max_length == 96
    assert "Fewer and shorter rows (" in adjusted.lines[0]
    assert "num_attention_heads 16 -> 8" in adjusted.lines[1] and "vocab_size 32001 -> 921" in adjusted.lines[1]
    assert adjusted.changes.vocabulary == 921 == 840 + 32_001 % 840
    assert adjusted.run.model.config_overrides["num_hidden_layers"] == 4


def test_ids_and_labels_stay_in_a_shrunk_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are taken modulo the vocabulary, so a label is still the next id; the data itself is not refused."""
    run = _run(tmp_path, monkeypatch, model__config_overrides={"vocab_size": 50})
    right = CheckedRows(_run(tmp_path, monkeypatch), Changes(), data_rank=0, data_ranks=1).update(0)
    mapped = CheckedRows(run, Changes(vocabulary=50), data_rank=0, data_ranks=1).update(0)
    assert mapped.target_tokens == right.target_tokens and mapped.row_ids == right.row_ids
    for before, after in zip(right.microbatches, mapped.microbatches):
        targets = before.labels != IGNORE_INDEX
        assert torch.equal(after.input_ids, before.input_ids % 50)
        assert torch.equal(after.labels != IGNORE_INDEX, targets)
        assert torch.equal(after.labels[targets], before.labels[targets] % 50)
        assert (before.labels[targets] >= 50).any()


@pytest.mark.parametrize(
    ("overrides", "split", "off"),
    [
        ({"resid_pdrop": 0.1}, True, True),
        ({"attn_pdrop": 0.1}, True, True),
        ({"resid_pdrop": 0.1}, False, False),
        ({}, True, False),
    ],
)
def test_dropout_is_off_where_split_models_are_checked(
    overrides: dict[str, float], split: bool, off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then, only for a model that has dropout, and with a line."""
    gpt2 = {"model__model_name_or_path": "examples/gpt2-tiny", "model__config_overrides": overrides}
    run = _run(tmp_path, monkeypatch, **gpt2)
    found = adjust(run, dtype="fp64", data_ranks=2, device="cpu", updates=1, split=split)
    assert found.changes.no_dropout is off
    assert any("Dropout is off: layouts with pp" in line for line in found.lines) is off

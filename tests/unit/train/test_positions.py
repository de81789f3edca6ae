"""Rows against the positions of a model: tables found in a forward, refused before start; a line for rotary positions.

The sizes of the tables are those of the configs that are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.gloo.engine import ODD, run_file

from shardwright.attention.rules import check_packed_model
from shardwright.config.schema import Model
from shardwright.data.table import Table
from shardwright.errors import ConfigError, ModelError
from shardwright.models import build_model
from shardwright.models.position_tables import PositionTable, numbers_from_elsewhere, position_tables
from shardwright.train.positions import check_positions

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                         "intermediate_size": 48, "max_position_embeddings": 32}  # fmt: skip
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
MODELS: dict[str, tuple[Callable[[], Any], tuple[PositionTable, ...]]] = {
    "gpt2": (lambda: transformers.GPT2Config(**GPT2), (PositionTable("transformer.wpe.weight", 32),)),
    "opt": (lambda: transformers.OPTConfig(**OPT), (PositionTable("model.decoder.embed_positions.weight", 32),)),
    "biogpt": (lambda: transformers.BioGptConfig(**SIZES), (PositionTable("biogpt.embed_positions.weight", 32),)),
    "gpt_neo": (
        lambda: transformers.GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4,
                                          attention_types=[[["global"], 1]], max_position_embeddings=32),
        (PositionTable("transformer.wpe.weight", 32), PositionTable("transformer.h.0.attn.attention.bias", 32)),
    ),
    # its first position is behind the padding token's: one row of the table more, and one that is not used
    "roberta": (
        lambda: transformers.RobertaConfig(**SIZES, is_decoder=True, pad_token_id=1),
        (PositionTable("roberta.embeddings.position_embeddings.weight", 30),),
    ),
    "gptj": (
        lambda: transformers.GPTJConfig(**GPT2, rotary_dim=4),
        (PositionTable("transformer.rotary_emb.embed_positions", 32),),
    ),
    "ctrl": (
        lambda: transformers.CTRLConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, dff=48, n_positions=32),
        (PositionTable("transformer.pos_encoding", 32),),
    ),
    "llama": (lambda: transformers.LlamaConfig(**SIZES), ()),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), ()),
    "mpt": (lambda: transformers.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4, max_seq_len=32), ()),
}  # fmt: skip


def built(kind: str, directory: Path) -> torch.nn.Module:
    MODELS[kind][0]().save_pretrained(directory)
    return build_model(Model(model_name_or_path=str(directory), init="random"), torch.float32)


@pytest.mark.parametrize("kind", MODELS)
def test_tables_are_seen(kind: str, tmp_path: Path) -> None:
    """Learned and computed tables, with an offset and without; none of rotary positions and ALiBi."""
    found = position_tables(built(kind, tmp_path))
    assert {table for table in found if not table.name.endswith("attn.bias")} == {*MODELS[kind][1]}


def table(longest: int) -> Any:
    """A table of rows whose longest document has so many tokens."""
    result = Table.__new__(Table)
    result._pieces = torch.tensor([[0, 3], [3, longest]]).numpy()
    return result


@pytest.mark.parametrize(
    ("batching", "longest", "fits"),
    [("pad", 20, False), ("bucket", 20, True), ("pack", 20, True), ("bucket", 33, False), ("pack", 33, False),
     ("pack", 32, True)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rows_beyond_a_table_are_refused(kind: str, batching: str, longest: int, fits: bool, tmp_path: Path) -> None:
    """A padded row is 64 wide; elsewhere the longest document counts."""
    run = run_file(data__batching=batching, data__max_length=64).run
    model = built(kind, tmp_path)
    if fits:
        assert check_positions(model, run, [table(longest)]) == []
        return
    with pytest.raises(ConfigError, match="has 32 positions") as caught:
        check_positions(model, run, [table(longest)])
    assert "Set data.max_length to at most 32" in caught.value.fix


def test_what_a_layout_rounds_up_counts(tmp_path: Path) -> None:
    """Under cp 3, balanced, widths are multiples of 6: a document of 31 tokens makes a row of 36."""
    run = run_file(data__batching="bucket", data__max_length=60, parallelism__cp_size=3).run
    with pytest.raises(ConfigError, match="36 tokens"):
        check_positions(built("gpt2", tmp_path), run, [table(31)])


def test_rotary_positions_beyond_training_get_a_line(tmp_path: Path) -> None:
    """The longest document of all tables counts, not the width of rows; ALiBi has no such positions."""
    run = run_file(data__batching="pad", data__max_length=64).run
    (line,) = check_positions(built("llama", tmp_path), run, [table(20), table(40)])
    assert "up to 40 tokens" in line and "32 (max_position_embeddings)" in line
    assert check_positions(built("llama", tmp_path), run, [table(32)]) == []
    assert check_positions(built("bloom", tmp_path), run, [table(40)]) == []


def test_a_stream_may_hold_the_longest(tmp_path: Path) -> None:
    run = run_file(data__batching="pack", data__max_length=64).run
    run = run.model_copy(update={"data": run.data.model_copy(update={"streaming": True})})
    with pytest.raises(ConfigError, match="up to 64 tokens"):
        check_positions(built("gpt2", tmp_path), run, [SimpleNamespace()])  # type: ignore[list-item]


class Own(torch.nn.Module):
    """A module of a user's own with a learned table, as simple ones have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(64, 8), torch.nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return (self.tokens(input_ids) + self.places(places)) @ self.tokens.weight.T


def test_a_module_of_a_users_own_has_tables_too() -> None:
    with torch.device("meta"):
        model = Own()
    assert position_tables(model) == (PositionTable("places.weight", 16),)
    assert position_tables(build_model(run_file(ODD).run.model, torch.float32)) == ()


def test_a_model_that_numbers_otherwise_is_not_given_positions(tmp_path: Path) -> None:
    """RoBERTa begins behind the padding token's row, and takes positions that it is given as they are; OPT adds its offset."""
    assert numbers_from_elsewhere(built("roberta", tmp_path)) == "roberta.embeddings.position_embeddings.weight"
    assert all(numbers_from_elsewhere(built(kind, tmp_path)) == "" for kind in ("opt", "gpt2", "llama"))
    with pytest.raises(ModelError, match="does not give its first token position 0"):
        check_packed_model(built("roberta", tmp_path))

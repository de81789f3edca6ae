"""Context parallelism without processes: which tokens are where, blocks of attention, refusals.

Covers A21, A96, A97, A98 and A124.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import tolerance
from tests.gloo.engine import GPT2, LLAMA, ODD, run_file
from tests.tiny_models import FAMILIES
from torch import Tensor
from torch.nn import functional as F

from shardwright.attention.calls import trace_forward
from shardwright.attention.core import AttentionOutput, OnlineSoftmax, attend, attend_backward, kernel
from shardwright.config.schema import Model, RunFile
from shardwright.errors import ConfigError, ModelError
from shardwright.layout.legality import check_run
from shardwright.layout.size_rules import chunks
from shardwright.layout.traffic import context_traffic
from shardwright.models import build_model
from shardwright.parallel.context.rules import check_context_model
from shardwright.parallel.context.shard import ContextShard


def held(length: int, cp: int, balanced: bool) -> list[list[int]]:
    return [[t for own in chunks(length, cp, r, balanced) for t in own] for r in range(cp)]


def test_positions_are_those_of_the_row() -> None:
    """A97: cp 2 on rows of 8 gives rank 0 [0, 1, 6, 7]; ids, labels and position ids are cut alike."""
    assert held(8, 2, True) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert held(8, 2, False) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    rows = torch.arange(16).reshape(2, 8)
    for rank, own in enumerate(held(8, 2, True)):
        place = ContextShard(2, rank, True)
        assert place.position_ids(8, torch.device("cpu")).tolist() == [own]
        assert place.part(rows).tolist() == [own, [8 + t for t in own]]


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_each_token_is_on_one_rank_and_work_is_equal(cp: int) -> None:
    """A96: balanced ranks see equally many (query, key) pairs under causality; contiguous parts do not."""
    length = 2 * cp * 3
    for balanced in (True, False):
        assert sorted(t for own in held(length, cp, balanced) for t in own) == list(range(length))
    pairs = [sum(t + 1 for t in own) for own in held(length, cp, True)]
    assert len(set(pairs)) == 1
    plain = [sum(t + 1 for t in own) for own in held(length, cp, False)]
    assert max(plain) > 1.4 * min(plain)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_blocks_cover_exactly_the_causal_pairs(cp: int, balanced: bool) -> None:
    """A96: the blocks of the ring, and those of a gathered row, are the pairs (query, key) with key <= query, each once."""
    length = 2 * cp * 2
    owners = held(length, cp, balanced)
    tokens = length // cp
    for rank, own in enumerate(owners):
        place = ContextShard(cp, rank, balanced)
        ring, row = [], []
        for source in range(cp):
            for queries, keys, causal in place.blocks(source, tokens):
                ring += pairs_of(own[queries], owners[source][keys], causal)
        for queries, keys, causal in place.row_blocks(length):
            row += pairs_of(own[queries], list(range(length))[keys], causal)
        wanted = sorted((q, k) for q in own for k in range(q + 1))
        assert sorted(ring) == wanted
        assert sorted(row) == wanted


def pairs_of(queries: list[int], keys: list[int], causal: bool) -> list[tuple[int, int]]:
    if causal:
        assert queries == keys, "a causal block has the same tokens on both sides"
    return [(q, k) for q in queries for k in keys if not causal or k <= q]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention written out, K and V repeated for each query head."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_blocks_are_the_whole_attention(kv_heads: int, width: int) -> None:
    """A96: outputs and gradients of merged blocks equal the softmax over all keys, in both implementations."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, kv_heads, 6, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, kv_heads, 6, width, dtype=torch.float64, requires_grad=True)
    assert kernel(q, k, v) == ("cpu_flash" if width == 8 else "plain")
    grad = torch.randn(2, 4, 6, width, dtype=torch.float64)
    right = softmax_attention(q, k, v, 0.4)
    right.backward(grad)
    blocks = [
        (slice(0, 4), slice(0, 4), True),
        (slice(4, 6), slice(0, 4), False),
        (slice(4, 6), slice(4, 6), True),
    ]
    with torch.no_grad():
        merged = OnlineSoftmax(q, width)
        for a, b, causal in blocks:
            merged.add(a, attend(q[:, :, a], k[:, :, b], v[:, :, b], 0.4, causal), first=b.start == 0)
        rounding = tolerance.mixed(6, 8)
        assert torch.allclose(merged.out, right, rtol=0, atol=rounding * float(right.abs().max()))
        sums = [torch.zeros_like(t) for t in (q, k, v)]
        for a, b, causal in blocks:
            whole = AttentionOutput(merged.out[:, :, a], merged.lse[:, :, a].contiguous())
            parts = attend_backward(grad[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], whole, 0.4, causal)
            for total, part, found in zip(sums, (a, b, b), parts):
                total[:, :, part] += found
    for total, t in zip(sums, (q, k, v)):
        assert torch.allclose(total, t.grad, rtol=0, atol=2 * rounding * float(t.grad.abs().max()))


@pytest.mark.parametrize("width", [8, 6])
def test_bf16_blocks_are_merged_in_float32(width: int) -> None:
    """Many bf16 blocks differ from float64 by the rounding of their outputs, not by that of their sums."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 64, 8) for _ in range(2))
    v = torch.randn(1, 2, 64, width) + 3
    right = F.scaled_dot_product_attention(*(t.bfloat16().double() for t in (q, k, v)))
    merged = OnlineSoftmax(q.bfloat16(), width)
    for start in range(0, 64, 4):
        part = slice(start, start + 4)
        found = attend(q.bfloat16(), k[:, :, part].bfloat16(), v[:, :, part].bfloat16(), 8**-0.5, False)
        merged.add(slice(0, 64), found, first=start == 0)
    assert merged.out.dtype == torch.float32
    step = tolerance.few(1, torch.bfloat16) * float(right.abs().max())
    off = merged.out.double() - right
    assert off.abs().max() <= step, "each block's output is rounded to bf16 once, on both sides of the mean"
    assert off.mean().abs() <= tolerance.CONFIDENCE * step / off.numel() ** 0.5


def cp_run(model: str = LLAMA, **overrides: Any) -> Any:
    return run_file(model, **{"parallelism__cp_size": 2, "data__max_length": 12, **overrides})


def test_lengths_that_do_not_divide_are_refused() -> None:
    """A98: before any process starts, with the lengths that would do. A21: nothing is rounded down."""
    with pytest.raises(ConfigError) as caught:
        check_run(cp_run(data__max_length=6), 2)
    assert str(caught.value).startswith("max_length = 6 is not divisible by 2 x cp_size = 4.")
    assert "Set data.max_length to 4 or 8" in str(caught.value)
    assert check_run(cp_run(data__max_length=6, parallelism__cp_load_balance=False), 2).cp == 2
    with pytest.raises(ConfigError, match="max_length = 7 is not divisible by cp_size = 2"):
        check_run(cp_run(data__max_length=7, parallelism__cp_load_balance=False), 2)
    with pytest.raises(ConfigError, match=r"Set data\.max_length to 8"):
        check_run(cp_run(data__max_length=2, parallelism__cp_size=4), 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"parallelism__cp_size": 1, "parallelism__cp_attention": "ring"},
            "`parallelism.cp_attention` has no effect",
        ),
        (
            {"parallelism__cp_size": 1, "parallelism__cp_load_balance": True},
            "`parallelism.cp_load_balance` has no",
        ),
    ],
)
def test_options_without_effect_are_refused(overrides: dict[str, Any], message: str) -> None:
    """A124."""
    with pytest.raises(ConfigError, match=message):
        check_run(cp_run(**overrides), overrides.get("parallelism__cp_size", 2))


def refusal(config: Any, tmp_path: Path, **overrides: Any) -> str:
    """What `check_context_model` says of a Transformers config; empty where it accepts."""
    config.save_pretrained(tmp_path)
    attention = "eager" if config.model_type in ("gemma2", "bloom") else "sdpa"
    run: RunFile = cp_run(**overrides).run
    spec = Model.model_validate(
        {"model_name_or_path": str(tmp_path), "init": "random", "attn_implementation": attention}
    )
    model = build_model(spec, torch.float64)
    before = model.config._attn_implementation
    try:
        check_context_model(model, run)
    except ModelError as error:
        return str(error)
    finally:
        assert model.config._attn_implementation == before and model.training
        assert all(p.dtype == torch.float64 for p in model.parameters())
    return ""


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma3"])
def test_these_families_are_accepted(family: str, tmp_path: Path) -> None:
    assert refusal(FAMILIES[family](), tmp_path) == ""


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (FAMILIES["gemma2"], {}, "`model.layers.0.self_attn` asks for softcap."),
        (FAMILIES["gpt2"], {}, "GPT2LMHeadModel has dropout with p = 0.1 inside attention. "),
        (lambda: transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, attention_dropout=0.1), {},
         "OPTForCausalLM has dropout"),
        (lambda: transformers.LlamaConfig(**SIZES, attention_dropout=0.2), {}, "has dropout with p = 0.2"),
        (
            lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
            {"parallelism__cp_attention": "ring"},
            "`model.layers.0.self_attn` has a sliding window of 8 of 12 tokens.",
        ),
        (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4, pad_token_id=0), {},
         "BloomForCausalLM does not take position_ids."),
        (lambda: transformers.BertConfig(**SIZES, is_decoder=False, hidden_dropout_prob=0.0,
                                         attention_probs_dropout_prob=0.0), {}, "is not causal."),
        (lambda: transformers.Phi3Config(**SIZES, rope_parameters=LONG, eos_token_id=0, bos_token_id=0), {},
         "Phi3ForCausalLM has rotary frequencies that follow the length of a document"),
        (lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), {}, "layers of type conv."),
        (lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                           pad_token_id=0, eos_token_id=0, bos_token_id=0), {}, "cannot be replaced"),
    ],
    ids=["gemma2", "gpt2", "opt", "llama", "mistral", "bloom", "bert", "phi3", "lfm2", "falcon"],
)  # fmt: skip
def test_these_models_are_refused_by_name(config: Any, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(config(), tmp_path, **overrides)


def test_a_window_as_long_as_the_row_is_no_window(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    assert refusal(config, tmp_path, parallelism__cp_attention="ring") == ""


def test_plain_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="OddModel with cp_size = 2"):
        check_context_model(build_model(cp_run(ODD).run.model, torch.float64), cp_run(ODD).run)


def test_looking_into_a_model_names_each_call() -> None:
    spec = cp_run(GPT2).run.model.model_copy(update={"config_overrides": {"n_layer": 2, "resid_pdrop": 0.25}})
    seen = trace_forward(build_model(spec, torch.float64))
    assert [call.module for call in seen.calls] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert seen.dropout == (0.25,)


def test_traffic_of_one_layer_by_hand() -> None:
    """K and V of 2 rows of 16 tokens, 24 wide, bf16: 2 x 2 x 16 x 24 x 2 = 3072 bytes whole, 4 ranks."""
    sizes = {"cp": 4, "blocks": 1, "rows": 2, "length": 16, "kv_width": 24, "width_bytes": 2}
    found = context_traffic("all_gather", **sizes, microbatches=1)
    assert [(t.collective, t.count, t.payload_bytes, t.sent_bytes) for t in found] == [
        ("all-gather", 1, 3072, 2304),
        ("all-to-all", 1, 3072, 2304),
    ]
    found = context_traffic("ring", **sizes, microbatches=5, recomputes=1)
    assert [(t.what, t.count, t.payload_bytes) for t in found] == [
        ("keys and values", 5 * 3 * 3, 768),
        ("gradients of keys and values", 5 * 3, 1536),
    ]

"""Which models keep documents and padding apart, and which are refused by name. Covers A15 and A124."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import tolerance
from tests.gloo.engine import ODD, run_file
from tests.packed_documents import ROWS, WIDTH, packed
from tests.tiny_models import FAMILIES
from torch import Tensor, nn

from shardwright.attention.document_attention import isolate_documents
from shardwright.attention.rules import check_packed_model, check_padded_model
from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.layout.legality import check_run
from shardwright.models import build_model
from shardwright.models.build import check_own_attention
from shardwright.tools.check.force_float64 import ForceFloat64

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
NO_GROUPS = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
GPTJ: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 8,
    "n_positions": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=3, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=3),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NO_GROUPS),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "opt": lambda: transformers.OPTConfig(**NO_GROUPS, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=3, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **NO_GROUPS, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12
    ),
    "gptj": lambda: transformers.GPTJConfig(**GPTJ, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
}  # fmt: skip


def built(config: Any, path: Path) -> nn.Module:
    """The model on meta, as the product builds it."""
    config.save_pretrained(path)
    attention = "eager" if config.model_type in ("gemma2", "bloom") else "sdpa"
    given = {"model_name_or_path": str(path), "init": "random", "attn_implementation": attention}
    return build_model(Model.model_validate(given), torch.float64)


@pytest.mark.parametrize("family", MODELS)
def test_documents_reach_attention_in_these_families(family: str, tmp_path: Path) -> None:
    """A15 A19: packed logits are those of each document alone in Transformers' own attention; padding moves nothing."""
    torch.manual_seed(0)
    config = MODELS[family]()
    check_packed_model(built(config, tmp_path))
    eager = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"  # all that these two have
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=eager)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the only one in float64
    model.double()  # some routers are kept in float32
    rows = packed(ROWS)
    ids = torch.randint(2, 60, rows.documents.shape)
    with torch.no_grad(), ForceFloat64():  # else norms and routers round to float32
        alone = {(r, s): model(input_ids=ids[r : r + 1, s:e], use_cache=False).logits[0] for r, s, e in rows.spans}
        isolate_documents(model)
        named = {"position_ids": rows.position_ids, "documents": rows, "use_cache": False}
        found = model(input_ids=ids, **named).logits
        other = ids.clone()
        other[0, :3], other[3, 6:], other[rows.documents < 0] = 61, 62, 63
        changed = model(input_ids=other, **named).logits
    bound = tolerance.of_model(dict(model.named_parameters()), WIDTH) * float(found.abs().max())
    for (r, s), right in alone.items():
        assert torch.allclose(found[r, s : s + len(right)], right, rtol=0, atol=bound)
    assert found.isfinite().all()
    kept = (other == ids).all(-1, keepdim=True) | (rows.documents > 0) & (torch.arange(12) < 6)
    kept[1] = True
    moved = (found - changed)[kept].abs().max()
    # the tokens of an expert are one product, whose size the other documents decide
    assert float(moved) <= (bound if model._can_set_experts_implementation() else 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.StableLmConfig(**SIZES), "does not get `documents` (2 calls of attention)."),
        (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4, pad_token_id=0),
         "BloomForCausalLM does not take position_ids, with data.batching pack."),
        (lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "layers of type conv."),
        (lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                           pad_token_id=0, eos_token_id=0, bos_token_id=0), "cannot be replaced"),
    ],
    ids=["stablelm", "bloom", "lfm2", "falcon"],
)  # fmt: skip
def test_these_models_are_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    """A15: packing is refused where documents would see each other."""
    with pytest.raises(ModelError) as caught:
        check_packed_model(built(config(), tmp_path))
    assert message in str(caught.value)


class OwnModel(nn.Module):
    """A user's module that takes documents."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, input_ids: Tensor, documents: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return input_ids


def test_models_without_sdpa_are_refused_where_they_keep_their_attention(tmp_path: Path) -> None:
    """Gemma 2 caps its scores: with the default it trains packed, and padded rows say what to set."""
    MODELS["gemma2"]().save_pretrained(tmp_path)
    spec = Model(model_name_or_path=str(tmp_path), init="random")
    model = build_model(spec, torch.float64)
    check_packed_model(model)
    with pytest.raises(ModelError, match=r"Set model\.attn_implementation to eager"):
        check_own_attention(model, spec)
    check_own_attention(model, spec.model_copy(update={"attn_implementation": "eager"}))


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (lambda: transformers.BertConfig(**NO_GROUPS), "is_decoder: true"),
        (lambda: transformers.RobertaConfig(**NO_GROUPS), "is_decoder: true"),
        (lambda: transformers.RoFormerConfig(**NO_GROUPS, embedding_size=32), "is_decoder: true"),
        (
            lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True),
            "causal model",
        ),
    ],
    ids=["bert", "roberta", "roformer", "gemma3"],
)
def test_models_that_look_ahead_are_refused(config: Any, fix: str, tmp_path: Path) -> None:
    """Under pad and bucket too: each token would see its target, and the padding behind its row."""
    with pytest.raises(ModelError, match="is not causal") as caught:
        check_padded_model(built(config(), tmp_path))
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.DogeConfig(**SIZES, keep_window_size=4), "makes an attention mask of its own"),
        (lambda: transformers.CpmAntConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48,
                                           num_hidden_layers=1, prompt_types=2, prompt_length=2, segment_types=2),
         "expects padding at the start of a row"),
    ],
    ids=["doge", "cpmant"],
)  # fmt: skip
def test_models_that_padding_reaches_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    """Seen in benchmarks/families.py: the loss of such a model follows from the width of its rows."""
    with pytest.raises(ModelError, match=message):
        check_padded_model(built(config(), tmp_path))


def test_decoders_are_taken(tmp_path: Path) -> None:
    for kind in (transformers.BertConfig, transformers.RobertaConfig):
        check_padded_model(built(kind(**NO_GROUPS, is_decoder=True), tmp_path))
    check_padded_model(built(MODELS["gpt_neox"](), tmp_path))


def test_plain_modules_need_the_arguments() -> None:
    with pytest.raises(ModelError, match="OddModel does not take documents and position_ids"):
        check_packed_model(build_model(run_file(ODD).run.model, torch.float64))
    check_packed_model(OwnModel())


def test_softcap_is_refused_under_cp(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="asks for softcap"):
        check_packed_model(built(MODELS["gemma2"](), tmp_path), cp_size=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__attn_implementation": "eager"}, "`model.attn_implementation` has no effect"),
    ],
)
def test_options_that_do_not_go_with_packing(overrides: dict[str, Any], message: str) -> None:
    """A124."""
    with pytest.raises(ConfigError, match=message):
        check_run(run_file(data__batching="pack", **overrides), 1)


def test_compiled_blocks_know_plain_attention_only(tmp_path: Path) -> None:
    """What one operator does not do is refused by name before anything starts: windows, softcap, dropout."""
    check_packed_model(built(MODELS["llama"](), tmp_path), compiled=True)
    with pytest.raises(ModelError, match=r"softcap.*memory.compile"):
        check_packed_model(built(MODELS["gemma2"](), tmp_path), compiled=True)

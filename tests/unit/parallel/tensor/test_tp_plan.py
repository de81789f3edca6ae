"""What tensor parallelism refuses before any process starts, and what its plan makes of models.

Covers A87, A88, A91 and A94 of the known faults.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.divided_models import PLAN
from tests.gloo.engine import GPT2, LLAMA, QWEN3, SMALL, run_file

from shardwright.errors import ConfigError, ModelError, ShardwrightError
from shardwright.layout.legality import check_run
from shardwright.models.build import build_model
from shardwright.models.model_parts import find_parts
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.tensor.tp_plan import TensorPlan, plan_tensor

PLAIN = "tests.divided_models:divided_model"


def planned(model: str, tp_size: int = 2, **options: Any) -> TensorPlan:
    run = run_file(model, parallelism__tp_size=tp_size, **options).run
    built = build_model(run.model, TORCH_DTYPES["fp32"])
    return plan_tensor(built, find_parts(built), run)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ShardwrightError) as caught:
        planned(*arguments, **options)
    return str(caught.value)


def sizes(**overrides: Any) -> dict[str, Any]:
    return {"model__config_overrides": {**SMALL[LLAMA], **overrides}}


def test_heads() -> None:
    """A87: more ranks than key and value heads, and heads that would be cut, by name and with what would do."""
    assert refusal(LLAMA, 4) == (
        "num_key_value_heads = 2 is not divisible by tp_size = 4. Each rank must hold whole heads. Set tp_size to 1 or 2."
    )
    six = sizes(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, intermediate_size=48)
    assert "num_attention_heads = 6" in refusal(LLAMA, 4, **six)
    assert "Set tp_size to 1, 2, 3 or 6." in refusal(LLAMA, 4, **six)
    assert "intermediate_size = 41 is not divisible by tp_size = 2" in refusal(LLAMA, 2, **sizes(intermediate_size=41))


def test_sequences() -> None:
    """A88: positions that do not divide, before any process starts."""
    loaded = run_file(LLAMA, parallelism__tp_size=2, data__max_length=7)
    with pytest.raises(ConfigError, match=r"data.max_length = 7 is not divisible by tp_size = 2.*to 6 or 8"):
        check_run(loaded, 2)
    check_run(run_file(LLAMA, parallelism__tp_size=2, data__max_length=7, parallelism__sequence_parallel=False), 2)
    check_run(run_file(LLAMA, parallelism__tp_size=2, data__max_length=8), 2)


def test_uneven_layers() -> None:
    """A94: a layer of 5 features over 2 ranks; uneven rows of embedding and head are allowed, empty ones are not."""
    uneven = refusal(PLAIN, 2, model__kwargs={"width": 5}, parallelism__tp_plan={"blocks.*.narrow": "colwise"})
    assert "blocks.0.narrow has 5 output features, not divisible by tp_size = 2" in uneven
    assert planned(PLAIN, 4, model__kwargs={"vocab": 13}, parallelism__tp_plan=PLAN).styles["head"] == "vocabulary"
    assert "one rank would have none" in refusal(PLAIN, 4, model__kwargs={"vocab": 6}, parallelism__tp_plan=PLAN)


def test_dropout() -> None:
    """A91: dropout is allowed (tests/gloo/parallel/test_dropout.py) but not in compiled blocks, which have one stream."""
    gpt2 = {"model__config_overrides": {**SMALL[GPT2], "resid_pdrop": 0.1}}
    assert planned(GPT2, 2, **gpt2).styles
    for model, options in ((GPT2, gpt2), (LLAMA, sizes(attention_dropout=0.5))):
        found = refusal(model, 2, memory__compile=True, **options)
        assert "has dropout, with memory.compile and tp_size = 2" in found
    planned(LLAMA, 2, memory__compile=True)


def test_plans_of_models() -> None:
    """Transformers' plan with embedding and head; GPT-2's fused projection is made whole; regions share one exchange."""
    llama, qwen3, gpt2 = planned(LLAMA), planned(QWEN3), planned(GPT2)
    assert llama.styles["model.embed_tokens"] == qwen3.styles["model.embed_tokens"] == "embedding_rowwise"
    assert llama.styles["lm_head"] == gpt2.styles["lm_head"] == "vocabulary"
    assert qwen3.styles["model.layers.1.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert gpt2.styles["transformer.h.0.attn.c_attn"] == "colwise_gather_output"
    assert "model.layers.2.self_attn" in llama.regions and "transformer.h.1.mlp" in gpt2.regions
    plain = planned(PLAIN, parallelism__tp_plan=PLAN)
    assert plain.regions == {"blocks.0.mlp", "blocks.1.mlp"}, "what stands beside norms exchanges for itself"


def test_users_plans() -> None:
    """Patterns without a match, unknown styles, layers of another kind, parameters, and ties that would part."""

    def plan(**entries: str) -> dict[str, Any]:
        return {"parallelism__tp_plan": {key.replace("_s_", ".*."): value for key, value in entries.items()}}

    assert "matches no module" in refusal(PLAIN, 2, **plan(blocks_s_up="colwise"))
    assert "colwise" in refusal(PLAIN, 2, **plan(blocks_s_wide="columnwise"))
    assert "blocks.0.before is a LayerNorm" in refusal(PLAIN, 2, **plan(blocks_s_before="colwise"))
    assert "A style needs a module" in refusal(PLAIN, 2, parallelism__tp_plan={"head.weight": "colwise"})
    tied = {"model__kwargs": {"tied": True}}
    assert "are one tensor" in refusal(PLAIN, 2, **tied, **plan(embed="embedding_rowwise"))
    loaded = run_file(LLAMA, parallelism__tp_plan={"a": "colwise"})
    with pytest.raises(ConfigError, match="tp_size is 1"):
        check_run(loaded, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("StableLmConfig", "has no tensor-parallel plan"),
        ("MixtralConfig", "style `packed_colwise` cannot be applied"),
        ("CohereConfig", "q_norm.weight has no tensor-parallel style"),
    ],
)
def test_families_that_cannot(config: str, words: str, tmp_path: Path) -> None:
    """No plan, experts, and norms inside divided attention that the family's plan forgets: refused by name."""
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "n_layer": 1,
        "intermediate_size": 48,
    }
    heads = {
        "num_attention_heads": 4,
        "n_head": 4,
        "num_key_value_heads": 4,
        "use_qk_norm": True,
        "pad_token_id": 0,
    }
    getattr(transformers, config)(**small, **heads, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=re.escape(words)):
        planned(str(tmp_path))

"""Packed rows without processes: where documents lie, their attention, and the models that keep them apart.

Covers A15, A17, A18, A19 and A20 (what a rank sees of documents under cp). The oracle is a softmax written out over a
T x T mask, and Transformers' own models run on each document alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import tolerance
from tests.gloo.engine import ODD, run_file
from tests.tiny_models import FAMILIES
from torch import Tensor, nn

from shardwright.attention import document_attention
from shardwright.attention.core import Attention, backward_in_float32
from shardwright.attention.document_attention import isolate_documents
from shardwright.attention.packed_rows import PackedRows
from shardwright.attention.rules import check_packed_model, check_padded_model
from shardwright.backends.gloo.attention import replace_attention
from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.layout.legality import check_run
from shardwright.layout.size_rules import chunks
from shardwright.models import build_model
from shardwright.models.build import check_own_attention
from shardwright.parallel.context.shard import as_one_row, as_rows, document_blocks
from shardwright.tools.check.force_float64 import ForceFloat64

CPU = torch.device("cpu")
WIDTH = 12
ROWS = [[3, 5, 1], [12], [], [1, 1, 4, 6]]
"""Lengths of the documents of each row: with padding, whole, of padding alone, full."""


def packed(rows: list[list[int]], width: int = WIDTH) -> PackedRows:
    numbers = torch.full((len(rows), width), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            numbers[row, start:end] = number
    return PackedRows(numbers, CPU)


def drawn(seed: int, rows: int = 5, width: int = WIDTH) -> list[list[int]]:
    """A random mix of documents; some rows end in padding."""
    g, found = torch.Generator().manual_seed(seed), []
    for _ in range(rows):
        lengths: list[int] = []
        while (left := width - sum(lengths)) > 0 and (torch.rand((), generator=g) < 0.85 or not lengths):
            lengths.append(1 + int(torch.randint(0, left, (), generator=g)))
        found.append(lengths)
    return found


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bf16_gradients_are_no_worse_than_torchs(kv_heads: int) -> None:
    """In bf16 on a CPU backward computes in float32: outputs are torch's, gradients as near to float64's or nearer."""
    torch.manual_seed(0)
    drawn = [torch.randn(3, heads, 50, 16) for heads in (4, kv_heads, kv_heads)]
    grad = torch.randn(3, 50, 4, 16)

    def run(dtype: torch.dtype, function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in drawn]
        out = function(*inputs)
        given = grad.to(torch.bfloat16).to(dtype)
        return [out.detach().double(), *(g.double() for g in torch.autograd.grad(out, inputs, given))]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention.document_attention(nn.Module(), q, k, v, None)[0]

    assert backward_in_float32(drawn[0].bfloat16()) and not backward_in_float32(drawn[0])
    exact = run(torch.float64, plain)
    errors = []
    for function in (ours, plain):
        found = run(torch.bfloat16, function)
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)])
    mine, theirs = errors
    assert mine[0] == theirs[0]
    assert all(
        own <= 1.05 * other and own <= tolerance.in_norm(2, torch.bfloat16) for own, other in zip(mine[1:], theirs[1:])
    ), errors
    own = run(torch.float64, lambda q, k, v: Attention.apply(q, k, v, 0.25, True).transpose(1, 2))
    bound = tolerance.mixed(50, 50, 16)
    assert all((a - b).abs().max() <= bound * b.abs().max() for a, b in zip(own, exact))


def test_spans_positions_and_groups() -> None:
    """A18 A19: padding is no document; positions start at 0 in each document; documents of one length are one group."""
    rows = packed(ROWS)
    assert rows.spans == (
        (0, 0, 3), (0, 3, 8), (0, 8, 9), (1, 0, 12), (3, 0, 1), (3, 1, 2), (3, 2, 6), (3, 6, 12)
    )  # fmt: skip
    assert rows.position_ids.tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0, 0], [*range(12)], [0] * 12, [0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert rows.groups == ((1, 12), (1, 6), (1, 5), (1, 4), (1, 3), (3, 1))
    assert rows.ends.tolist() == [0, 3, 8, 9, 21, 22, 23, 27, 33] and rows.longest == 12
    assert [packed(mix).whole for mix in ([[12]], [[], []], [[11]], ROWS)] == [True, True, False, False]


def test_separators_belong_to_the_document_that_they_end() -> None:
    """A18: [a b SEP c d SEP pad pad] as the loader numbers it gives positions 0 1 2 0 1 2 and no key for padding."""
    rows = PackedRows(torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32), CPU)
    assert rows.spans == ((0, 0, 3), (0, 3, 6)) and rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize("order", ["grouped", "dense"])
def test_orders_go_there_and_back(order: str) -> None:
    """What is taken and put back is itself, zero where padding was; gradients take the same way."""
    rows = packed(ROWS)
    x = torch.randn(4 * WIDTH, 2, dtype=torch.float64, requires_grad=True)
    places = getattr(rows, order)
    real = (rows.documents.flatten() >= 0).unsqueeze(1)
    found = places.put(places.take(x))
    assert torch.equal(found, x * real)
    found.backward(torch.ones_like(x))
    assert torch.equal(x.grad, real.expand_as(x).double())
    assert len(places.take(x)) == int(real.sum())


def written_out(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, window: int | None, softcap: float | None, scale: float
) -> Tensor:
    """Attention over a T x T mask, [B, T, N, H]; rows of the mask without a key give zeros."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores, numbers = q @ k.transpose(-1, -2) * scale, rows.documents
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(numbers.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(place)))
    seen = (seen & (numbers[:, :, None] == numbers[:, None]) & (numbers[:, :, None] >= 0)).unsqueeze(1)
    weights = torch.where(seen, scores.exp(), 0.0)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v).transpose(1, 2)


def heads(rows: PackedRows, n: int, width: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    b, t = rows.documents.shape
    return torch.randn(b, t, n, width, dtype=dtype).transpose(1, 2).requires_grad_()


def attention(rows: PackedRows | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return document_attention.document_attention(nn.Module(), q, k, v, None, documents=rows, **options)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 2},
    "softcap": {"softcap": 3.0},
    "softcap and window": {"softcap": 3.0, "sliding_window": 3},
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_and_gradients(options: dict[str, Any], kv_heads: int) -> None:
    """A15: outputs and gradients equal the masked softmax, for random mixes, documents of one token and padded rows."""
    torch.manual_seed(0)
    for mix in (ROWS, *(drawn(seed) for seed in range(4))):
        rows = packed(mix)
        q, k, v = heads(rows, 4), heads(rows, kv_heads), heads(rows, kv_heads)
        grad = torch.randn(len(mix), WIDTH, 4, 8, dtype=torch.float64)
        window, softcap = options.get("sliding_window"), options.get("softcap")
        right = written_out(q, k, v, rows, window, softcap, 0.4)
        wanted = torch.autograd.grad(right, (q, k, v), grad)
        found = attention(rows, q, k, v, scaling=0.4, **options)
        dtype = torch.float32 if softcap else torch.float64  # the softmax behind a softcap is in float32
        rounding = tolerance.mixed(WIDTH, 8, dtype=dtype)
        assert torch.allclose(found, right, rtol=0, atol=rounding * float(right.abs().max()))
        for own, other in zip(torch.autograd.grad(found, (q, k, v), grad), wanted):
            assert torch.allclose(own, other, rtol=0, atol=2 * rounding * float(other.abs().max()))


def test_rows_of_one_document_are_plain_causal_attention() -> None:
    """Without documents, and where each row is one, torch's causal attention is called once, on the tensors as they are."""
    rows = packed([[WIDTH]] * 3)
    q, k, v = heads(rows, 4), heads(rows, 2), heads(rows, 2)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.4}
    right = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(attention(None, q, k, v, scaling=0.4), right.transpose(1, 2))
    assert torch.equal(attention(rows, q, k, v, scaling=0.4), right.transpose(1, 2))


def test_dropout_stays_inside_documents() -> None:
    """Weights that are dropped are those of a document's own keys: with values of one document 1 and of others 0."""
    torch.manual_seed(0)
    rows = packed([[6, 6]])
    q, k = heads(rows, 2), heads(rows, 2)
    v = torch.zeros(1, 2, WIDTH, 8, dtype=torch.float64)
    v[:, :, :6] = 1.0
    found = attention(rows, q, k, v, dropout=0.5)
    assert (found[:, 6:] == 0).all() and len(found[:, :6].unique()) > 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_documents_leave_the_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    """A15: with other contents (and infinities) in documents A, every bit of document B's outputs and gradients stays."""
    torch.manual_seed(0)
    rows, width = packed([[30, 40, 9], [1, 40, 39], [80]], 80), 16
    q, k, v = (heads(rows, n, width, dtype) for n in (4, 2, 2))
    other = [t.detach().clone() for t in (q, k, v)]
    for t in other:
        t[0, :, :30], t[1, :, 41:] = torch.randn_like(t[0, :, :30]) * 9, float("inf")
    changed = [t.requires_grad_() for t in other]
    grad = torch.randn(3, 80, 4, width, dtype=dtype)
    found, again = attention(rows, q, k, v, **options), attention(rows, *changed, **options)
    kept = [(0, slice(30, 80)), (1, slice(0, 41)), (2, slice(0, 80))]
    gradients = [torch.autograd.grad(out, ts, grad) for out, ts in ((found, (q, k, v)), (again, changed))]
    for row, tokens in kept:
        assert torch.equal(found[row, tokens], again[row, tokens])
        for own, theirs in zip(*gradients):
            assert torch.equal(own[row, :, tokens], theirs[row, :, tokens])
    assert not torch.equal(found[0, :30], again[0, :30])


@pytest.mark.parametrize("window", [None, 3])
def test_flash_is_told_lengths_ends_and_window(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's call, its kernel replaced by the masked softmax on documents one behind another. The kernel: tests/cuda."""
    torch.manual_seed(0)

    def flash(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, longest: int, *rest: Any, **named: Any
    ) -> tuple[Tensor]:
        lengths = torch.diff(ends).tolist()
        assert ends.dtype == torch.int32 and ends is ends_k and longest == rest[0] == max(lengths)
        assert rest[1:] == (0.25, True, False) and named["window_size_right"] == 0
        left = named["window_size_left"]
        one = packed([lengths], sum(lengths))
        batch = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return (written_out(*batch, one, left + 1 if left >= 0 else None, None, named["scale"])[0],)

    monkeypatch.setattr(document_attention, "flash_attention_by_lengths", flash)
    monkeypatch.setattr(document_attention, "fits_cuda_flash", lambda query, value: True)
    for mix in (ROWS, drawn(1), [[5, 7], [12]]):
        rows = packed(mix)
        q, k, v = heads(rows, 4), heads(rows, 2), heads(rows, 2)
        right = written_out(q, k, v, rows, window, None, 0.3)
        found = attention(rows, q, k, v, scaling=0.3, dropout=0.25, sliding_window=window)
        assert torch.allclose(found, right, rtol=0, atol=tolerance.mixed(WIDTH, 8) * float(right.abs().max()))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 4])
def test_blocks_of_ranks_are_the_pairs_of_documents(cp: int, balanced: bool) -> None:
    """A20 A21: gathered or passed round, each query sees every key of its document up to its own once, and no other."""
    width = 16
    owners = [[t for own in chunks(width, cp, rank, balanced) for t in own] for rank in range(cp)]
    for mix in (*(drawn(seed, 3, width) for seed in range(5)), [[7, 3], [16], []]):
        spans = packed(mix, width).spans
        tokens = width // cp
        for rank, own in enumerate(owners):
            places, queries = chunks(width, cp, rank, balanced), [(b, t) for b in range(3) for t in own]
            every = [(b, t) for b in range(3) for t in range(width)]
            row = pairs(document_blocks(spans, places, [range(width)]), queries, every)
            ring: list[Any] = []
            for source, others in enumerate(owners):
                held = chunks(width, cp, source, balanced)
                found = document_blocks(spans, places, held)
                assert (source == rank) == any(causal for _, _, causal in found) or not found
                ring += pairs(found, queries, [(b, t) for b in range(3) for t in others])
            wanted = sorted(((r, q), (r, k)) for r, s, e in spans for q in own if s <= q < e for k in range(s, q + 1))
            assert sorted(row) == wanted and sorted(ring) == wanted
        x = torch.randn(3, 2, tokens, 4)
        assert torch.equal(as_rows(as_one_row(x), 3), x)


def pairs(blocks: list[Any], queries: list[Any], keys: list[Any]) -> list[Any]:
    found = []
    for a, b, causal in blocks:
        own, others = queries[a], keys[b]
        assert not causal or own == others, "a causal block has the same tokens on both sides"
        found += [(q, k) for q in own for k in others if not causal or k[1] <= q[1]]
    return found


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
        ({"memory__compile": True}, "memory.compile with data.batching pack"),
        ({"model__attn_implementation": "eager"}, "`model.attn_implementation` has no effect"),
    ],
)
def test_options_that_do_not_go_with_packing(overrides: dict[str, Any], message: str) -> None:
    """A124."""
    with pytest.raises(ConfigError, match=message):
        check_run(run_file(data__batching="pack", **overrides), 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_rows_of_one_document_take_the_float32_backward(family: str) -> None:
    """A model that attends by sdpa does in bf16 on a CPU, with the same logits; a mask is left to Transformers."""
    config = FAMILIES[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16().eval()
    ids = torch.randint(0, config.vocab_size, (2, 9))
    before = model(input_ids=ids, use_cache=False).logits
    replace_attention(model)
    after = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(before, after)
    names = {type(node).__name__ for node in _graph(after)}
    assert "AttentionBackward" in names
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    masked = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert "AttentionBackward" not in {type(node).__name__ for node in _graph(masked)}


def _graph(tensor: Tensor) -> set[Any]:
    """Every node that `tensor` was made by."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions]
    return found

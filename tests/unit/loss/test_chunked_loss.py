"""The loss in chunks against autograd of the plain formula in float64; what models do behind their head; losses of one's own.

Covers A06, A08, A11 and A130 of the known faults.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tolerance
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
)

from shardwright.config.load import load_run_file
from shardwright.errors import ConfigError, ModelError, ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.layout.legality import check_run
from shardwright.layout.loss import chunk_tokens, loss_chunk_tokens
from shardwright.loss.chunked_loss import (
    ChunkedHead,
    LossChunks,
    LossOptions,
    Targets,
    chunked_cross_entropy_sum,
    find_loss_chunks,
)
from shardwright.loss.objective import cross_entropy_sum, own_loss
from shardwright.loss.output_head import DeferredLoss, Step, apply_steps, steps_after_head
from shardwright.models.build import build_model
from shardwright.models.model_parts import find_parts
from shardwright.parallel.apply import check_model

P, D, V = 37, 16, 101
ROUNDING = tolerance.mixed(P, D, V)
IN_FLOAT32 = tolerance.positive(P, V, dtype=torch.float32)  # logits are given; their softmax and the sum are in float32
CAP = (Step("divide", 3.0), Step("tanh"), Step("multiply", 3.0))
CPU = torch.device("cpu")


def plain(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weights: Tensor | None, steps: Any) -> Tensor:
    """Position by position: -weight log softmax(f(x W' + b))[label], with torch's parts only."""
    z = apply_steps(steps, F.linear(x, w, b))
    logs = (z if z.dtype == torch.float64 else z.float()).log_softmax(-1)
    terms = [
        -logs[p, label] * (1.0 if weights is None else weights[p])
        for p, label in enumerate(labels.tolist())
        if label != -100
    ]
    return torch.stack(terms).sum() if terms else 0.0 * z.sum()


def tensors(dtype: torch.dtype, bias: bool, masked: int = 3) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(P, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, V, (P,), generator=g)
    labels[1::masked] = -100
    labels[0] = 0  # an id of 0 is a target like any other
    return x, w, b, labels


def compared(
    dtype: torch.dtype, bias: bool, weights: Tensor | None, chunk: int, how: LossOptions, labels: Any = None
) -> float:
    """The largest difference of loss and gradients of (loss / 7), each relative to its largest value."""
    x, w, b, own = tensors(dtype, bias)
    labels = own if labels is None else labels
    leaves = [t for t in (x, w, b) if t is not None]
    right = plain(x, w, b, labels, weights, how.steps)
    theirs = torch.autograd.grad(right / 7, leaves)
    found = chunked_cross_entropy_sum(x, w, b, Targets.of(labels, weights, chunk, CPU, fixed=False), how)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    ours = torch.autograd.grad(found / 7, leaves)
    assert [g.dtype for g in ours] == [dtype] * len(leaves)
    pairs = zip((found, *ours), (right, *theirs))
    return max(
        ((a.double() - c.double()).abs().max() / c.double().abs().max().clamp(min=1e-30)).item() for a, c in pairs
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [(), CAP, (Step("multiply", 0.25),)])
@pytest.mark.parametrize(("bias", "weighted"), [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_in_float64(recompute: bool, steps: Any, bias: bool, weighted: bool) -> None:
    """A06 A08: loss and gradients of hidden states, head and bias; chunks of 1, an odd number, one more than all."""
    weights = torch.rand(P, generator=torch.Generator().manual_seed(2)) if weighted else None
    for chunk in (1, 5, P + 1):
        assert compared(torch.float64, bias, weights, chunk, LossOptions(steps, recompute)) <= ROUNDING


@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_without_targets(recompute: bool) -> None:
    """A chunk of positions, and a whole microbatch, without a target: their gradients are zero and there."""
    x, w, b, labels = tensors(torch.float64, True)
    labels[10:25] = -100
    for fixed in (False, True):
        targets = Targets.of(labels, None, 5, CPU, fixed=fixed)
        assert not fixed or any(first == end for first, end, _ in targets.chunks)
        if fixed:
            assert [sent for *_, sent in targets.chunks] == [5] * 7 + [2], "every position once, whatever is masked"
        loss = chunked_cross_entropy_sum(x, w, b, targets, LossOptions(recompute=recompute))
        right = plain(x, w, b, labels, None, ())
        for ours, theirs in zip(torch.autograd.grad(loss, [x, w, b]), torch.autograd.grad(right, [x, w, b])):  # type: ignore[list-item]
            assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()
    none = Targets.of(torch.full((P,), -100), None, 5, CPU, fixed=False)
    loss = chunked_cross_entropy_sum(x, w, b, none, LossOptions(recompute=recompute))
    assert loss.item() == 0.0
    assert not any(g.any() for g in torch.autograd.grad(loss, [x, w, b]))  # type: ignore[list-item]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("multiple", "filled"), [(4, 28), (32, 32), (64, P)])
def test_filled_up_to_shapes_that_come_again(multiple: int, filled: int, weighted: bool) -> None:
    """Positions that are no targets fill up their number, at weight 0: loss and gradients stay what they are."""
    x, w, b, labels = tensors(torch.float64, True)
    labels[:] = labels.where(labels != -100, 1)
    labels[3:14] = -100
    weights = torch.rand(P, dtype=torch.float64) if weighted else None
    targets = Targets.of(labels, weights, 10, CPU, False, multiple)
    assert len(targets.labels) == filled
    loss = chunked_cross_entropy_sum(x, w, b, targets, LossOptions())
    right = plain(x, w, b, labels, weights, ())
    assert abs(loss - right) <= ROUNDING * abs(right)
    for ours, theirs in zip(torch.autograd.grad(loss, [x, w, b]), torch.autograd.grad(right, [x, w, b])):  # type: ignore[list-item]
        assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()


def test_bf16_against_float64() -> None:
    """A130: softmax is in float32: bf16 logits near 36 are not rounded on the way to the loss; the head's gradient is
    summed in float32 over chunks, so that many chunks are as exact as one."""
    x, w, _, labels = tensors(torch.bfloat16, False)
    right = plain(x, w, None, labels, None, ())
    exact_loss = F.cross_entropy(F.linear(x, w).double(), labels, ignore_index=-100, reduction="sum")
    assert abs(right - exact_loss) <= IN_FLOAT32 * exact_loss
    logits = F.linear(x, w).detach().double().requires_grad_()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    exact = torch.autograd.grad(loss, logits)[0].t() @ x.detach().double()
    errors = {}
    for chunk in (1, P):
        loss = chunked_cross_entropy_sum(x, w, None, Targets.of(labels, None, chunk, CPU, fixed=False), LossOptions())
        assert loss.dtype == torch.float32 and abs(loss - exact_loss) <= IN_FLOAT32 * exact_loss
        errors[chunk] = (torch.autograd.grad(loss, w)[0].double() - exact).norm() / exact.norm()
    assert errors[1] < 1.5 * errors[P] and errors[P] <= tolerance.in_norm(1, torch.bfloat16)


def test_only_what_is_asked_for() -> None:
    """A frozen head gets no gradient, and evaluation makes none at all."""
    x, w, _, labels = tensors(torch.float64, False)
    targets = Targets.of(labels, None, 5, CPU, fixed=False)
    (chunked_cross_entropy_sum(x, w.detach(), None, targets, LossOptions())).backward()
    assert x.grad is not None and w.grad is None
    with torch.no_grad():
        assert not chunked_cross_entropy_sum(x, w, None, targets, LossOptions()).requires_grad
    loss = chunked_cross_entropy_sum(x, w, None, targets, LossOptions())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()


def test_weights_on_whole_logits() -> None:
    """SUM weight x cross entropy, the same as in chunks."""
    x, w, _, labels = tensors(torch.float64, False)
    weights = torch.rand(P, generator=torch.Generator().manual_seed(2))
    found = cross_entropy_sum(F.linear(x, w)[None], labels[None], weights[None])
    assert abs(found - plain(x, w, None, labels, weights, ())) <= ROUNDING * found


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (LlamaConfig(**SIZES), ()),
        (MixtralConfig(**SIZES), ()),
        (GPT2Config(n_embd=32, n_layer=2, n_head=4), ()),
        (Gemma2Config(**SIZES, final_logit_softcapping=30.0),
         (Step("divide", 30.0), Step("tanh"), Step("multiply", 30.0))),
        (CohereConfig(**SIZES, logit_scale=0.5), (Step("multiply", 0.5),)),
        (GraniteConfig(**SIZES, logits_scaling=8.0), (Step("divide", 8.0),)),
    ],
    ids=["llama", "mixtral", "gpt2", "gemma2", "cohere", "granite"],
)  # fmt: skip
def test_what_models_do_behind_their_head(config: Any, steps: Any) -> None:
    """Noted from the model's own forward, which is left as it was."""
    model = built(config)
    forwards = [m.forward for m in model.modules()]
    assert steps_after_head(model, find_parts(model)) == steps
    assert [m.forward for m in model.modules()] == forwards


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z: z * torch.ones(()), "combines its logits with a Tensor"),
        (lambda z: torch.softmax(z, -1), "calls softmax with its logits"),
        (lambda z: z.masked_fill(z > 0, 0), "not supported|reads `masked_fill`"),
        (lambda z: z[:, :-1], "not subscriptable"),
    ],
)
def test_other_uses_of_logits_are_refused_by_name(change: Any, message: str) -> None:
    """With `auto` whole logits are the fallback, and the line says why; a number in the run file is refused."""
    model = built(LlamaConfig(**SIZES))
    forward = model.forward
    model.forward = lambda **kwargs: SimpleNamespace(logits=change(forward(**kwargs).logits))
    with pytest.raises(ModelError, match=f"The loss of LlamaForCausalLM cannot be computed in chunks: .*({message})"):
        steps_after_head(model, find_parts(model))
    values = {"model.model_name_or_path": "m", "data.train": ["a"], "training.max_steps": 1,
              "training.global_batch_size": 1}  # fmt: skip
    long = load_run_file(None, {**values, "data.max_length": 2**20}).run
    found = find_loss_chunks(model, find_parts(model), long, "cpu")
    assert found.tokens == 0 and "loss on whole logits (The loss of LlamaForCausalLM" in found.describe()
    with pytest.raises(ModelError, match="cannot be computed in chunks"):
        asked = load_run_file(None, {**values, "memory.loss_chunk_tokens": 8}).run
        find_loss_chunks(model, find_parts(model), asked, "cpu")


def test_a_model_that_does_otherwise_in_the_run_is_stopped() -> None:
    """What was noted on meta is held against what the model does."""
    loss = torch.ones(())
    assert DeferredLoss(loss, CAP) and (torch.tanh(DeferredLoss(loss, CAP) / 3.0) * 3.0).finished() is loss
    with pytest.raises(ShardwrightError, match="found before the run"):
        DeferredLoss(loss, CAP).tanh()
    with pytest.raises(ShardwrightError, match="found before the run"):
        (DeferredLoss(loss, CAP) / 3.0).finished()


def test_a_head_gives_logits_unless_targets_were_announced() -> None:
    head = nn.Linear(D, V, bias=True).double()
    chunked = ChunkedHead(head, LossChunks(5, V), None, recompute=False)
    x, _, _, labels = tensors(torch.float64, False)
    assert head(x[None]).shape == (1, P, V)
    chunked.announce(labels[None], None)
    right = plain(x, head.weight, head.bias, labels, None, ())
    assert abs(head(x[None]).finished() - right) <= ROUNDING * right
    assert head(x[None]).shape == (1, P, V), "an announcement counts for one forward"


def test_auto_chooses_by_size() -> None:
    """4,096 x 128,000 fp32 logits are 2.1 GB: chunks of 64 MiB; a small model keeps whole logits."""
    base = {"model.model_name_or_path": "m", "data.train": ["a"], "training.max_steps": 1,
            "training.global_batch_size": 8, "data.max_length": 4096}  # fmt: skip
    run = load_run_file(None, base).run
    assert [loss_chunk_tokens(128_000, "cpu", dtype) for dtype in ("fp32", "bf16")] == [128, 512]
    assert loss_chunk_tokens(128_000, "cuda", "bf16") == 1024
    assert chunk_tokens(run, Axes(), 128_000, "cpu") == 128
    assert chunk_tokens(run, Axes(tp=8), 128_000, "cpu") == 0  # 262 MB on each rank, less than four chunks
    assert chunk_tokens(run, Axes(), 257, "cpu") == 0
    assert chunk_tokens(load_run_file(None, {**base, "memory.loss_chunk_tokens": 0}).run, Axes(), 128_000, "cpu") == 0
    assert chunk_tokens(load_run_file(None, {**base, "training.loss": "a:b"}).run, Axes(), 128_000, "cpu") == 0
    for option in ({"training.loss": "a:b"}, {"parallelism.pp_size": 2, "parallelism.pp_schedule": "zero_bubble",
                                              "parallelism.data_parallel": "ddp"}):  # fmt: skip
        with pytest.raises(ConfigError, match="loss_chunk_tokens 64"):
            check_run(load_run_file(None, {**base, "memory.loss_chunk_tokens": 64, **option}), 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "returned a Tensor. .*a mean of each microbatch would be another"),
        ("by_position", r"returned a tensor \[1, 4\] of torch.float32 as the loss sum"),
        ("without_graph", "returned a loss sum without a graph"),
    ],
)
def test_wrong_returns_of_a_loss(name: str, message: str) -> None:
    """A11: a loss that has divided already is not taken."""
    function = own_loss(f"tests.own_losses:{name}")
    assert function is not None
    with pytest.raises(ShardwrightError, match=message):
        function(torch.randn(1, 4, V, requires_grad=True), torch.zeros(1, 4, dtype=torch.long), None)


def test_a_loss_that_is_not_there() -> None:
    assert own_loss("cross_entropy") is None
    with pytest.raises(ConfigError, match="Did you mean `cross_entropy`"):
        own_loss("cross_entrop")
    with pytest.raises(ConfigError, match="has no `nothing`"):
        own_loss("tests.own_losses:nothing")


def test_a_loss_of_ones_own_on_a_divided_vocabulary_is_refused() -> None:
    """The loss function gets whole logits; the layer that divides them is named, and the style that makes them whole."""
    values = {"model.model_name_or_path": "examples/tiny", "model.init": "random", "data.train": ["a"],
              "training.max_steps": 1, "training.global_batch_size": 1, "parallelism.tp_size": 2,
              "training.loss": "tests.own_losses:smoothed"}  # fmt: skip
    run = load_run_file(None, values).run
    with pytest.raises(ModelError, match=r"lm_head is divided by vocabulary.*colwise_gather_output"):
        check_model(build_model(run.model, torch.float32), run)

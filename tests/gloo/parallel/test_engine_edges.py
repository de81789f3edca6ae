"""Frozen parts, collectives, lifetimes, prefetching, evaluation and non-finite values, on two ranks.

Covers A12, A29, A31, A32, A39, A40, A41, A47, A111, A112, A124 and A131 of the known faults.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.engine import (
    GPT2,
    LLAMA,
    ODD,
    ROWS,
    UPDATES,
    Outcome,
    T,
    batches_for,
    make_engine,
    plain_model,
    rows_of,
    run_file,
    trained,
    whole_moments,
    whole_weights,
    worst,
)
from tests.gloo.ranks import run_ranks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import NonFiniteError
from shardwright.layout.zero import STAGES
from shardwright.train.update import UpdateEngine

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

KINDS = ("ddp", "zero1", "zero2", "zero3")
ADAPTED = "tests.odd_models:adapted_model"
FROZEN = {"model__freeze": ["embed*", "blocks.*.base*", "head*"]}


def _kind(kind: str, model: str = LLAMA, **options: Any) -> UpdateEngine:
    return make_engine(run_file(model, parallelism__data_parallel=kind, **options))


def _frozen(kind: str) -> dict[str, Any]:
    engine = _kind(kind, ADAPTED, **FROZEN, training__weight_decay=0.5)
    before = whole_weights(engine)
    dtypes = {p.dtype for p in engine.module.parameters()}
    grads = []
    for update in range(UPDATES):
        engine.forward_backward(batches_for(engine, update))
        grads += [n for n, p in engine.module.named_parameters() if not p.requires_grad and p.grad is not None]
        engine.step()
    held = sum(v.numel() for s in engine.optimizer.state.values() for v in s.values() if v.dim())
    return {"before": before, "after": whole_weights(engine), "dtypes": dtypes, "grads": grads, "held": held}


class _Operators(TorchDispatchMode):
    """Counts operators that really run: inside it stands the mode that gives back kept results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


_COLLECTIVES = {
    "c10d._allgather_base_.default": "gathers",
    "c10d.alltoall_base_.default": "reductions",
    "c10d.allreduce_.default": "all_reduces",
}


def _collectives(kind: str, **options: Any) -> dict[str, int]:
    engine = _kind(kind, **options)
    engine.forward_backward(batches_for(engine, 0))
    engine.step()
    with _Operators() as operators:
        engine.forward_backward(batches_for(engine, 1))
        engine.step()
    return {ours: operators.seen[theirs] for theirs, ours in _COLLECTIVES.items()}


def _recomputed(mode: str) -> dict[str, int]:
    engine = _kind("zero3", memory__activation_checkpointing=mode)
    with _Operators() as operators:
        engine.forward_backward(batches_for(engine, 0))
    return {"mm": operators.seen["aten.mm.default"], "silu": operators.seen["aten.silu.default"]}


def _groups(module: Any) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups


def _gradient_sizes(kind: str) -> dict[str, int]:
    """Elements of gradients on this rank after the first of four microbatches: sharded, and not yet reduced."""
    engine = _kind(kind)
    microbatch = batches_for(engine, 0).microbatches[0]
    with engine.strategy.microbatch(last=False):
        engine.loss_sum(microbatch).backward()
    groups = {id(g): g for m in engine.module.modules() if hasattr(m, "_get_fsdp_state") for g in _groups(m)}
    waiting = 0
    for held in (held for group in groups.values() for held in group.fsdp_params):
        own = getattr(held, "_unsharded_param", None)
        for grad in (held.unsharded_accumulated_grad, None if own is None else own.grad):
            waiting += 0 if grad is None else grad.numel()
    return {
        "sharded": sum(g.numel() for _, g in engine.gradients()),
        "waiting": waiting,
        "all": sum(local.parameter.numel() for local in engine.params),
    }


def _logits_die(kind: str) -> list[bool]:
    engine = _kind(kind)
    kept: list[Any] = []
    alive: list[bool] = []
    engine.module.lm_head.register_forward_hook(lambda m, i, o: kept.append(weakref.ref(o)))
    engine.module.register_forward_pre_hook(lambda m, i: alive.extend(ref() is not None for ref in kept))
    for update in range(2):
        engine.forward_backward(batches_for(engine, update))
        engine.step()
    gc.collect()
    return alive


def _gathered_at_once(depth: int) -> list[int]:
    """Blocks that are gathered while the gradient of the third of five is computed, and while it runs forward."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "head_dim": 8}
    engine = _kind("zero3", parallelism__prefetch=depth, model__config_overrides=sizes)
    blocks, seen = engine.module.model.layers, []

    def count(*_: Any) -> None:
        groups = [_groups(block)[0] for block in blocks]
        seen.append(sum(group.is_unsharded or group._all_gather_result is not None for group in groups))

    def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
        count()
        output.register_hook(count)

    blocks[2].mlp.down_proj.register_forward_hook(watch)
    engine.forward_backward(batches_for(engine, 0))
    return seen[:2]


def _tied() -> dict[str, Any]:
    engine = _kind("zero3", GPT2)
    outcome_names = [name for name, _ in engine.module.named_parameters()]
    held = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    same = engine.module.lm_head.weight is engine.module.transformer.wte.weight
    engine.forward_backward(batches_for(engine, 0))
    engine.step()
    return {
        "names": outcome_names,
        "held": held,
        "same": same and engine.module.lm_head.weight is engine.module.transformer.wte.weight,
        "devices": {p.device.type for p in engine.module.parameters()} | {engine.mesh.device_type},
    }


def _evaluated(kind: str, evaluate: bool) -> tuple[Outcome, list[Any]]:
    engine = _kind(kind, GPT2)
    outcome, found = Outcome(), []
    for update in range(UPDATES):
        engine.forward_backward(batches_for(engine, update))
        outcome.results.append(engine.step())
        if evaluate:
            rows = [batches_for(engine, 90 + i) for i in range(2)]
            loss = engine.evaluate(rows)
            sharded = [m for m in engine.module.modules() if hasattr(m, "_get_fsdp_state")]
            gathered = sum(group.is_unsharded for m in sharded for group in _groups(m))
            found.append((whole_weights(engine), loss, engine.module.training, gathered))
    outcome.weights = whole_weights(engine)
    return outcome, found


def _poisoned(kind: str, action: str, gradient: bool = False) -> dict[str, Any]:
    """Update 1 is not finite: the loss of rank 1, or (`gradient`) what comes back into its logits."""
    engine = _kind(kind, training__on_non_finite=action)

    def poison(module: Any, inputs: Any, output: Any) -> None:
        if dist.get_rank() == 1 and engine.batch is not None and engine.batch.update == 1:
            if gradient:
                output.logits.register_hook(lambda g: g * float("nan"))
            else:
                output.logits = output.logits * float("inf")

    engine.module.register_forward_hook(poison)
    engine.forward_backward(batches_for(engine, 0))
    engine.step()
    before = (whole_weights(engine), whole_moments(engine))
    facts: dict[str, Any] = {"message": "", "before": before}
    engine.forward_backward(batches_for(engine, 1))
    try:
        facts["skipped"] = engine.step().skipped
    except NonFiniteError as error:
        facts["message"] = str(error)
    facts["after"] = (whole_weights(engine), whole_moments(engine))
    engine.forward_backward(batches_for(engine, 2))
    facts["next"] = engine.step()
    return facts


def _stop_votes() -> list[int]:
    engine = _kind("zero3")
    votes = []
    for update in range(2):
        engine.forward_backward(batches_for(engine, update))
        votes.append(engine.step(stop=dist.get_rank() == update).stop)
    return votes


def _dropout(mode: str, kind: str) -> Outcome:
    options = {"memory__activation_checkpointing": mode, "parallelism__data_parallel": kind}
    return trained(run_file(ODD, model__kwargs={"dropout": 0.5}, **options))


def _all() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tied": _tied(),
        "root": _collectives("zero3", parallelism__unit="root"),
        "kept": _collectives("zero3", parallelism__reshard_after_forward=False),
        "buckets": _collectives("ddp", parallelism__bucket_bytes=4096),
        "votes": _stop_votes(),
    }
    for kind in KINDS:
        facts[f"collectives {kind}"] = _collectives(kind)
        facts[f"evaluated {kind}"] = _evaluated(kind, True)
        facts[f"not evaluated {kind}"] = _evaluated(kind, False)
    for kind in ("ddp", "zero1", "zero3"):
        facts[f"frozen {kind}"] = _frozen(kind)
    for kind in ("zero1", "zero2", "zero3"):
        facts[f"sizes {kind}"] = _gradient_sizes(kind)
    for kind in ("ddp", "zero3"):
        facts[f"logits {kind}"] = _logits_die(kind)
        facts[f"stop {kind}"] = _poisoned(kind, "stop")
        facts[f"skip {kind}"] = _poisoned(kind, "skip")
        for mode in ("none", "full", "selective"):
            facts[f"dropout {mode} {kind}"] = _dropout(mode, kind)
    facts["stop gradient"] = _poisoned("zero3", "stop", gradient=True)
    for mode in ("none", "full", "selective", "alternate"):
        facts[f"recomputed {mode}"] = _recomputed(mode)
    for depth in (0, 1, 2):
        facts[f"gathered {depth}"] = _gathered_at_once(depth)
    return facts


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return run_ranks(_all, 2)


@pytest.mark.parametrize("kind", ("ddp", "zero1", "zero3"))
def test_frozen_parameters(kind: str, facts: list[dict[str, Any]]) -> None:
    """A32: no gradient and no state for frozen weights, which stay bitwise. A31: bf16 base and fp32 adapter take one dtype."""
    found = [rank[f"frozen {kind}"] for rank in facts]
    adapters = sum(v.numel() for n, v in found[0]["before"].items() if "lora" in n)
    assert adapters == 2 * (2 * 8 + 8 * 2)
    held = sum(rank["held"] for rank in found)
    assert held == 2 * adapters * (2 if kind == "ddp" else 1), "2 moments, on each rank or once over both"
    for rank in found:
        assert rank["dtypes"] == {torch.float64}
        assert not rank["grads"]
        for name, value in rank["before"].items():
            assert torch.equal(value, rank["after"][name]) is ("lora" not in name), name


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_one_update(kind: str, facts: list[dict[str, Any]]) -> None:
    """A39 A40 A12: with 4 microbatches, gathers and reductions of each unit are those of layout/zero.py."""
    blocks, ends, stage = 3, 2, STAGES[kind]  # ends: the embedding, and norm with head
    agreement = 1
    for rank in facts:
        found = rank[f"collectives {kind}"]
        if kind == "ddp":  # one bucket holds the whole model
            assert found == {"gathers": 0, "reductions": 0, "all_reduces": stage.reductions(4) + agreement}
        else:
            assert found == {
                "gathers": blocks * stage.gathers(4) + ends * stage.gathers(4, once=True),
                "reductions": (blocks + ends) * stage.reductions(4),
                "all_reduces": agreement,
            }


def test_options_of_gathering_have_their_effect(facts: list[dict[str, Any]]) -> None:
    """A124: unit, reshard_after_forward, bucket_bytes and prefetch are seen in what is sent, and when."""
    assert facts[0]["root"] == {"gathers": 4, "reductions": 4, "all_reduces": 1}
    assert facts[0]["kept"] == {"gathers": 5 * 4, "reductions": 5 * 4, "all_reduces": 1}
    assert facts[0]["buckets"]["all_reduces"] > 3
    assert [facts[0][f"gathered {depth}"] for depth in (0, 1, 2)] == [[1, 1], [2, 2], [3, 3]]


def test_recomputation_has_its_effect(facts: list[dict[str, Any]]) -> None:
    """A124: full runs matrix products again, alternate the second, fourth and sixth of a block, selective none."""
    modes = ("none", "full", "selective", "alternate")
    none, full, selective, alternate = (facts[0][f"recomputed {mode}"] for mode in modes)
    blocks, microbatches = 3, 4
    assert selective["mm"] == none["mm"]
    assert alternate["mm"] == none["mm"] + 3 * blocks * microbatches
    assert full["mm"] == none["mm"] + 6 * blocks * microbatches, "nothing needs the last product of a block"
    assert full["silu"] == selective["silu"] == alternate["silu"] == 2 * none["silu"] > 0


def test_gradients_rest_where_the_stage_says(facts: list[dict[str, Any]]) -> None:
    """A112: after a microbatch that is not the last, zero2 and zero3 hold 1/N of the gradients, zero1 all of them."""
    for rank in facts:
        for kind in ("zero1", "zero2", "zero3"):
            sizes = rank[f"sizes {kind}"]
            if kind == "zero1":
                assert (sizes["sharded"], sizes["waiting"]) == (0, sizes["all"])
            else:
                assert sizes["waiting"] == 0
                assert abs(sizes["sharded"] - sizes["all"] / 2) < 0.02 * sizes["all"]


@pytest.mark.parametrize("kind", ("ddp", "zero3"))
def test_logits_are_dead_before_the_next_forward(kind: str, facts: list[dict[str, Any]]) -> None:
    """A111: nothing holds the logits of a microbatch when the next one starts."""
    assert len(facts[0][f"logits {kind}"]) > 20
    assert not any(facts[0][f"logits {kind}"])


def test_tied_weights_are_one(facts: list[dict[str, Any]]) -> None:
    """A29: one parameter, one entry of the optimizer, the same object. A41: on the device that was asked for."""
    for rank in facts:
        tied = rank["tied"]
        assert tied["same"]
        assert "transformer.wte.weight" in tied["names"] and "lm_head.weight" not in tied["names"]
        assert tied["held"] == len(tied["names"])
        assert tied["devices"] == {"cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_between_updates(kind: str, facts: list[dict[str, Any]]) -> None:
    """Evaluation sees the weights of that moment and leaves the training as it was, to the bit; nothing stays gathered."""
    outcome, evaluations = facts[0][f"evaluated {kind}"]
    plain, _ = facts[0][f"not evaluated {kind}"]
    assert outcome.results == plain.results
    assert all(torch.equal(value, plain.weights[name]) for name, value in outcome.weights.items())
    model = plain_model(run_file(GPT2)).eval()
    for weights, (loss, targets), training, gathered in evaluations:
        assert training and gathered == 0
        model.load_state_dict(weights, strict=False)
        texts = [text for update in (90, 91) for text in rows_of(update)]
        with torch.no_grad():
            total = sum(F.cross_entropy(model(text[None, :-1]).logits[0], text[1:], reduction="sum") for text in texts)
        assert targets == sum(len(text) - 1 for text in texts)
        assert loss == pytest.approx(float(total) / targets, rel=tolerance.of_model(weights, targets))


@pytest.mark.parametrize("kind", ("ddp", "zero3"))
def test_a_loss_that_is_not_finite_stops_all(kind: str, facts: list[dict[str, Any]]) -> None:
    """Every rank raises the same error, which names update and rank; no weight or moment has changed."""
    for rank in facts:
        found = rank[f"stop {kind}"]
        assert found["message"].startswith("Update 1: the loss of rank 1 is not finite")
        assert found["message"] == facts[0][f"stop {kind}"]["message"]
        _assert_unchanged(found)
    message = facts[0]["stop gradient"]["message"]
    assert message.startswith("Update 1: a gradient (every rank's loss is finite) is not finite")
    _assert_unchanged(facts[0]["stop gradient"])


@pytest.mark.parametrize("kind", ("ddp", "zero3"))
def test_a_loss_that_is_not_finite_is_skipped_by_all(kind: str, facts: list[dict[str, Any]]) -> None:
    """Every rank skips, no weight or moment has changed, and the next update is sound."""
    for rank in facts:
        found = rank[f"skip {kind}"]
        assert found["skipped"] and not found["message"]
        _assert_unchanged(found)
        assert found["next"] == facts[0][f"skip {kind}"]["next"]
        assert 0 < found["next"].loss < 10 and not found["next"].skipped


def _assert_unchanged(found: dict[str, Any]) -> None:
    (weights, moments), (weights_after, moments_after) = found["before"], found["after"]
    assert all(torch.equal(v, weights_after[n]) for n, v in weights.items())
    assert all(torch.equal(v, moments_after[n][k]) for n, s in moments.items() for k, v in s.items())


def test_a_request_to_stop_is_counted_on_every_rank(facts: list[dict[str, Any]]) -> None:
    """A102 A103: one rank's flag is known to all after the same update."""
    assert [rank["votes"] for rank in facts] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("kind", ("ddp", "zero3"))
def test_dropout_is_redrawn_alike(kind: str, facts: list[dict[str, Any]]) -> None:
    """A131: gradients and weights with recomputation are those without, to the bit; and no layout changes the masks."""
    plain, like = facts[0][f"dropout none {kind}"], facts[0]["dropout none ddp"]
    for mode in ("full", "selective"):
        found = facts[0][f"dropout {mode} {kind}"]
        for ours, theirs in [*zip(found.gradients, plain.gradients), (found.weights, plain.weights)]:
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert worst(plain.weights, like.weights)[0] <= tolerance.moved(like.weights, ROWS * T)
    without = facts[0]["dropout none ddp"].gradients[0]["head.weight"]
    assert without.any()

"""Every data-parallel kind against one process of plain torch, in float64.

Covers A03, A09, A11, A12, A13, A27, A28, A33, A35, A36, A38, A45, A46, A47, A132 and A125 of the known faults.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gloo.engine import (
    GPT2,
    LLAMA,
    ODD,
    QWEN3,
    Outcome,
    assert_same_training,
    on_ranks,
    reference,
    run_file,
    worst,
)

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

KINDS = ("ddp", "zero1", "zero2", "zero3")
NO_CLIP = {"training__max_grad_norm": None}

# name: (model, run file). Accumulation is 4 on two ranks and 2 on four, targets differ between microbatches.
ON_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (LLAMA, {"parallelism__data_parallel": kind}) for kind in KINDS},
    "zero3 kept": (LLAMA, {"parallelism__reshard_after_forward": False}),
    "zero3 root": (LLAMA, {"parallelism__unit": "root"}),
    "zero1 root": (LLAMA, {"parallelism__unit": "root", "parallelism__data_parallel": "zero1"}),
    "zero3 two blocks": (LLAMA, {"parallelism__unit": 2}),
    "zero3 no prefetch": (LLAMA, {"parallelism__prefetch": 0}),
    "zero3 prefetch 2": (LLAMA, {"parallelism__prefetch": 2}),
    "zero3 full": (LLAMA, {"memory__activation_checkpointing": "full"}),
    "zero2 selective": (
        LLAMA,
        {"memory__activation_checkpointing": "selective", "parallelism__data_parallel": "zero2"},
    ),
    "ddp full": (LLAMA, {"memory__activation_checkpointing": "full", "parallelism__data_parallel": "ddp"}),
    "zero3 two rows": (LLAMA, {"training__per_device_train_batch_size": 2}),
    "zero3 replicas only": (
        LLAMA,
        {"parallelism__dp_replicate_size": 2, "parallelism__dp_shard_size": 1},
    ),
    "gpt2 ddp": (GPT2, {"parallelism__data_parallel": "ddp"}),
    "gpt2 zero3": (GPT2, {}),
    "gpt2 zero2": (GPT2, {"parallelism__data_parallel": "zero2", "parallelism__unit": 2}),
    "qwen3 zero1": (QWEN3, {"parallelism__data_parallel": "zero1"}),
    "qwen3 zero3": (QWEN3, {}),
    **{f"odd {kind}": (ODD, {"parallelism__data_parallel": kind}) for kind in KINDS},
    "odd zero3 root": (ODD, {"parallelism__unit": "root"}),
}
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": (LLAMA, {"parallelism__data_parallel": "ddp"}),
    **{
        f"hsdp {kind}": (LLAMA, {"parallelism__data_parallel": kind, "parallelism__dp_replicate_size": 2})
        for kind in KINDS[1:]
    },
    "zero3 kept on 2": (LLAMA, {"parallelism__reshard_after_forward": 2}),
    **{
        f"odd hsdp {kind}": (ODD, {"parallelism__data_parallel": kind, "parallelism__dp_replicate_size": 2})
        for kind in KINDS[1:]
    },
    "odd zero3": (ODD, {}),
}
LIKE = {model: run_file(model) for model in (LLAMA, GPT2, QWEN3, ODD)}


@pytest.fixture(scope="module")
def on_two() -> dict[str, Outcome]:
    return on_ranks(2, {name: run_file(model, **options) for name, (model, options) in ON_TWO.items()})


@pytest.fixture(scope="module")
def on_four() -> dict[str, Outcome]:
    return on_ranks(4, {name: run_file(model, **options) for name, (model, options) in ON_FOUR.items()})


@pytest.fixture(scope="module")
def right(on_two: dict[str, Outcome]) -> dict[str, Outcome]:
    """The reference of each model with B = 1, from the weights of its ddp run."""
    starts = {LLAMA: "ddp", GPT2: "gpt2 ddp", QWEN3: "qwen3 zero3", ODD: "odd ddp"}
    return {model: reference(LIKE[model], on_two[name].start) for model, name in starts.items()}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(name: str, on_two: dict[str, Outcome], right: dict[str, Outcome]) -> None:
    """A03 A11 A12 A13 A38 A45 A46 A132; the odd model A27 A28 A33 A35: gradients before clipping, norm, weights, moments."""
    assert_same_training(on_two[name], right[ON_TWO[name][0]])


def test_first_weights_are_those_of_one_process(on_two: dict[str, Outcome], on_four: dict[str, Outcome]) -> None:
    """A36: with another torch seed on each rank, every layout starts from the same bits."""
    for found, cases in ((on_two, ON_TWO), (on_four, ON_FOUR)):
        for name, (model, _) in cases.items():
            if model in (LLAMA, ODD):
                like = on_two["ddp" if model == LLAMA else "odd ddp"].start
                assert found[name].start.keys() == like.keys()
                assert all(torch.equal(value, like[p]) for p, value in found[name].start.items()), name


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(name: str, on_four: dict[str, Outcome], right: dict[str, Outcome]) -> None:
    """A03 A12 A13 A38, with hybrids; the odd model A27 A28 A33 A35."""
    assert_same_training(on_four[name], right[ON_FOUR[name][0]])


def test_the_reference_can_tell(on_two: dict[str, Outcome], right: dict[str, Outcome]) -> None:
    """The comparison sees what the faults of kind a would do: mean of means, a factor of the ranks, weight decay."""
    found = right[LLAMA]
    assert found.results[0].clip_coefficient < 0.5, "clipping is active"
    assert len({result.target_tokens for result in found.results}) > 1
    for update, result in enumerate(found.results):
        doubled = {name: 2 * g for name, g in found.gradients[update].items()}
        assert worst(on_two["zero3"].gradients[update], doubled)[0] > 0.4
        assert result.loss > 1
    unused = right[ODD].gradients[0]["never.weight"]
    assert not unused.any() and right[ODD].gradients[0]["early.weight"].any()


def test_one_and_three_ranks(right: dict[str, Outcome]) -> None:
    """A28 (a parameter of one element at world sizes 1, 2, 3), A125 (1 rank), A09 (6 rows: another window)."""
    six = {"training__global_batch_size": 6}
    for world_size in (1, 3):
        cases = {f"{kind}": run_file(ODD, parallelism__data_parallel=kind, **six) for kind in KINDS}
        cases["llama zero3"] = run_file(LLAMA, **six)
        found = on_ranks(world_size, cases, rows=6)
        for name, outcome in found.items():
            like = run_file(LLAMA if "llama" in name else ODD, **six)
            assert_same_training(outcome, reference(like, outcome.start, rows=6))
        for name, value in found["ddp"].start.items():
            assert torch.equal(value, right[ODD].start[name]), name

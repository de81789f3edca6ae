"""bf16 compute over fp32 weights: the same numerics in every data-parallel kind; one compiled run.

Covers A30, A128, A129, A130 and A133 of the known faults.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from tests import tolerance
from tests.gloo.engine import (
    GPT2,
    LLAMA,
    ROWS,
    SMALL,
    Outcome,
    assert_same_training,
    batches_for,
    make_engine,
    reference,
    run_file,
    trained,
    worst,
)
from tests.gloo.pipelines import trained as pipelined
from tests.gloo.ranks import run_ranks
from tests.odd_models import TableBlock
from torch.nn import functional as F

from shardwright.config.load import Loaded
from shardwright.loss.objective import cross_entropy_sum

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FP32 = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
BF16 = {**FP32, "precision__param_dtype": "bf16"}
BF16_WIRE = {**BF16, "precision__reduce_dtype": "bf16"}
KINDS = ("ddp", "zero1", "zero2", "zero3")
TABLES = "tests.odd_models:table_model"


def _frozen_first(kind: str) -> tuple[set[torch.dtype], bool]:
    """Evaluation (no gradients) comes before the first training forward; half of the model is frozen."""
    engine = make_engine(run_file(LLAMA, parallelism__data_parallel=kind, model__freeze=["*mlp*"], **BF16))
    engine.evaluate([batches_for(engine, 90)])
    engine.forward_backward(batches_for(engine, 0))
    dtypes = {g.dtype for _, g in engine.gradients()}
    return dtypes, engine.step().skipped


def _tables(kind: str) -> dict[str, Any]:
    engine = make_engine(run_file(TABLES, parallelism__data_parallel=kind, **BF16))
    TableBlock.seen.clear()
    engine.forward_backward(batches_for(engine, 0))
    engine.step()
    stored = {p.dtype for p in engine.module.parameters()}
    right = torch.cos(torch.arange(4096.0))[:, None]
    return {
        "seen": set(TableBlock.seen),
        "buffers": {b.dtype for b in engine.module.buffers()},
        "exact": torch.equal(engine.module.table, right),
        "loss": engine.loss_sum(batches_for(engine, 0).microbatches[0]).dtype,
        "stored": stored,
        "state": {v.dtype for entries in engine.optimizer.state.values() for v in entries.values()},
    }


def _small_steps(kind: str) -> tuple[float, bool]:
    """Moves of 1e-4 x 1e-2 = 1e-6 a step are below bf16's spacing; (how far a weight of 1 went, whether bf16 sees it)."""
    engine = make_engine(
        run_file(
            LLAMA,
            parallelism__data_parallel=kind,
            training__optimizer="sgd",
            training__learning_rate=1e-4,
            training__lr_scheduler_type="constant",
            training__max_grad_norm=None,
            **BF16,
        )
    )
    weight = next(param for param in engine.params if param.name == "model.norm.weight")
    for update in range(20):
        engine.forward_backward(batches_for(engine, update % 2))
        for _, gradient in engine.gradients():
            gradient.fill_(0.01)
        engine.step()
    local = weight.tensor.detach()
    return float((1 - local.double()).mean()), bool((local.bfloat16() == 1).all())


def _all() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for kind in KINDS:
        for name, model, options in (
            ("llama", LLAMA, BF16),
            ("gpt2", GPT2, BF16),
            ("wire", LLAMA, BF16_WIRE),
        ):
            facts[f"{name} {kind}"] = trained(run_file(model, parallelism__data_parallel=kind, **options), updates=2)
    for kind in ("ddp", "zero3"):
        facts[f"frozen {kind}"] = _frozen_first(kind)
        facts[f"tables {kind}"] = _tables(kind)
        facts[f"small {kind}"] = _small_steps(kind)
    return facts


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return run_ranks(_all, 2)[0]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_kinds_have_the_same_numerics(kind: str, facts: dict[str, Any]) -> None:
    """casting.py: ddp in bf16 gives the loss of fully_shard to the bit, and gradients that differ by rounding only."""
    ddp, found = facts["llama ddp"], facts[f"llama {kind}"]
    assert found.results[0].loss == ddp.results[0].loss
    assert worst(found.gradients[0], ddp.gradients[0])[0] <= tolerance.mixed(ROWS, dtype=torch.float32)
    tied, tied_ddp = facts[f"gpt2 {kind}"], facts["gpt2 ddp"]
    assert tied.results[0].loss == tied_ddp.results[0].loss
    assert worst(tied.gradients[0], tied_ddp.gradients[0])[0] <= tolerance.few(2, torch.bfloat16), (
        "both uses of the tied weight add up in bf16"
    )
    exact = reference(run_file(LLAMA, **FP32), found.start, updates=2)
    for name, value in exact.gradients[0].items():
        error = (found.gradients[0][name].double() - value.double()).norm() / value.norm()
        rounding = [
            tolerance.of_blocks(SMALL[LLAMA]["num_hidden_layers"], dtype) for dtype in (torch.float32, torch.bfloat16)
        ]
        assert rounding[0] < error < rounding[1], (name, "bf16, not fp32 and not noise", float(error))


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_dtype_has_its_effect(kind: str, facts: dict[str, Any]) -> None:
    """A124: with bf16 on the wire ddp's sums are bf16 numbers; with fp32 they are not.

    Shards sum bf16 pieces in fp32: what a bf16 backward made, sent as it is, loses nothing; zero1 adds microbatches before.
    """
    wide, narrow = facts[f"llama {kind}"].gradients[0], facts[f"wire {kind}"].gradients[0]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(wide[name].bfloat16().float(), wide[name])
    # a sum over the microbatches and the ranks, rounded to bf16 each time
    assert worst(narrow, facts["wire ddp"].gradients[0])[0] <= tolerance.few(ROWS, torch.bfloat16)
    assert torch.equal(narrow[name], wide[name]) == (kind in ("zero2", "zero3"))
    if kind == "ddp":
        assert torch.equal(narrow[name].bfloat16().float(), narrow[name])


@pytest.mark.parametrize("kind", ("ddp", "zero3"))
def test_bf16_compute_over_fp32_weights(kind: str, facts: dict[str, Any]) -> None:
    """A30: a first forward without gradients and frozen weights still reduces in fp32. A128 A133: a table passed as an
    argument and every buffer stay fp32, values too. A129: weights and moments are fp32. A130: so is the loss."""
    dtypes, skipped = facts[f"frozen {kind}"]
    assert dtypes == {torch.float32} and not skipped
    tables = facts[f"tables {kind}"]
    assert tables["seen"] == {(torch.float32, torch.bfloat16)}
    assert tables["buffers"] == {torch.float32} and tables["exact"]
    assert tables["stored"] == tables["state"] == {torch.float32} and tables["loss"] == torch.float32
    moved, bf16_is_blind = facts[f"small {kind}"]
    steps = 20 * tolerance.unit_roundoff(torch.float32)  # of a weight of 1
    assert bf16_is_blind and moved == pytest.approx(20 * 1e-4 * 0.01, abs=steps)


def test_cross_entropy_of_bf16_logits() -> None:
    """A130: the loss of bf16 logits is that of the same numbers in fp32, not in steps of 0.25."""
    torch.manual_seed(0)
    logits = (torch.randn(1, 7, 5000) * 20).bfloat16()
    labels = torch.randint(0, 5000, (1, 7))
    labels[0, 3] = -100
    found = cross_entropy_sum(logits, labels)
    rows = [row.double() for row, label in zip(logits[0], labels[0]) if label >= 0]
    kept = [int(label) for label in labels[0] if label >= 0]
    right = sum(torch.logsumexp(row, 0) - row[label] for row, label in zip(rows, kept))
    assert found.dtype == torch.float32
    rounding = tolerance.positive(5000, dtype=torch.float32)
    assert abs(found.item() - float(right)) <= rounding * float(right)
    assert abs(float(F.cross_entropy(logits[0], labels[0], reduction="sum")) - float(right)) > 1e-2


def _compiled(loaded: Loaded) -> tuple[Outcome, int]:
    """What is trained, and how many graphs were compiled for it."""
    torch._inductor.config.compile_threads = 1
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # else inductor's AVX512 beside torch's AVX2 gives NaN
        torch._inductor.config.cpp.simdlen = 256
    found = pipelined(loaded)
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="compiling needs a C++ compiler"
)
def test_compiled_blocks_train_alike() -> None:
    """torch.compile of each block changes neither names nor results under 1f1b; all blocks and microbatches share a graph.

    On GPT-2: a Llama's norms compute in float32, which a compiled block sums in another order (3e-7 of a gradient).
    """
    keys: dict[str, Any] = {"parallelism__pp_size": 2, "parallelism__data_parallel": "ddp"}
    ranks = run_ranks(_compiled, 2, run_file(GPT2, memory__compile=True, **keys))
    assert_same_training(ranks[0][0], reference(run_file(GPT2), ranks[0][0].start))
    assert [graphs for _, graphs in ranks] == [1, 1]

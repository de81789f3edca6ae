"""Losses in chunks, weighted, and of the user's own, under every layout, against one process of plain torch in float64.

Covers A01, A04, A06, A07, A08 and A11 of the known faults; A03 stands in test_tensor.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tolerance
from tests.gloo.engine import (
    GPT2,
    LLAMA,
    QWEN3,
    ROWS,
    Outcome,
    batch_of,
    make_engine,
    plain_model,
    rows_of,
    run_file,
    whole_gradients,
    whole_weights,
    worst,
)
from tests.gloo.ranks import run_ranks
from torch import Tensor
from transformers import Gemma2Config

from shardwright.data.loader import UpdateBatch
from shardwright.errors import ShardwrightError
from shardwright.loss.objective import logits_of
from shardwright.loss.output_head import DeferredLoss
from shardwright.train.update import UpdateEngine

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

OWN = "tests.own_losses:"
VOCABULARY, T = 4097, 8
LARGE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}


def at(kind: str = "ddp", model: str = LLAMA, **more: Any) -> tuple[str, dict[str, Any]]:
    options = {"parallelism__data_parallel": kind, "memory__loss_chunk_tokens": 3, **more}
    if model in (LLAMA, QWEN3):
        options.setdefault("model__config_overrides", LARGE)
    return model, {"training__per_device_train_batch_size": 2, **options}


TP = {"parallelism__tp_size": 2}
PP = {"parallelism__pp_size": 2}
CP = {"parallelism__cp_size": 2}
PLAN = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_gather_output"}  # fmt: skip
GATHERED = {
    "parallelism__tp_plan": PLAN,
    "parallelism__sequence_parallel": False,
    "model__config_overrides": {**LARGE, "vocab_size": 4096},
}

# name: (model, run file); those with `weighted` in their name have weights
ON_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": at(),
    "ddp whole": at(memory__loss_chunk_tokens=0),
    "zero1": at("zero1"),
    "zero2 tied weighted": at("zero2", QWEN3),
    "zero3": at("zero3"),
    "zero3 root recompute": at("zero3", parallelism__unit="root", memory__activation_checkpointing="full"),
    "gpt2 zero3": at("zero3", GPT2),
    "gemma2 zero3": at("zero3", "gemma2", model__attn_implementation="eager"),
    "gemma2 ddp": at("ddp", "gemma2", model__attn_implementation="eager"),
    "gemma2 whole": at("ddp", "gemma2", model__attn_implementation="eager", memory__loss_chunk_tokens=0),
    "tp": at(**TP),
    "tp whole weighted": at(**TP, memory__loss_chunk_tokens=0),
    "tp weighted": at("zero3", **TP),
    "tp tied": at("zero1", QWEN3, **TP),
    "tp gathered": at(**TP, **GATHERED),
    "pp": at(**PP),
    "pp gpipe weighted": at(**PP, parallelism__pp_schedule="gpipe"),
    "pp zero2 interleaved": at("zero2", **PP, parallelism__pp_schedule="interleaved_1f1b",
                               model__config_overrides={**LARGE, "num_hidden_layers": 4}),
    "pp tied": at(model=QWEN3, **PP),
    "cp": at(**CP),
    "cp weighted": at("zero3", **CP),
    "own": at("zero3", memory__loss_chunk_tokens="auto", training__loss=OWN + "smoothed"),
    "own pp": at(**PP, memory__loss_chunk_tokens="auto", training__loss=OWN + "smoothed"),
    "own cp weighted": at(**CP, memory__loss_chunk_tokens="auto", training__loss=OWN + "smoothed"),
    "own tp": at(**TP, **GATHERED, memory__loss_chunk_tokens="auto", training__loss=OWN + "smoothed"),
}  # fmt: skip
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3 tp weighted": at("zero3", **TP),
    "pp zero1": at("zero1", **PP),
    "pp tp tied weighted": at(model=QWEN3, **PP, **TP),
    "cp tp": at(**CP, **TP),
    "hsdp weighted": at("zero3", parallelism__dp_replicate_size=2),
    "own pp zero2": at("zero2", **PP, memory__loss_chunk_tokens="auto", training__loss=OWN + "smoothed"),
}


def loaded(case: tuple[str, dict[str, Any]], directory: Path) -> Any:
    model, options = case
    if model == "gemma2":
        place = directory / model
        if not place.exists():
            sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "pad_token_id": 0}
            Gemma2Config(**sizes, **heads, final_logit_softcapping=0.3, sliding_window=64).save_pretrained(place)
        model = str(place)
    return run_file(model, **options)


def weight_of(update: int, row: int, length: int) -> Tensor:
    """Weights of a row's targets; some are 0."""
    g = torch.Generator().manual_seed(100 * update + row)
    return torch.randint(0, 4, (length,), generator=g) / 2


def weighted(batch: UpdateBatch) -> UpdateBatch:
    """`batch` with weights of its targets."""
    microbatches, total = [], 0.0
    for row, text in enumerate(rows_of(batch.update, length=T)):
        total += weight_of(batch.update, row, len(text) - 1).sum().item()
    for m in batch.microbatches:
        weights = torch.zeros(m.labels.shape)
        for b, row in enumerate(m.row_ids):
            count = int((m.labels[b] != -100).sum())
            weights[b, :count] = weight_of(batch.update, row, count)
        microbatches.append(replace(m, weights=weights))
    return replace(batch, microbatches=tuple(microbatches), target_weight=total)


def one_microbatch_without_targets(batch: UpdateBatch) -> UpdateBatch:
    """`batch` where the first microbatch of the update has no target, on the data rank that holds it."""
    first = [replace(m, labels=torch.full_like(m.labels, -100)) if not m.index else m for m in batch.microbatches]
    targets = sum(len(text) - 1 for text in rows_of(batch.update, length=T)[2:])
    return replace(batch, microbatches=tuple(first), target_tokens=targets)


def batch_for(engine: UpdateEngine, update: int, name: str) -> UpdateBatch:
    place, ranks = engine.axes.data_rank(engine.rank), engine.axes.data_ranks
    batch = batch_of(update, place, ranks, engine.run.training.per_device_train_batch_size, length=T)
    if "weighted" in name:
        return weighted(batch)
    return one_microbatch_without_targets(batch) if update == 1 else batch


def note_chunks(engine: UpdateEngine, seen: list[bool]) -> None:
    """Notes at each loss whether logits were never whole."""
    original = engine.loss_of

    def loss_of(output: Any, microbatch: Any) -> Tensor:
        seen.append(isinstance(logits_of(output), DeferredLoss))
        return original(output, microbatch)

    engine.loss_of = loss_of  # type: ignore[method-assign]


def trained(cases: dict[str, Any]) -> dict[str, Outcome]:
    """Gradients and results of the first updates of each case, and the evaluation loss of the first."""
    found = {}
    for name, case in cases.items():
        engine = make_engine(case)
        outcome = Outcome(start=whole_weights(engine))
        seen: list[bool] = []
        note_chunks(engine, seen)
        try:
            evaluated, _ = engine.evaluate([batch_for(engine, 0, name)])
            outcome.moments["eval"] = {"loss": torch.tensor(evaluated, dtype=torch.float64)}
            for update in range(2):
                engine.forward_backward(batch_for(engine, update, name))
                outcome.gradients.append(whole_gradients(engine))
                outcome.results.append(engine.step())
        except Exception as error:
            raise AssertionError(f"case {name}") from error
        chunked = case.run.memory.loss_chunk_tokens not in ("auto", 0)
        assert set(seen) <= {chunked}, f"{name}: the loss was not made as asked"
        found[name] = outcome
    return found


def plain(case: Any, start: dict[str, Tensor], name: str) -> Outcome:
    """The same in one process: the formula over whole logits of each row, and SGD's clipping left out."""
    model = plain_model(case)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for key, p in named.items():
            p.copy_(start[key])
    outcome, smoothed = Outcome(), ":smoothed" in case.run.training.loss
    for update in range(2):
        total, divisor = torch.zeros(()).double(), 0.0
        model.zero_grad()
        for row, text in enumerate(rows_of(update, length=T)):
            if update == 1 and "weighted" not in name and row < 2:
                continue
            ids = torch.zeros(1, T, dtype=torch.long)
            ids[0, : len(text) - 1] = text[:-1]
            logits = model(ids).logits[0, : len(text) - 1].double()
            weights = torch.ones(len(text) - 1).double()
            if "weighted" in name:
                weights = weight_of(update, row, len(text) - 1).double()
            losses = -logits.log_softmax(-1)[torch.arange(len(text) - 1), text[1:]]
            if smoothed:
                losses = 0.9 * losses - 0.1 * logits.log_softmax(-1).mean(-1)
                divisor += 2 * weights.sum().item()
            else:
                divisor += weights.sum().item()
            total = total + losses @ weights
        (total / divisor).backward()
        outcome.gradients.append({key: p.grad.clone() for key, p in named.items()})
        outcome.moments[str(update)] = {"loss": (total / divisor).detach()}
        if update == 0:
            step(case, model)
    return outcome


def step(case: Any, model: torch.nn.Module) -> None:
    """AdamW as the run file asks, with clipping and its linear schedule's first rate."""
    t = case.run.training
    torch.nn.utils.clip_grad_norm_(model.parameters(), t.max_grad_norm)
    bare = [p for n, p in model.named_parameters() if p.dim() < 2 or "norm" in n or "ln_" in n]
    rest = [p for p in model.parameters() if not any(p is b for b in bare)]
    groups = [{"params": rest, "weight_decay": t.weight_decay}, {"params": bare, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=t.learning_rate).step()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def on_ranks(size: int, cases: dict[str, tuple[str, dict[str, Any]]], directory: Path) -> dict[str, Outcome]:
    """What rank 0 found; weights and gradients of all ranks, since pipeline stages hold their own."""
    found, *others = run_ranks(trained, size, {n: loaded(c, directory) for n, c in cases.items()})
    for name in cases:
        for other in others:
            found[name].start |= other[name].start
            for own, more in zip(found[name].gradients, other[name].gradients):
                own |= more
    return found


@pytest.fixture(scope="module")
def on_two(directory: Path) -> dict[str, Outcome]:
    return on_ranks(2, ON_TWO, directory)


@pytest.fixture(scope="module")
def on_four(directory: Path) -> dict[str, Outcome]:
    return on_ranks(4, ON_FOUR, directory)


_references: dict[str, Outcome] = {}


def compare(name: str, case: tuple[str, dict[str, Any]], found: Outcome, directory: Path) -> None:
    file = loaded(case, directory)
    key = f"{case[0]} {case[1].get('model__config_overrides')} {'weighted' in name} {file.run.training.loss}"
    if key not in _references:
        _references[key] = plain(file, found.start, name)
    right, rounding = _references[key], tolerance.of_model(found.start, ROWS * T)
    moved = tolerance.moved(found.start, ROWS * T)
    for update, result in enumerate(found.results):
        loss = right.moments[str(update)]["loss"].item()
        assert abs(result.loss - loss) <= tolerance.LATER * rounding * loss, (update, result.loss, loss)
        difference, where = worst(found.gradients[update], right.gradients[update])
        assert difference <= (moved if update else rounding), f"gradient of {where} in update {update}: {difference}"
    evaluated = found.moments["eval"]["loss"].item()
    assert abs(evaluated - found.results[0].loss) <= rounding * abs(evaluated)


@pytest.mark.parametrize("name", [name for name in ON_TWO if "gemma2" not in name])
def test_two_ranks(name: str, on_two: dict[str, Outcome], directory: Path) -> None:
    """A01 A04 A06 A07 A08 A11: loss and every gradient of two updates, targets unequal over ranks and microbatches."""
    compare(name, ON_TWO[name], on_two[name], directory)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(name: str, on_four: dict[str, Outcome], directory: Path) -> None:
    """A01 A04: the same where two axes divide the work."""
    compare(name, ON_FOUR[name], on_four[name], directory)


@pytest.mark.parametrize("name", ["gemma2 zero3", "gemma2 ddp"])
def test_capped_logits(name: str, on_two: dict[str, Outcome]) -> None:
    """Gemma 2 caps its logits behind the head; its own code says so, in chunks as on whole logits."""
    found, whole = on_two[name], on_two["gemma2 whole"]
    assert abs(found.results[0].loss / whole.results[0].loss - 1) <= tolerance.of_model(found.start, ROWS * T)
    # its norms compute in float32, where a difference of float64's may round to the other side, once a norm
    assert worst(found.gradients[0], whole.gradients[0])[0] <= tolerance.in_norm(len(found.start), torch.float32)


@pytest.mark.parametrize(
    ("name", "other"), [("ddp", "ddp whole"), ("zero3", "ddp whole"), ("tp weighted", "tp whole weighted")]
)
def test_chunks_change_nothing(name: str, other: str, on_two: dict[str, Outcome]) -> None:
    """Chunks against whole logits of the same engine: every gradient but for rounding."""
    difference, where = worst(on_two[name].gradients[0], on_two[other].gradients[0])
    assert difference <= tolerance.of_model(on_two[name].start, ROWS * T), where


def _without_count() -> str:
    engine = make_engine(run_file(training__loss=OWN + "counts_nothing", parallelism__data_parallel="zero2"))
    try:
        engine.forward_backward(batch_for(engine, 0, ""))
    except ShardwrightError as error:
        return str(error)
    return ""


def test_a_loss_that_counts_no_target_is_stopped_on_all_ranks() -> None:
    """A11: there is nothing to divide by."""
    assert all("counts 0.0 targets in update 0" in error for error in run_ranks(_without_count, 2))

"""Packed rows against each document alone in one process, in float64, on every axis.

Covers A15, A17, A19, A20, A21 and A118. The oracle takes from the engine only the first weights: it runs each document without
padding through the model as its users build it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.engine import (
    GPT2,
    LLAMA,
    QWEN3,
    SMALL,
    Outcome,
    assert_same_training,
    make_engine,
    parameter_groups,
    plain_model,
    run_file,
    stepped,
    whole_gradients,
    whole_weights,
    with_bounds,
)
from tests.gloo.ranks import THREADS, run_ranks
from torch import Tensor, nn

from shardwright.arch.shape import Shape
from shardwright.config.load import Loaded
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ShardwrightError
from shardwright.train.update import UpdateEngine
from shardwright.train.utilisation import DevicePeak, Utilisation, document_lengths

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

ROWS, VOCABULARY = 8, 31
HAND = Shape("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)
WIDTHS = (16, 24)
"""Tokens of a row in update 0 and 1: a packed run's rows may be wider in one update than in another."""


def mixes(update: int) -> list[list[int]]:
    """Lengths of the documents of each row: one document, padding, one token, only short ones, random."""
    width, g = WIDTHS[update], torch.Generator().manual_seed(7 + update)
    rows = [[width], [5, 3], [1, width - 1], [2] * (width // 2), [width - 1, 1]]
    while len(rows) < ROWS:
        lengths: list[int] = []
        while (left := width - sum(lengths)) > 0:
            lengths.append(1 + int(torch.randint(0, left, (), generator=g)))
        rows.append(lengths)
    return rows


def documents_of(update: int) -> list[list[Tensor]]:
    """Token ids of each document of each row."""
    g = torch.Generator().manual_seed(100 + update)
    return [[torch.randint(5, VOCABULARY, (n,), generator=g) for n in lengths] for lengths in mixes(update)]


def packed_batch(engine: UpdateEngine, update: int, rows: list[list[Tensor]] | None = None) -> UpdateBatch:
    """This data rank's part of an update of packed rows, as the loader cuts it."""
    rows, width = rows or documents_of(update), WIDTHS[update]
    ids = torch.zeros(ROWS, width, dtype=torch.long)
    labels, numbers = torch.full_like(ids, -100), torch.full((ROWS, width), -1, dtype=torch.int32)
    for row, texts in enumerate(rows):
        at = 0
        for number, text in enumerate(texts):
            here = slice(at, at + len(text))
            ids[row, here], numbers[row, here] = text, number
            labels[row, at : at + len(text) - 1] = text[1:]
            at += len(text)
    size, ranks = engine.run.training.per_device_train_batch_size, engine.axes.data_ranks
    parts = [slice(first, first + size) for first in range(0, ROWS, size)]
    made = tuple(
        Microbatch(k, ids[parts[k]], labels[parts[k]], tuple(range(ROWS))[parts[k]], numbers[parts[k]])
        for k in range(engine.axes.data_rank(engine.rank), len(parts), ranks)
    )
    targets, real = int((labels >= 0).sum()), int((numbers >= 0).sum())
    return UpdateBatch(update, made, targets, real, ids.numel(), tuple(range(ROWS)))


def alone(loaded: Loaded, start: dict[str, Tensor], updates: int) -> Outcome:
    """The same updates, each document by itself, without padding: summed, divided once, stepped with torch's AdamW."""
    right, other = (_alone(loaded, start, updates, disturb) for disturb in (False, True))
    return with_bounds(right, other)


def _alone(loaded: Loaded, start: dict[str, Tensor], updates: int, disturb: bool) -> Outcome:
    torch.set_num_threads(THREADS)
    model, t = plain_model(loaded), loaded.run.training
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(start[name])
    optimizer = torch.optim.AdamW(parameter_groups(named, t.weight_decay), lr=t.learning_rate)
    outcome, generator = Outcome(start), torch.Generator().manual_seed(1) if disturb else None
    for update in range(updates):
        texts = [text for row in documents_of(update) for text in row]
        targets, total = sum(len(text) - 1 for text in texts), 0.0
        for text in texts:
            if len(text) > 1:
                logits = model(text[None]).logits[0, :-1]
                loss = nn.functional.cross_entropy(logits, text[1:], reduction="sum") / targets
                loss.backward()
                total += loss.item()
        stepped(outcome, named, optimizer, t, total, targets, generator, updates)
    outcome.weights = {name: p.detach() for name, p in named.items()}
    return outcome


def packs(model: str = LLAMA, kind: str = "zero3", **options: Any) -> Loaded:
    values: dict[str, Any] = {
        "parallelism__data_parallel": kind,
        "data__batching": "pack",
        "data__max_length": 16,
    }
    if model == GPT2:  # its key biases have gradients of rounding alone, which AdamW makes whole steps of: whole logits
        values["memory__loss_chunk_tokens"] = 0  # round like those of the oracle
    return run_file(model, **{**values, **options})


def axis(size: int = 2, **sizes: Any) -> dict[str, Any]:
    return {f"parallelism__{name}": value for name, value in sizes.items()}


CP, RING = axis(cp_size=2), axis(cp_size=2, cp_attention="ring")
TP, PP = axis(tp_size=2), axis(pp_size=2)
TWO_ROWS = {"training__per_device_train_batch_size": 2}
FULL, SELECTIVE = ({"memory__activation_checkpointing": mode} for mode in ("full", "selective"))
ON_TWO: dict[str, Loaded] = {
    **{kind: packs(kind=kind, **TWO_ROWS) for kind in ("ddp", "zero1", "zero2", "zero3")},
    "zero3 full": packs(**FULL),
    "zero2 selective": packs(kind="zero2", **SELECTIVE),
    "cp": packs(**CP, **TWO_ROWS),
    "cp plain ddp": packs(kind="ddp", **CP, parallelism__cp_load_balance=False),
    "cp full": packs(**CP, **FULL),
    "ring": packs(**RING, **TWO_ROWS),
    "ring plain selective": packs(kind="ddp", **RING, **SELECTIVE, parallelism__cp_load_balance=False),
    "tp": packs(**TP, **TWO_ROWS),
    "tp without sp": packs(kind="ddp", **TP, parallelism__sequence_parallel=False),
    "pp": packs(**PP),
    "pp two rows": packs(kind="ddp", **PP, **TWO_ROWS, **FULL),
    "pp gpipe": packs(kind="zero1", **PP, parallelism__pp_schedule="gpipe"),
    **{f"gpt2 {name}": packs(GPT2, kind, **more) for name, kind, more in (
        ("zero3", "zero3", {}), ("ddp", "ddp", FULL), ("cp", "zero2", CP), ("ring", "ddp", RING), ("tp", "zero3", TP),
        ("pp", "zero3", PP))},
    **{f"qwen3 {name}": packs(QWEN3, kind, **more) for name, kind, more in (
        ("zero3", "zero3", TWO_ROWS), ("cp", "ddp", CP), ("tp", "zero1", TP))},
}  # fmt: skip
ON_FOUR: dict[str, Loaded] = {
    "pp and tp": packs(**PP, **TP),
    "pp and tp zero2": packs(kind="zero2", **PP, **TP, **TWO_ROWS),
    "cp and tp": packs(**CP, **TP),
    "pp and ring": packs(kind="ddp", **PP, **RING),
    "pp and zero3": packs(**PP),
    "tp and zero1": packs(kind="zero1", **TP, **TWO_ROWS),
    "gpt2 pp and tp": packs(GPT2, "ddp", **PP, **TP),
    "gpt2 cp and zero3": packs(GPT2, **CP),
}
MODEL_OF = {"gpt2": GPT2, "qwen3": QWEN3}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Mistral with a window of 5 keys."""
    directory = tmp_path_factory.mktemp("mistral")
    config = {**json.loads((Path(LLAMA) / "config.json").read_text()), **SMALL[LLAMA]}
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Mixtral: each token goes to 2 of 4 experts, whatever document it belongs to."""
    directory = tmp_path_factory.mktemp("mixtral")
    config = {**json.loads((Path(LLAMA) / "config.json").read_text()), **SMALL[LLAMA]}
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def _of_all_stages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every rank holds, by name: stages hold different parameters."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, tensors)
    return {name: tensor for named in reversed(held) for name, tensor in named.items()}


def _trained(loaded: Loaded, updates: int) -> Outcome:
    torch.manual_seed(dist.get_rank())
    engine = make_engine(loaded)
    outcome = Outcome(start=_of_all_stages(whole_weights(engine)))
    for update in range(updates):
        engine.forward_backward(packed_batch(engine, update))
        outcome.gradients.append(_of_all_stages(whole_gradients(engine)))
        outcome.results.append(engine.step())
    outcome.weights = _of_all_stages(whole_weights(engine))
    return outcome


def _losses(loaded: Loaded, change: str) -> list[float]:
    """What this rank's loss of each row is, where another document of some rows is changed (or nothing)."""
    engine, rows = make_engine(loaded), documents_of(0)
    if change == "first":
        for texts in rows:
            if len(texts) > 1:
                texts[0] = 35 - texts[0]
    elif change == "last":
        for texts in rows:
            if len(texts) > 1:
                texts[-1] = 35 - texts[-1]
    batch, found = packed_batch(engine, 0, rows), []
    engine.module.train()
    for microbatch in batch.microbatches:
        for row in range(len(microbatch.labels)):
            keep = microbatch.documents == (0 if change in ("last", "of first") else -2)
            if change in ("first", "of last"):
                most = microbatch.documents.amax(1, keepdim=True)  # type: ignore[union-attr]
                keep = (microbatch.documents == most) & (most > 0)
            labels = torch.where(keep, microbatch.labels, -100)
            labels[[other for other in range(len(labels)) if other != row]] = -100
            own = Microbatch(microbatch.index, microbatch.input_ids, labels, microbatch.row_ids, microbatch.documents)
            found.append(float(engine.loss_sum(own).detach()))
    engine.strategy.release()
    return found


def _flops(loaded: Loaded) -> tuple[float, float]:
    """FLOPs of update 0 of a shape for which they are known by hand."""
    engine = make_engine(loaded)
    batch = packed_batch(engine, 0)
    own = Utilisation(HAND, loaded.run, engine.axes, DevicePeak(1.0, "")).flops(batch)
    sums = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(sums)
    useful, again = sums.tolist()
    return useful, again


def _on_rank(cases: dict[str, Loaded], perturbed: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loaded in cases.items():
        try:
            outcome = _trained(loaded, 2)
        except Exception as error:
            raise AssertionError(f"case {name}") from error
        first = dist.get_rank() == 0
        found[name] = outcome if first else Outcome(results=outcome.results)
    for name in perturbed:
        for change in ("of first", "last", "of last", "first"):
            found[f"{name}: {change}"] = _losses(cases[name], change)
    if perturbed:
        found["flops"] = {name: _flops(cases[name]) for name in ("zero3 full", "cp full")}
    return found


@pytest.fixture(scope="module")
def on_two(windowed: str, experts: str) -> list[dict[str, Any]]:
    more = {"window": packs(windowed, **TWO_ROWS), "window cp": packs(windowed, **CP)}
    more |= {f"experts {kind}": packs(experts, kind, **TWO_ROWS) for kind in ("ddp", "zero3")}
    return run_ranks(partial(_on_rank, perturbed=PERTURBED), 2, {**ON_TWO, **more})


PERTURBED = ["zero3", "cp", "ring", "tp", "gpt2 zero3", "gpt2 tp"]


@pytest.fixture(scope="module")
def right(on_two: list[dict[str, Any]], windowed: str, experts: str) -> dict[str, Outcome]:
    """The oracle of each model, from the weights of its first run."""
    runs = {
        LLAMA: "ddp",
        GPT2: "gpt2 zero3",
        QWEN3: "qwen3 zero3",
        windowed: "window",
        experts: "experts ddp",
    }
    return {model: alone(packs(model), on_two[0][name].start, 2) for model, name in runs.items()}


def assert_alone(found: Outcome, right: Outcome) -> None:
    """Loss, gradients and weights, as far as rounding allows."""
    assert_same_training(replace(found, moments={}), right)


@pytest.mark.parametrize("name", [*ON_TWO, "window", "window cp", "experts ddp", "experts zero3"])
def test_two_ranks(
    name: str, on_two: list[dict[str, Any]], right: dict[str, Outcome], windowed: str, experts: str
) -> None:
    """A15 A17 A19 A20 A21: targets, loss, every gradient and the weights are those of each document alone."""
    model = {**MODEL_OF, "window": windowed, "experts": experts}.get(name.split()[0], LLAMA)
    assert_alone(on_two[0][name], right[model])
    assert all(rank[name].results == on_two[0][name].results for rank in on_two)


def test_four_ranks(right: dict[str, Outcome]) -> None:
    """The same where axes join, stages under 1f1b and rows in other hands."""
    found = run_ranks(partial(_on_rank, perturbed=[]), 4, ON_FOUR)
    for name in ON_FOUR:
        try:
            assert_alone(found[0][name], right[MODEL_OF.get(name.split()[0], LLAMA)])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("name", PERTURBED)
def test_other_documents_leave_the_bits(name: str, on_two: list[dict[str, Any]]) -> None:
    """A15: the loss of each first (last) document is bitwise the same whatever the last (first) of its row holds."""
    for rank in on_two:
        assert rank[f"{name}: of first"] == rank[f"{name}: last"]
        assert rank[f"{name}: of last"] == rank[f"{name}: first"]
        assert any(rank[f"{name}: of first"]) and any(rank[f"{name}: of last"])


@pytest.mark.parametrize("name", ["zero3 full", "cp full"])
def test_flops_follow_the_documents(name: str, on_two: list[dict[str, Any]]) -> None:
    """A118: 540 672 FLOPs a token, 1 536 a token and key of its document, each once over data ranks and parts of rows."""
    lengths = [n for row in mixes(0) for n in row]
    keys = sum(n * n for n in lengths)
    for rank in on_two:
        assert rank["flops"][name][0] == sum(lengths) * 540_672 + 1_536 * keys
        assert rank["flops"][name][1] == pytest.approx(
            sum(lengths) * 2 * 2 * 36_864 + 512 * keys, rel=tolerance.positive(len(lengths))
        )


def _not_packed() -> str:
    engine = make_engine(run_file(LLAMA))
    try:
        engine.forward_backward(packed_batch(engine, 0))
    except ShardwrightError as error:
        return str(error)
    return ""


def test_documents_in_a_run_that_does_not_pack_are_refused() -> None:
    assert "Microbatch 0 has documents, with data.batching pad." in run_ranks(_not_packed, 1)[0]


def test_lengths_of_rows_without_numbers_follow_their_targets() -> None:
    """Rows of 4 and 2 tokens, one whose last target is masked, and one without a target."""
    labels = torch.tensor([[5, 6, 7, -100, -100], [5, -100, -100, -100, -100], [5, 6, 7, 8, 9], [-100] * 5])
    assert document_lengths(Microbatch(0, labels, labels, (0, 1, 2, 3))) == {4: 1, 2: 1, 5: 1, 0: 1}

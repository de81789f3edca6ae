"""Context parallelism against one process, in float64, and what it sends. Covers A03, A04, A20, A21, A96 and A97.

B rows, N query heads, K kv heads, S tokens of a row, H head width.
"""

from __future__ import annotations

import json
from collections import Counter
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
    ROWS,
    SMALL,
    Outcome,
    assert_same_training,
    batches_for,
    make_engine,
    on_ranks,
    plain_model,
    reference,
    run_file,
    trained,
    whole_moments,
    whole_weights,
    worst,
)
from tests.gloo.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.attention.packed_rows import PackedRows
from shardwright.checkpoint import state
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.reader import SharedCheckpoint, load
from shardwright.checkpoint.saver import save
from shardwright.config.load import Loaded
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.size_rules import chunks
from shardwright.layout.traffic import context_traffic
from shardwright.parallel.context.attention import SHARD, context_attention
from shardwright.parallel.context.shard import ContextShard
from shardwright.train.update import UpdateEngine

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

KINDS = ("ddp", "zero1", "zero2", "zero3")
LENGTH, UPDATES = 12, 2  # on four ranks rows of 16: twice cp divides it


def cp_run(model: str = LLAMA, kind: str = "zero3", attention: str = "", **options: Any) -> Loaded:
    """A run with cp 2; `attention` empty: the default."""
    values: dict[str, Any] = {"parallelism__cp_size": 2, "parallelism__data_parallel": kind}
    if attention:
        values["parallelism__cp_attention"] = attention
    return run_file(model, **{**values, "data__max_length": LENGTH, **options})


PLAIN = {"parallelism__cp_load_balance": False}
FULL, SELECTIVE = ({"memory__activation_checkpointing": mode} for mode in ("full", "selective"))
ON_TWO: dict[str, Loaded] = {
    **{kind: cp_run(kind=kind) for kind in KINDS},
    **{f"{kind} ring": cp_run(kind=kind, attention="ring") for kind in ("ddp", "zero3")},
    "zero3 plain": cp_run(**PLAIN),
    "ddp ring plain": cp_run(kind="ddp", attention="ring", **PLAIN),
    "zero3 full": cp_run(**FULL),
    "zero1 ring full": cp_run(kind="zero1", attention="ring", **FULL),
    "zero2 selective": cp_run(kind="zero2", **SELECTIVE),
    "ddp ring selective": cp_run(kind="ddp", attention="ring", **SELECTIVE),
    "zero3 ring two rows": cp_run(attention="ring", training__per_device_train_batch_size=2),
    "qwen3 zero3": cp_run(QWEN3),
    "qwen3 ddp ring": cp_run(QWEN3, "ddp", "ring"),
    "gpt2 ddp": cp_run(GPT2, "ddp"),
    "gpt2 zero2 ring": cp_run(GPT2, "zero2", "ring"),
}
SIXTEEN = {"data__max_length": 16}
FOUR = {"parallelism__cp_size": 4, **SIXTEEN}
HYBRID = {"parallelism__dp_replicate_size": 2, **SIXTEEN}
ON_FOUR: dict[str, Loaded] = {
    **{f"{kind} x dp2": cp_run(kind=kind, **SIXTEEN) for kind in KINDS},
    "zero3 ring x dp2": cp_run(attention="ring", **SIXTEEN),
    "zero3 hybrid": cp_run(**HYBRID),
    "zero1 ring hybrid": cp_run(kind="zero1", attention="ring", **HYBRID),
    "zero3 kept on 2": cp_run(parallelism__reshard_after_forward=2, **SIXTEEN),
    "zero3 cp4": cp_run(**FOUR),
    "ddp ring cp4": cp_run(kind="ddp", attention="ring", **FOUR),
    "zero2 ring cp4 plain": cp_run(kind="zero2", attention="ring", **FOUR, **PLAIN),
}


def model_of(name: str) -> str:
    return {"qwen3": QWEN3, "gpt2": GPT2}.get(name.split()[0], LLAMA)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A Mistral with a window of 5 keys."""
    directory = tmp_path_factory.mktemp("mistral")
    config = {**json.loads((Path(LLAMA) / "config.json").read_text()), **SMALL[LLAMA]}
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5}
    (directory / "config.json").write_text(json.dumps(config))
    return cp_run(str(directory))


@pytest.fixture(scope="module")
def on_two(windowed: Loaded) -> dict[str, Outcome]:
    return on_ranks(2, {**ON_TWO, "window": windowed}, length=LENGTH, updates=UPDATES)


@pytest.fixture(scope="module")
def right(on_two: dict[str, Outcome]) -> dict[str, Outcome]:
    """The reference of each model from the weights of its first run."""
    starts = {LLAMA: "ddp", QWEN3: "qwen3 zero3", GPT2: "gpt2 ddp"}
    return {m: reference(run_file(m), on_two[name].start, length=LENGTH, updates=UPDATES) for m, name in starts.items()}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(name: str, on_two: dict[str, Outcome], right: dict[str, Outcome]) -> None:
    """A03 A04 A97: loss, targets, norm, every gradient before clipping, weights and moments are those of one process."""
    assert_same_training(on_two[name], right[model_of(name)])


def test_sliding_window(on_two: dict[str, Outcome], windowed: Loaded, right: dict[str, Outcome]) -> None:
    """Each query sees its last 5 keys, across ranks; without the window the loss is another one."""
    outcome = on_two["window"]
    assert_same_training(outcome, reference(windowed, outcome.start, length=LENGTH, updates=UPDATES))
    assert abs(outcome.losses[0] / right[LLAMA].losses[0] - 1) > tolerance.of_model(outcome.start, ROWS * LENGTH)


def test_four_ranks(on_two: dict[str, Outcome]) -> None:
    """A03: cp 2 beside data ranks of every kind and hybrids, and cp 4; the gradient norm's ratio is 1, not 2."""
    found = on_ranks(4, ON_FOUR, length=16, updates=UPDATES)
    right = reference(run_file(LLAMA), found["ddp x dp2"].start, length=16, updates=UPDATES)
    for name, outcome in found.items():
        try:
            assert_same_training(outcome, right)
        except AssertionError as error:
            raise AssertionError(name) from error
        assert all(torch.equal(value, on_two["ddp"].start[p]) for p, value in outcome.start.items())


# What the ranks of one start report for the tests below


def _whole_inputs(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [2, 4, 12, 8], k [2, 2, 12, 8], v [2, 2, 12, width] and a gradient of the output, the same everywhere."""
    g = torch.Generator().manual_seed(3)

    def normal(heads: int, size: int) -> Tensor:
        return torch.randn(2, heads, LENGTH, size, generator=g, dtype=torch.float64)

    return normal(4, 8), normal(2, 8), normal(2, width), normal(4, width)


ATTENTIONS = ("all_gather", "ring")
DOCUMENTS = PackedRows(torch.tensor([[0] * 4 + [1] * 7 + [2], [0] * 12]), torch.device("cpu"))
ATTENTION_CASES: dict[str, tuple[str, bool, int, dict[str, Any]]] = (
    {
        f"{kind} {'balanced' if balanced else 'plain'} {width}": (kind, balanced, width, {})
        for kind in ATTENTIONS
        for balanced in (True, False)
        for width in (8, 6)
    }
    | {
        f"all_gather {balanced} {name}": ("all_gather", balanced, 8, options)
        for balanced in (True, False)
        for name, options in {
            "window": {"sliding_window": 3},
            "documents": {"documents": DOCUMENTS},
            "both": {"documents": DOCUMENTS, "sliding_window": 3},
        }.items()
    }
    | {
        f"ring {balanced} documents {width}": ("ring", balanced, width, {"documents": DOCUMENTS})
        for balanced in (True, False)
        for width in (8, 6)
    }
)


def _attention(kind: str, balanced: bool, width: int, options: dict[str, Any]) -> list[Tensor]:
    """This rank's output [B, N, T, H] and gradients of its q, k and v."""
    place = ContextShard(2, dist.get_rank(), balanced, dist.group.WORLD, kind)
    module = nn.Module()
    vars(module)[SHARD] = place
    *inputs, grad = (torch.cat([t[:, :, r.start : r.stop] for r in place.chunks(LENGTH)], 2)
                     for t in _whole_inputs(width))  # fmt: skip
    for t in inputs:
        t.requires_grad_()
    out, _ = context_attention(module, *inputs, None, scaling=0.4, **options)
    out.transpose(1, 2).backward(grad)
    return [out.detach().transpose(1, 2), *(t.grad for t in inputs)]


def _batch(rows: list[list[int]], targets: int | None = None) -> UpdateBatch:
    """One microbatch of `rows` of token ids, padded to LENGTH; only the first `targets` targets of each count."""
    ids, labels = torch.zeros(len(rows), LENGTH, dtype=torch.long), torch.full((len(rows), LENGTH), -100)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        labels[row, : len(tokens) - 1] = torch.tensor(tokens[1:])
    if targets is not None:
        labels[:, targets:] = -100
    count = int((labels >= 0).sum())
    microbatch = Microbatch(0, ids, labels, tuple(range(len(rows))))
    return UpdateBatch(0, (microbatch,), count, count, ids.numel(), microbatch.row_ids)


BATCHES = {
    "seven targets": _batch([[5, 6, 7, 8, 9, 10, 11, 12]]),
    "a shard without targets": _batch([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]], targets=3),
    "documents of 4 and 3": _batch([[5, 6, 7, 8], [9, 10, 11]]),
}


def _once(engine: UpdateEngine, batch: UpdateBatch) -> tuple[float, float, int]:
    engine.forward_backward(batch)
    own = int((engine.context.part(batch.microbatches[0].labels) >= 0).sum()) if engine.context else -1
    result = engine.step()
    return result.loss, result.grad_norm, own


def _resumed(directory: str, kind: str) -> dict[str, Any]:
    """Weights after 3 updates, of a run saved and loaded after 2 of them, and the same file read without cp."""
    engine = make_engine(cp_run(kind=kind))

    def state_of(engine: UpdateEngine) -> dict[str, Tensor]:
        return state.model_state(engine.module) | state.optimizer_state(engine.optimizer, list(engine.params))

    def loaded(run: Loaded, path: Path) -> UpdateEngine:
        torch.manual_seed(9)
        fresh = make_engine(run)
        names = {local.name for local in fresh.params}
        state.materialise_optimizer_state(fresh.optimizer, list(fresh.params), names)
        with torch.no_grad():
            for local in fresh.params:
                local.tensor.fill_(7.0)
        load(SharedCheckpoint(path), state_of(fresh))
        return fresh

    for update in range(2):
        engine.forward_backward(batches_for(engine, update, length=LENGTH))
        engine.step()
    manifest = Manifest(2, 0, "", "", 2, kind, torch.__version__)
    path = save(Path(directory) / kind, state_of(engine), manifest, "", None)
    saved, moments = whole_weights(engine), whole_moments(engine)
    engines = [engine, loaded(cp_run(kind=kind), path)]
    without = loaded(run_file(LLAMA, parallelism__data_parallel="zero3"), path)
    for each in engines:
        each.forward_backward(batches_for(each, 2, length=LENGTH))
        each.step()
    return {
        "went on": whole_weights(engines[0]),
        "resumed": whole_weights(engines[1]),
        "saved": (saved, moments),
        "without cp": (whole_weights(without), whole_moments(without)),
    }


TRAFFIC_CASES: dict[str, Loaded] = {
    f"{model} {attention} {mode}": cp_run(
        LLAMA if model == "llama" else GPT2,
        "ddp",
        attention,
        memory__activation_checkpointing=mode,
        training__per_device_train_batch_size=2,
    )
    for model, modes in (("llama", ("none", "full", "selective")), ("gpt2", ("none",)))
    for attention in ATTENTIONS
    for mode in modes
}
BF16 = {
    f"precision__{name}_dtype": dtype for name, dtype in (("param", "bf16"), ("reduce", "fp32"), ("master", "fp32"))
}
TRAFFIC_CASES |= {f"bf16 {attention} none": cp_run(LLAMA, "ddp", attention, **BF16) for attention in ATTENTIONS}


def _recorded(run: Loaded) -> tuple[Counter[tuple[str, int]], int]:
    """How often this rank called each exchange on the context-parallel group in one update, by whole bytes of a call.

    And the number of parameters: with one data rank, gradients are reduced on the same group.
    """
    engine = make_engine(run)
    group = engine.mesh["cp"].get_group()
    batch = batches_for(engine, 0, length=LENGTH)
    engine.forward_backward(batch)  # ddp's ranks agree once on the order of gradients
    engine.zero_grad()
    seen: Counter[tuple[str, int]] = Counter()
    names = [n for n in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_single",
                         "reduce_scatter_tensor", "all_reduce", "all_gather", "broadcast") if hasattr(dist, n)]  # fmt: skip
    before = {name: getattr(dist, name) for name in [*names, "batch_isend_irecv"]}
    depth = 0

    def recording(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if kwargs.get("group") is group and not depth:
                seen[name, args[0].numel() * args[0].element_size()] += 1
            depth += 1  # one function of torch.distributed may be another's alias
            try:
                return before[name](*args, **kwargs)
            finally:
                depth -= 1

        return call

    def batched(operations: list[Any]) -> Any:
        for op in operations:
            if op.group is group and op.op is dist.isend:
                seen["send", op.tensor.numel() * op.tensor.element_size()] += 1
        return before["batch_isend_irecv"](operations)

    try:
        for name in names:
            setattr(dist, name, recording(name))
        dist.batch_isend_irecv = batched
        engine.forward_backward(batch)
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return seen, sum(p.numel() for p in engine.module.parameters())


def _facts(directory: str) -> dict[str, Any]:
    engine = make_engine(cp_run(kind="ddp", training__max_grad_norm=None))
    facts: dict[str, Any] = {
        "start": whole_weights(engine),
        "evaluation": engine.evaluate([batches_for(engine, 0, length=LENGTH)]),
        "attention": {name: _attention(*case) for name, case in ATTENTION_CASES.items()},
        "resumed": {kind: _resumed(directory, kind) for kind in ("ddp", "zero3")},
        "traffic": {name: _recorded(run) for name, run in TRAFFIC_CASES.items()},
    }
    facts["batches"] = {
        name: _once(make_engine(cp_run(kind=kind, attention=attention)), batch)
        for name, batch in BATCHES.items()
        for kind, attention in (("zero3", "all_gather"),)
    }
    for attention in ATTENTIONS:
        facts[f"bf16 {attention}"] = trained(cp_run(kind="zero3", attention=attention, **BF16), 1, length=LENGTH)
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_facts, 2, str(tmp_path_factory.mktemp("saved")))


def _full_attention(width: int, window: int, documents: PackedRows | None) -> list[Tensor]:
    """Output and gradients of attention over whole rows, written out."""
    q, k, v, grad = (t.requires_grad_() for t in _whole_inputs(width))
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 0.4
    at = torch.arange(LENGTH)
    seen = (at[:, None] >= at) & (at[:, None] - at < window)
    if documents is not None:
        numbers = documents.documents
        seen = (seen & (numbers[:, :, None] == numbers[:, None, :])).unsqueeze(1)
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    out.backward(grad.detach())
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_is_that_of_whole_rows(name: str, facts: list[dict[str, Any]]) -> None:
    """A96: outputs and gradients put back in order equal those without cp, balanced or not. A20: documents stay apart."""
    _, balanced, width, options = ATTENTION_CASES[name]
    whole = _full_attention(width, options.get("sliding_window", LENGTH), options.get("documents"))
    order = [t for r in range(2) for own in chunks(LENGTH, 2, r, balanced) for t in own]
    for kind, right in enumerate(whole):
        found = torch.cat([rank["attention"][name][kind] for rank in facts], 2)
        put_back = torch.empty_like(found)
        put_back[:, :, order] = found
        bound = tolerance.mixed(LENGTH, LENGTH, right.shape[-1]) * float(right.abs().max())
        assert torch.allclose(put_back, right, rtol=0, atol=bound), ("output", "q", "k", "v")[kind]


def _loss_and_norm(start: dict[str, Tensor], batch: UpdateBatch) -> tuple[float, float]:
    model = plain_model(run_file(LLAMA))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    own = batch.microbatches[0]
    logits = model(own.input_ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), own.labels.flatten(), reduction="sum") / batch.target_tokens
    loss.backward()
    squares = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
    return loss.item(), squares.sum().sqrt().item()


@pytest.mark.parametrize(
    ("name", "targets", "on_ranks"),
    [
        ("seven targets", 7, (3, 4)),
        ("a shard without targets", 3, (3, 0)),
        ("documents of 4 and 3", 5, (5, 0)),
    ],
)
def test_targets_count_once(name: str, targets: int, on_ranks: tuple[int, int], facts: list[dict[str, Any]]) -> None:
    """A04: the denominator is 7, not 14, 3 or 4. A21: 3 + 2 = 5 targets stay. A shard without any gives loss 0, not nan."""
    batch = BATCHES[name]
    assert batch.target_tokens == targets
    loss, norm = _loss_and_norm(facts[0]["start"], batch)
    rounding = tolerance.of_model(facts[0]["start"], targets)
    for rank, own in enumerate(on_ranks):
        found = facts[rank]["batches"][name]
        assert found[2] == own
        assert found[:2] == pytest.approx((loss, norm), rel=rounding)


def test_evaluation(facts: list[dict[str, Any]]) -> None:
    """A04 without gradients: the loss per target of one process."""
    right = reference(run_file(LLAMA), facts[0]["start"], updates=1, length=LENGTH).results[0]
    for rank in facts:
        loss, targets = rank["evaluation"]
        assert targets == right.target_tokens
        assert loss == pytest.approx(right.loss, rel=tolerance.of_model(facts[0]["start"], targets))


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_checkpoints(kind: str, facts: list[dict[str, Any]]) -> None:
    """A resumed run has the bits of one that went on; a run without cp reads the same file."""
    found = facts[0]["resumed"][kind]
    assert found["went on"].keys() == found["resumed"].keys()
    assert all(torch.equal(value, found["resumed"][name]) for name, value in found["went on"].items())
    (weights, moments), (others, other_moments) = found["saved"], found["without cp"]
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    for name, entries in moments.items():
        assert all(torch.equal(value, other_moments[name][key]) for key, value in entries.items())


@pytest.mark.parametrize("name", TRAFFIC_CASES)
def test_traffic_is_what_was_predicted(name: str, facts: list[dict[str, Any]]) -> None:
    """Calls and bytes on the context-parallel group equal layout/traffic.py, on every rank."""
    run = TRAFFIC_CASES[name].run
    rows = run.training.per_device_train_batch_size
    blocks, kv_width = (2, 32) if name.startswith("gpt2") else (3, 2 * 8)
    predicted = context_traffic(
        run.parallelism.cp_attention or "",
        cp=2,
        blocks=blocks,
        microbatches=8 // rows,
        rows=rows,
        length=LENGTH,
        kv_width=kv_width,
        width_bytes=2 if name.startswith("bf16") else 8,
        recomputes=int(run.memory.activation_checkpointing != "none"),
    )
    kinds = {"all_gather_single": "all-gather", "all_gather_into_tensor": "all-gather",
             "all_to_all_single": "all-to-all", "send": "send"}  # fmt: skip
    wanted: Counter[tuple[str, int]] = Counter()
    for one in predicted:
        wanted[one.collective, one.payload_bytes] += one.count
    for rank in facts:
        seen, parameters = rank["traffic"][name]
        recorded: Counter[tuple[str, int]] = Counter()
        reduced = 0
        for (kind, size), count in seen.items():
            if kind == "all_reduce":
                reduced += size * count
            else:
                recorded[kinds[kind], size] += count
        assert recorded == wanted
        assert reduced == parameters * (4 if name.startswith("bf16") else 8), "ddp reduces each gradient once"


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bf16(attention: str, facts: list[dict[str, Any]]) -> None:
    """Gradients in bf16 compute differ from float64 by bf16's rounding, no more than a run on one rank would."""
    found: Outcome = facts[0][f"bf16 {attention}"]
    exact = reference(run_file(LLAMA), found.start, updates=1, length=LENGTH)
    rounding = tolerance.of_blocks(SMALL[LLAMA]["num_hidden_layers"], torch.bfloat16)
    assert found.losses[0] == pytest.approx(exact.losses[0], rel=rounding)
    for name, value in exact.gradients[0].items():
        error = (found.gradients[0][name].double() - value).norm() / value.norm()
        assert tolerance.of_blocks(SMALL[LLAMA]["num_hidden_layers"], torch.float32) < error < rounding, (
            name,
            float(error),
        )
    assert worst(found.gradients[0], facts[0]["bf16 all_gather"].gradients[0])[0] < rounding

"""What the engine's tests share: run files, batches, one run of the engine on this rank, and a plain torch reference.

G rows of an update, B rows of a microbatch, D data ranks, T positions. The reference is a loop over torch's own parts and
takes from the engine only the first weights.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.ranks import THREADS, run_ranks
from tests.places import EXAMPLES
from torch import Tensor, nn

from shardwright.config.load import Loaded, load_run_file
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.legality import check_run
from shardwright.mesh.shard_geometry import full_tensor
from shardwright.tools.check.gather import whole_on_first_rank
from shardwright.train.decision import UpdateResult
from shardwright.train.update import UpdateEngine

FP64 = {f"precision.{name}_dtype": "fp64" for name in ("param", "reduce", "master")}
LLAMA, GPT2, QWEN3 = (str(EXAMPLES / name) for name in ("tiny", "gpt2-tiny", "qwen3-tiny"))
ODD = "tests.odd_models:odd_model"
SMALL: dict[str, dict[str, int]] = {
    LLAMA: {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 8},
    QWEN3: {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8},
    GPT2: {"n_embd": 32, "n_layer": 2},
}
"""Sizes that replace those of the example. The vocabulary of 257 is divided by no number of ranks."""
T, ROWS, UPDATES = 10, 8, 3


def run_file(model: str = LLAMA, **overrides: Any) -> Loaded:
    """A run file for `model` from nothing but overrides; `__` in a key stands for the dot."""
    values: dict[str, Any] = {
        "model.model_name_or_path": model,
        "model.init": "random",
        "data.train": ["-"],
        "training.max_steps": UPDATES,
        "training.global_batch_size": ROWS,
        "training.learning_rate": 0.01,
        "training.weight_decay": 0.1,
        "training.max_grad_norm": 0.1,
        "checkpoint.export_hf": "none",
        **FP64,
    }
    if model in SMALL:
        values["model.config_overrides"] = SMALL[model]
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_run_file(None, {key: value for key, value in values.items() if value is not ...})


def rows_of(update: int, vocab: int = 31, rows: int = ROWS, seed: int = 5, length: int = T) -> list[Tensor]:
    """Token rows of one update, of 2 to `length` + 1 tokens; the first row alone holds the mark 4, the even ones the mark 3."""
    g = torch.Generator().manual_seed(1000 * seed + update)
    result = []
    for row in range(rows):
        tokens = 2 + int(torch.randint(0, length, (), generator=g))
        ids = torch.randint(5, vocab, (tokens,), generator=g)
        ids[0] = 4 if row == 0 else 3 if row % 2 == 0 else 5
        result.append(ids)
    return result


def batch_of(update: int, data_rank: int, data_ranks: int, microbatch_rows: int = 1, **rows: Any) -> UpdateBatch:
    """This data rank's part of `rows_of(update)`, as the loader cuts it."""
    tokens, length = rows_of(update, **rows), rows.get("length", T)
    ids = torch.zeros(len(tokens), length, dtype=torch.long)
    labels = torch.full((len(tokens), length), -100)
    for row, text in enumerate(tokens):
        ids[row, : len(text) - 1], labels[row, : len(text) - 1] = text[:-1], text[1:]
    count = len(tokens) // microbatch_rows
    microbatches = tuple(
        Microbatch(
            index,
            ids[index * microbatch_rows : (index + 1) * microbatch_rows],
            labels[index * microbatch_rows : (index + 1) * microbatch_rows],
            tuple(range(index * microbatch_rows, (index + 1) * microbatch_rows)),
        )
        for index in range(data_rank, count, data_ranks)
    )
    targets = sum(len(text) - 1 for text in tokens)
    return UpdateBatch(update, microbatches, targets, targets, ids.numel(), tuple(range(len(tokens))))


@dataclass
class Apart:
    """How far another right run may lie from this one: losses and gradients by update, relative (to the largest entry)."""

    losses: list[float]
    gradients: list[float]
    weights: dict[str, float]
    moments: dict[str, dict[str, float]]


@dataclass
class Outcome:
    """Whole tensors by name: first weights, gradients of each update before clipping, weights and moments at the end."""

    start: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    results: list[UpdateResult] = field(default_factory=list)
    disagreement: str = ""
    apart: Apart | None = None

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]


def make_engine(loaded: Loaded, updates: int | None = None) -> UpdateEngine:
    """The engine of a run on the ranks that are there."""
    axes = check_run(loaded, dist.get_world_size())
    return UpdateEngine(loaded.run, axes, torch.device("cpu"), updates or loaded.run.training.max_steps or UPDATES)


def batches_for(engine: UpdateEngine, update: int, **rows: Any) -> UpdateBatch:
    """This rank's part of an update."""
    size = engine.run.training.per_device_train_batch_size
    return batch_of(update, engine.axes.data_rank(engine.rank), engine.axes.data_ranks, size, **rows)


def whole_weights(engine: UpdateEngine) -> dict[str, Tensor]:
    """Every parameter, frozen ones too, unsplit."""
    return {name: full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}


def whole_gradients(engine: UpdateEngine) -> dict[str, Tensor]:
    """Every gradient that there is, unsplit."""
    return {local.name: full_tensor(local.wrap(g)).clone() for local, g in engine.gradients()}


def moment_parts(engine: UpdateEngine) -> dict[tuple[str, str], Tensor]:
    """Every tensor of the optimizer's state, by parameter and kind, as this rank holds it."""
    found: dict[tuple[str, str], Tensor] = {}
    for local in engine.params:
        for key, value in engine.optimizer.state.get(local.tensor, {}).items():
            if isinstance(value, Tensor):
                same = value.dim() and value.shape == local.tensor.shape
                found[local.name, key] = local.wrap(value) if same else value
    return found


def by_name(moments: dict[tuple[str, str], Tensor]) -> dict[str, dict[str, Tensor]]:
    """Moments by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for (name, key), value in moments.items():
        found.setdefault(name, {})[key] = value
    return found


def whole_moments(engine: UpdateEngine) -> dict[str, dict[str, Tensor]]:
    """Every tensor of the optimizer's state, unsplit."""
    return by_name({key: full_tensor(part).clone() for key, part in moment_parts(engine).items()})


def gathered_moments(engine: UpdateEngine) -> dict[str, dict[str, Tensor]]:
    """`whole_moments` on rank 0, nothing on others."""
    found = whole_on_first_rank({" ".join(key): part for key, part in moment_parts(engine).items()})
    return by_name({(key.split(" ")[0], key.split(" ")[1]): value for key, value in found.items()})


def trained(loaded: Loaded, updates: int = UPDATES, first_only: bool = False, **rows: Any) -> Outcome:
    """What the engine makes of the first updates; first_only: gradients and moments on rank 0 alone, which is faster."""
    torch.manual_seed(dist.get_rank())  # A36: first weights must not follow the ranks' own generators
    engine = make_engine(loaded)
    outcome = Outcome(start=whole_weights(engine))
    for update in range(updates):
        engine.forward_backward(batches_for(engine, update, **rows))
        parts = {local.name: local.wrap(g) for local, g in engine.gradients()} if first_only else {}
        outcome.gradients.append(whole_on_first_rank(parts) if first_only else whole_gradients(engine))
        outcome.results.append(engine.step())
    outcome.weights = whole_weights(engine)
    outcome.moments = gathered_moments(engine) if first_only else whole_moments(engine)
    return outcome


def all_trained(cases: dict[str, Loaded], **rows: Any) -> dict[str, Outcome]:
    """`trained` for every case, in one start of the ranks; ranks other than 0 give weights and results only."""
    found = {}
    for name, loaded in cases.items():
        try:
            outcome = trained(loaded, first_only=True, **rows)
        except Exception as error:
            raise AssertionError(f"case {name}") from error
        first = dist.get_rank() == 0
        found[name] = outcome if first else Outcome(weights=outcome.weights, results=outcome.results)
    return found


def on_ranks(world_size: int, cases: dict[str, Loaded], **rows: Any) -> dict[str, Outcome]:
    """`all_trained` on gloo ranks; `disagreement` says where ranks end with other bits or results."""
    first, *others = run_ranks(partial(all_trained, **rows), world_size, cases)
    for rank, other in enumerate(others, 1):
        for name, outcome in other.items():
            parts = [p for p, value in outcome.weights.items() if not torch.equal(value, first[name].weights[p])]
            if parts or outcome.results != first[name].results:
                first[name].disagreement = f"rank {rank} differs from rank 0: {parts or outcome.results}"
    return first


def plain_model(loaded: Loaded, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model as its users build it, on the CPU."""
    spec = loaded.run.model
    if ":" in spec.model_name_or_path:
        module, _, name = spec.model_name_or_path.partition(":")
        return getattr(importlib.import_module(module), name)(**spec.kwargs).to(dtype)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(spec.model_name_or_path, **spec.config_overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if config.model_type == "mixtral":
        model.set_experts_implementation("eager")  # the only one in float64
    return model


def parameter_groups(named: dict[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """For a torch optimizer: matrices decay; norms, biases and other vectors do not."""
    bare = {n for n, p in named.items() if p.dim() < 2 or "norm" in n or "ln_" in n or n.endswith("bias")}
    return [
        {"params": [p for n, p in named.items() if n not in bare], "weight_decay": decay},
        {"params": [p for n, p in named.items() if n in bare], "weight_decay": 0.0},
    ]


def stepped(
    outcome: Outcome,
    named: dict[str, nn.Parameter],
    stepper: torch.optim.Optimizer,
    t: Any,
    loss: float,
    targets: int,
    disturb: torch.Generator | None,
    updates: int,
) -> None:
    """Ends an update of an oracle: keeps its gradients and results, clips, steps at the rate of this update, clears."""
    update = len(outcome.results)
    for p in named.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    outcome.gradients.append({name: p.grad.clone() for name, p in named.items()})  # type: ignore[union-attr]
    if disturb is not None:
        for p in named.values():
            p.grad = tolerance.disturbed(p.grad, disturb)  # type: ignore[arg-type]
    limit, rate = t.max_grad_norm or float("inf"), t.learning_rate * (1 - update / (t.max_steps or updates))
    norm = nn.utils.clip_grad_norm_(named.values(), limit).item()
    for group in stepper.param_groups:
        group["lr"] = rate
    stepper.step()
    stepper.zero_grad()
    outcome.results.append(UpdateResult(update, loss, norm, min(1.0, limit / norm), rate, targets, False, 0))


def reference(loaded: Loaded, start: dict[str, Tensor], optimizer: Any = None, **rows: Any) -> Outcome:
    """The same updates in one process with torch's own parts, from the weights `start`, and how far others may lie apart.

    optimizer: from [{params, weight_decay}] and lr to a torch optimizer; AdamW unless given. A parameter that an update
    does not use has a gradient of zero. rows: what `rows_of` takes, and `updates`.
    """
    right, other = (_followed(loaded, start, optimizer, disturb, **rows) for disturb in (False, True))
    return with_bounds(right, other)


def _followed(
    loaded: Loaded,
    start: dict[str, Tensor],
    optimizer: Any,
    disturb: bool,
    updates: int = UPDATES,
    **rows: Any,
) -> Outcome:
    torch.set_num_threads(THREADS)
    model, t = plain_model(loaded), loaded.run.training
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    named = dict(model.named_parameters())
    stepper = (optimizer or torch.optim.AdamW)(parameter_groups(named, t.weight_decay), lr=t.learning_rate)
    outcome, generator = Outcome(start=copy.deepcopy(start)), torch.Generator().manual_seed(1)
    size = t.per_device_train_batch_size
    for update in range(updates):
        tokens = rows_of(update, **rows)
        targets = sum(len(text) - 1 for text in tokens)
        total = 0.0
        for first in range(0, len(tokens), size):
            texts = tokens[first : first + size]
            ids = torch.zeros(size, rows.get("length", T), dtype=torch.long)
            for row, text in enumerate(texts):
                ids[row, : len(text) - 1] = text[:-1]
            found = model(ids)
            logits = found if isinstance(found, Tensor) else found.logits
            losses = [
                nn.functional.cross_entropy(logits[row, : len(text) - 1], text[1:], reduction="sum")
                for row, text in enumerate(texts)
            ]
            loss = torch.stack(losses).sum() / targets
            loss.backward()
            total += loss.item()
        stepped(outcome, named, stepper, t, total, targets, generator if disturb else None, updates)
    outcome.weights = {name: p.detach() for name, p in named.items()}
    outcome.moments = {
        name: {key: value for key, value in stepper.state[p].items() if isinstance(value, Tensor)}
        for name, p in named.items()
    }
    return outcome


def worst(found: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to the right tensor's largest value, and where; names must be the same."""
    assert found.keys() == right.keys(), sorted(found.keys() ^ right.keys())
    differences = []
    for name, value in right.items():
        wide = value.double()
        distance = (found[name].double() - wide).abs().max() / wide.abs().max().clamp(min=1e-9)
        differences.append((float(distance), name))
    return max(differences, default=(0.0, "both are empty"))


def with_bounds(right: Outcome, other: Outcome) -> Outcome:
    """`right`, with what came of the disturbed gradients of `other` scaled down to rounding's size as its bounds."""
    tokens = max(result.target_tokens for result in right.results)
    first = tolerance.of_model(right.start, tokens)
    scale, steps = first / tolerance.DISTURBANCE, tolerance.mixed(len(right.results))

    def bound(values: Tensor, others: Tensor) -> float:
        wide = values.double()
        return float(scale * (others.double() - wide).abs().max() + steps * wide.abs().max())

    pairs = zip(right.gradients, other.gradients)
    right.apart = Apart(
        [first * (1 + abs(b / a - 1) / tolerance.DISTURBANCE) for a, b in zip(right.losses, other.losses)],
        [first + scale * worst(theirs, ours)[0] for ours, theirs in pairs],
        {name: bound(value, other.weights[name]) for name, value in right.weights.items()},
        {
            name: {entry: bound(value, other.moments[name][entry]) for entry, value in entries.items()}
            for name, entries in right.moments.items()
        },
    )
    assert max(right.apart.losses) <= tolerance.LATER * first and max(right.apart.gradients) <= tolerance.GROWTH * first
    assert worst(other.weights, right.weights)[0] * scale <= tolerance.GROWTH * first
    return right


def assert_same_training(found: Outcome, right: Outcome) -> None:
    """Losses, norms, gradients before clipping, weights and moments agree within the bounds of `right`."""
    assert not found.disagreement, found.disagreement
    assert right.apart is not None, "the oracle has no bounds: with_bounds gives them"
    for update, (ours, theirs) in enumerate(zip(found.results, right.results)):
        assert ours.target_tokens == theirs.target_tokens
        bound = right.apart.gradients[update]
        for name, relative in (
            ("loss", right.apart.losses[update]), ("grad_norm", bound), ("learning_rate", tolerance.few(4))
        ):  # fmt: skip
            a, b = getattr(ours, name), getattr(theirs, name)
            assert abs(a - b) <= relative * abs(b), (update, name, a, b)
        added = 1e-6 / theirs.grad_norm  # torch adds this to the norm that it divides by
        assert abs(ours.clip_coefficient - theirs.clip_coefficient) <= added + bound
        difference, name = worst(found.gradients[update], right.gradients[update])
        assert difference <= bound, f"gradient of {name} in update {update}: {difference} where {bound} is allowed"
    assert found.weights.keys() == right.weights.keys()
    for name, value in right.weights.items():
        _assert_within(right.apart.weights[name], found.weights[name], value, name)
    assert found.moments.keys() == right.moments.keys()
    for name, entries in right.moments.items():
        assert found.moments[name].keys() == entries.keys()
        for entry, value in entries.items():
            _assert_within(right.apart.moments[name][entry], found.moments[name][entry], value, f"{entry} of {name}")


def _assert_within(bound: float, found: Tensor, right: Tensor, name: str) -> None:
    difference = float((found.double() - right.double()).abs().max())
    assert difference <= bound, f"{name}: {difference} where {bound} is allowed"

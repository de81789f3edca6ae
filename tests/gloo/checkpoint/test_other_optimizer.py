"""A run that goes on with another optimizer, other arguments of it, or other frozen parameters, on any layout.

The oracle is torch's own optimizer over whole tensors of one process. It starts from the weights that were saved, and
from the saved moments only where the optimizer keeps them; it is given the whole gradients of the run that goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gloo.engine import LLAMA, batches_for, moment_parts, whole_gradients, whole_weights
from tests.gloo.ranks import run_ranks
from tests.gloo.saved_runs import make_trainer
from torch import Tensor

from shardwright.mesh.shard_geometry import full_tensor
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

SAVED, UPDATES, RATE = 2, 2, 0.01
SGD, MOMENTUM = {"optimizer": "sgd"}, {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}}
ADAMW, AMSGRAD = {"optimizer": "adamw"}, {"optimizer": "adamw", "optimizer_kwargs": {"amsgrad": True}}
MUON, NADAM = {"optimizer": "muon"}, {"optimizer": "torch.optim:NAdam"}
ADAM_STATE = {"exp_avg", "exp_avg_sq", "step"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp"}, "zero1": {"data_parallel": "zero1"}, "zero3": {"data_parallel": "zero3"},
    "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2},
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "sgd to adamw": (SGD, "zero3", ADAMW, "zero3"),
    "momentum to adamw": (MOMENTUM, "ddp", ADAMW, "tp2"),
    "adamw to sgd": (ADAMW, "tp2", SGD, "zero1"),
    "amsgrad added": (ADAMW, "zero3", AMSGRAD, "pp2"),
    "amsgrad removed": (AMSGRAD, "pp2", ADAMW, "zero3"),
    "momentum added": (SGD, "zero1", MOMENTUM, "zero3"),
    "momentum removed": (MOMENTUM, "zero3", SGD, "ddp"),
    "muon to adamw": (MUON, "zero3", ADAMW, "pp2"),
    "adamw to muon": (ADAMW, "pp2", MUON, "tp2"),
    "muon to momentum": (MUON, "zero3", MOMENTUM, "zero3"),
    "adamw to nadam": (ADAMW, "ddp", NADAM, "zero3"),
    "unfrozen": ({**ADAMW, "freeze": ["*embed*", "*norm*"]}, "zero3", ADAMW, "ddp"),
    "frozen": (ADAMW, "zero3", {**ADAMW, "freeze": ["*embed*", "*norm*"]}, "tp2"),
}
KEPT = {
    "amsgrad added": ADAM_STATE,
    "amsgrad removed": ADAM_STATE,
    "unfrozen": ADAM_STATE,
    "frozen": ADAM_STATE,
}
"""Entries that the oracle begins with."""


def _trainer(directory: Path, settings: dict[str, Any], layout: str, **options: Any) -> tuple[Trainer, Any]:
    values = {f"training__{key}": value for key, value in settings.items() if key != "freeze"}
    values |= {f"parallelism__{key}": value for key, value in LAYOUTS[layout].items()}
    values |= {"model__freeze": settings["freeze"]} if "freeze" in settings else {}
    more = {
        "training__max_grad_norm": None,
        "training__weight_decay": 0.0,
        "training__max_steps": SAVED + UPDATES,
    }
    more |= {"training__lr_scheduler_type": "constant", "training__learning_rate": RATE}
    return make_trainer(directory, LLAMA, **more, **values, **options)


def _update(trainer: Trainer) -> dict[str, Tensor]:
    """Makes one update; returns its whole gradients, by name, those of all stages."""
    trainer.engine.forward_backward(batches_for(trainer.engine, trainer.at.update))
    gradients = _of_all(whole_gradients(trainer.engine))
    trainer.engine.step()
    trainer.at.update += 1
    return gradients


def _of_all(own: dict[str, Any]) -> dict[str, Any]:
    """What the ranks hold together."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: value for part in reversed(everyone) for name, value in part.items()}


def _moments(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    found = {key: full_tensor(part).clone() for key, part in moment_parts(trainer.engine).items()}
    return _of_all(found)


def _went_on(directory: Path, case: str) -> dict[str, Any]:
    before, first, after, second = CASES[case]
    trainer, _ = _trainer(directory / case, before, first)
    for _ in range(SAVED):
        _update(trainer)
    path = trainer.save()
    saved = {"weights": _of_all(whole_weights(trainer.engine)), "moments": _moments(trainer)}
    changes = ["training.optimizer", "training.optimizer_kwargs", "model.freeze"]
    trainer, screen = _trainer(directory / case, after, second, checkpoint__accept_changes=changes)
    assert trainer.resume() == path
    gradients = [_update(trainer) for _ in range(UPDATES)]
    index = json.loads((trainer.save() / "tensors" / "index.json").read_text())
    entries = {key for part in ("tensors", "numbers") for key in index[part] if key.startswith("optimizer.")}
    found = {"gradients": gradients, "weights": _of_all(whole_weights(trainer.engine)), "entries": entries}
    return {"saved": saved, **found, "lines": screen.getvalue().splitlines()} if dist.get_rank() == 0 else {}


def _all(directory: Path) -> dict[str, Any]:
    return {case: _went_on(directory, case) for case in CASES}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(_all, 2, tmp_path_factory.mktemp("other"), timeout=170.0)[0]


def _oracle(case: str, found: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that torch's own optimizer makes of what was saved."""
    settings = CASES[case][2]
    weights = {name: value.clone().requires_grad_() for name, value in found["saved"]["weights"].items()}
    make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(settings["optimizer"], torch.optim.NAdam)
    options = {"weight_decay": 0.0, **settings.get("optimizer_kwargs", {})}
    trained = {name: weights[name] for name in found["gradients"][0]}
    optimizer = make(list(trained.values()), lr=RATE, **options)
    for name, tensor in trained.items() if case in KEPT else ():
        kept = {
            e: found["saved"]["moments"][name, e].clone() for e in KEPT[case] if (name, e) in found["saved"]["moments"]
        }
        if kept and settings.get("optimizer_kwargs"):
            kept["max_exp_avg_sq"] = torch.zeros_like(tensor)
        optimizer.state[tensor] = kept
    for gradients in found["gradients"]:
        for name, tensor in trained.items():
            tensor.grad = gradients[name]
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case != "adamw to muon"])
def test_weights_are_those_of_torchs_own_optimizer(case: str, facts: dict[str, Any]) -> None:
    """A step is at most 32 roundings, of a weight or of a change that is at most about the weight."""
    found = facts[case]
    right, eps = _oracle(case, found), torch.finfo(torch.float64).eps
    for name, value in right.items():
        largest = max(value.abs().max().item(), RATE)
        assert (found["weights"][name] - value).abs().max().item() <= UPDATES * 32 * eps * largest, name


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_next_is_what_this_optimizer_keeps(case: str, facts: dict[str, Any]) -> None:
    found, settings = facts[case]["entries"], CASES[case][2]
    by_name: dict[str, set[str]] = {}
    for key in found:
        name, _, entry = key.removeprefix("optimizer.").rpartition(".")
        by_name.setdefault(name, set()).add(entry)
    right = {
        "adamw": ADAM_STATE | ({"max_exp_avg_sq"} if settings.get("optimizer_kwargs") else set()),
        "sgd": {"momentum_buffer"} if settings.get("optimizer_kwargs") else set(),
        "torch.optim:NAdam": ADAM_STATE | {"mu_product"},
    }
    if settings["optimizer"] == "muon":
        assert by_name["model.layers.0.mlp.up_proj.weight"] == {"momentum_buffer"}
        assert by_name["model.embed_tokens.weight"] == by_name["model.norm.weight"] == ADAM_STATE
    else:
        assert set(map(frozenset, by_name.values())) <= {frozenset(right[settings["optimizer"]])}
        trained = facts[case]["gradients"][0].keys()
        assert by_name.keys() == (trained if right[settings["optimizer"]] else set())


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("sgd to adamw", ["starts fresh: exp_avg, exp_avg_sq, step of 30 parameters."]),
        ("adamw to sgd", ["checkpoint-2 that this run drops: exp_avg, exp_avg_sq, step of 30 parameters."]),
        ("amsgrad added", ["starts fresh: max_exp_avg_sq of 30 parameters."]),
        ("momentum removed", ["drops: momentum_buffer of 30 parameters."]),
        ("muon to momentum", ["drops: ", "starts fresh: momentum_buffer of 30 parameters."]),
        ("unfrozen", ["starts fresh: exp_avg, exp_avg_sq, step of 8 parameters."]),
        ("frozen", ["drops: exp_avg, exp_avg_sq, step of 8 parameters."]),
    ],
)  # fmt: skip
def test_what_is_dropped_or_fresh_is_said(case: str, lines: list[str], facts: dict[str, Any]) -> None:
    said = [line for line in facts[case]["lines"] if line.startswith("Optimizer state")]
    assert len(said) == len(lines) and all(part in line for part, line in zip(lines, said)), said

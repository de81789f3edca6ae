"""What comes back from a checkpoint, and from a damaged one: two ranks, the loop of `train`.

Covers A54, A60, A61, A62 and A73 of the known faults.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.checkpoints import flip
from tests.gloo.checkpoint.test_state_goes_on import Flag, _differences, _message, _shared, _whole
from tests.gloo.engine import LLAMA, ODD, ROWS, T, batches_for, whole_weights
from tests.gloo.ranks import run_ranks
from tests.gloo.saved_runs import make_trainer, names, status_bytes, train
from tests.odd_models import OddModel
from torch import Tensor, nn

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def _damaged(directory: Path) -> dict[str, Any]:
    """A byte of each kind of file of the newest checkpoint flips, one after the other; then of the others too."""
    first, _ = make_trainer(directory / "damaged")
    train(first)
    found: dict[str, Any] = {}
    newest = directory / "damaged" / "checkpoint-6"
    for name in ("manifest.json", "config.yaml", "tensors/index.json", "tensors/rank-00001.safetensors"):
        _shared(lambda file=newest / name: flip(file, 200))
        trainer, screen = make_trainer(directory / "damaged")
        path = trainer.resume()
        found[name] = (path.name if path else "", trainer.at.update, screen.getvalue())
        dist.barrier()
        _shared(lambda file=newest / name: flip(file, 200))
    for update in (2, 4, 6):
        place = directory / "damaged" / f"checkpoint-{update}" / "tensors" / "rank-00000.safetensors"
        _shared(lambda file=place: flip(file, -1))
    trainer, _ = make_trainer(directory / "damaged")
    found["all"] = _message(trainer)
    named, _ = make_trainer(directory / "other", checkpoint__resume=str(newest))
    found["named"] = _message(named)
    return found


class Grouped(torch.optim.Optimizer):
    """SGD with a step size that it estimates for the whole group, as schedule-free and D-adapting optimizers do."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, d: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "d": d, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1 + 1 / group["k"]
            group["seen"] = group["k"] * 0.1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone())
                    p.add_(p.grad, alpha=-group["d"])


class Drawing(OddModel):
    """Draws from python's, NumPy's and torch's generators in forward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        factor = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return super().forward(input_ids) * factor


def drawing_model() -> nn.Module:
    return Drawing()


def _resumed(directory: Path, model: str = ODD, other: str = "zero3", **options: Any) -> dict[str, Any]:
    first, _ = make_trainer(directory, model, **options)
    train(first)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    second, _ = make_trainer(
        directory.with_name(f"{directory.name} again"), model, **options, parallelism__data_parallel=other,
        checkpoint__resume=str(directory / "checkpoint-4"),
    )  # fmt: skip
    second.resume()
    groups = [{k: v for k, v in g.items() if k in ("d", "k", "seen")} for g in second.engine.optimizer.param_groups]
    second.train(Flag(second.engine))  # type: ignore[arg-type]
    found, right = _whole(second), _whole(first)
    return {
        "differences": _differences(found, right),
        "gap": max((found[name] - value).abs().max().item() for name, value in right.items()),
        "bound": tolerance.of_model(right, ROWS * T) * max(float(value.abs().max()) for value in right.values()),
        "groups": groups,
    }


def _best(directory: Path) -> dict[str, Any]:
    losses = iter((5.0, 3.0, 4.0, 3.5, 3.0, 6.0))
    options: dict[str, Any] = {
        "data__validation": ["-"], "training__eval_steps": 1, "checkpoint__keep_best": True,
        "checkpoint__save_total_limit": 1, "checkpoint__save_steps": 1,
    }  # fmt: skip
    trainer, _ = make_trainer(directory / "best", **options)
    trainer.engine.evaluate = lambda batches: (next(losses), 1)  # type: ignore[method-assign]
    train(trainer)
    again, _ = make_trainer(directory / "best", **options)
    again.resume()
    return {
        "names": names(directory / "best"),
        "link": (directory / "best" / "best").resolve().name,
        "best": (again.at.best, again.at.eval_loss),
    }


def _settings(directory: Path) -> dict[str, Any]:
    trainer, _ = make_trainer(directory / "settings", training__lr_scheduler_type="linear")
    trainer.save()
    at = {"checkpoint__resume": str(directory / "settings" / "checkpoint-0")}
    other = {"training__learning_rate": 0.5, "training__lr_scheduler_type": "cosine", "logging__log_steps": 3}
    accepted = ["training.learning_rate", "training.lr_scheduler_type"]
    refused, _ = make_trainer(directory / "a", **at, **other)
    confirmed, screen = make_trainer(directory / "a", **at, **other, checkpoint__accept_changes=accepted)
    message = _message(confirmed)
    seeded, _ = make_trainer(directory / "a", **at, training__seed=1, checkpoint__accept_changes=["training.seed"])
    return {
        "refused": _message(refused),
        "confirmed": (message, screen.getvalue()),
        "seeded": _message(seeded),
    }


def _partial(directory: Path) -> dict[str, Any]:
    """A model with three blocks and a wider vocabulary reads the checkpoint of one with two."""
    first, _ = make_trainer(directory / "partial")
    for batch in list(first.data.updates_from(0))[:2]:
        first.engine.forward_backward(batch)
        first.engine.step()
    path = first.save()
    wider = {"model__kwargs": {"vocab": 33, "layers": 3}, "checkpoint__accept_changes": ["model.kwargs"]}
    second, screen = make_trainer(
        directory / "b",
        **wider,
        checkpoint__resume=str(path),
        checkpoint__partial=["embed", "head", "blocks.2"],
    )
    start, right = whole_weights(second.engine), whole_weights(first.engine)
    second.resume()
    found = whole_weights(second.engine)
    kept = [name for name in start if name.startswith(("embed", "head", "blocks.2"))]
    strict, _ = make_trainer(directory / "b", **wider, checkpoint__resume=str(path), checkpoint__partial=["embed"])
    state = {local.name for local in second.engine.params if second.engine.optimizer.state.get(local.tensor)}
    second.engine.forward_backward(batches_for(second.engine, 2))
    second.engine.step()
    return {
        "kept": [name for name in kept if not torch.equal(found[name], start[name])],
        "read": [name for name in right if name not in kept and not torch.equal(found[name], right[name])],
        "counts": (len(kept), len(right)),
        "fresh": [name for name in kept if name in state],
        "strict": _message(strict),
        "screen": screen.getvalue(),
    }


def _peak(directory: Path) -> dict[str, int]:
    """Resident bytes that a load adds at most, in a run whose vectors of moments are not there before."""
    model = {"model__config_overrides": {"vocab_size": 30_000, "hidden_size": 256, "num_hidden_layers": 1}}
    narrow = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
    first, _ = make_trainer(directory / "peak", LLAMA, **model, **narrow)
    first.engine.forward_backward(batches_for(first.engine, 0))
    first.engine.step()
    path = first.save()
    share = sum(p.to_local().nbytes for p in first.engine.module.parameters())
    del first
    gc.collect()
    second, _ = make_trainer(directory / "peak", LLAMA, **model, **narrow)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status_bytes("VmRSS")
    second.resume()
    return {
        "added": status_bytes("VmHWM") - before,
        "share": share,
        "at": second.at.update,
        "saved": int(path.exists()),
    }


def _all(directory: Path) -> dict[str, Any]:
    grouped = {"training__optimizer": "tests.gloo.checkpoint.test_loading:Grouped"}
    return {
        "damaged": _damaged(directory),
        "grouped": _resumed(directory / "grouped", **grouped),
        "grouped ddp": _resumed(directory / "grouped ddp", other="ddp", **grouped),
        "drawing": _resumed(directory / "drawing", "tests.gloo.checkpoint.test_loading:drawing_model"),
        "best": _best(directory),
        "settings": _settings(directory),
        "partial": _partial(directory),
        "peak": _peak(directory),
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, tmp_path_factory.mktemp("loading"))


@pytest.mark.parametrize(
    "name", ("manifest.json", "config.yaml", "tensors/index.json", "tensors/rank-00001.safetensors")
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(name: str, facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert rank["damaged"][name][:2] == ("checkpoint-4", 4)
    screen = facts[0]["damaged"][name][2]
    assert "checkpoint-6 is not used" in screen and name in screen and screen.count("not used") == 1


def test_no_good_checkpoint_is_no_fresh_start(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert "holds 3 checkpoint(s), and none of them is good" in rank["damaged"]["all"]
        assert "rank-00000.safetensors is not what was written" in rank["damaged"]["named"]


@pytest.mark.parametrize("case", ("grouped", "grouped ddp", "drawing"))
def test_what_is_not_a_tensor_comes_back_too(case: str, facts: list[dict[str, Any]]) -> None:
    """A54: numbers of groups. A61 A62: draws of every generator, with other generators' states before the resume."""
    for rank in facts:
        assert rank[case]["gap"] <= rank[case]["bound"]
        if case != "grouped ddp":
            assert rank[case]["differences"] == []
        for group in rank[case]["groups"] if case != "drawing" else []:
            assert group == {"k": 4, "seen": 4 * 0.1, "d": pytest.approx(1e-3 * 2 * 1.5 * (4 / 3) * 1.25)}


def test_the_best_one_stays(facts: list[dict[str, Any]]) -> None:
    """The earlier of two equal ones; its value is there after a resume."""
    for rank in facts:
        assert rank["best"]["names"] == ["checkpoint-2", "checkpoint-6"]
        assert rank["best"]["link"] == "checkpoint-2" and rank["best"]["best"] == ((2, 3.0), 6.0)


def test_changed_settings(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        refused = rank["settings"]["refused"]
        assert "training.learning_rate 0.01 -> 0.5; training.lr_scheduler_type 'linear' -> 'cosine'." in refused
        assert "log_steps" not in refused
        assert rank["settings"]["confirmed"][0] == rank["settings"]["seeded"] == ""
    assert "Changed since checkpoint-0: logging.log_steps 1 -> 3; training.l" in facts[0]["settings"]["confirmed"][1]


def test_partial_loads_are_asked_for(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["partial"]
        assert found["kept"] == found["read"] == found["fresh"] == []
        assert found["counts"][0] > 5 and found["counts"][1] > 20
        assert "not in the checkpoint: model.blocks.2" in found["strict"]
        assert "head.weight: stored (31, 6) torch.float64, here (33, 6) torch.float64" in found["strict"]
    assert "Not read from checkpoint-0 (checkpoint.partial): " in facts[0]["partial"]["screen"]


def test_a_load_takes_the_moments_and_one_piece(facts: list[dict[str, Any]]) -> None:
    """A73: each rank reads its share; beside the two moments of it, which stay, nothing but a buffer of a piece."""
    for rank in facts:
        share = rank["peak"]["share"]
        assert share > 30e6 and rank["peak"]["added"] < 2 * share + 24e6

"""Checkpoints: resume to the bit, other kinds and world sizes, what is refused, what is kept.

Covers A52, A54, A55, A60, A63, A64, A65, A67, A69, A70, A71, A72, A102, A103 and A125 of the known faults.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.gloo.engine import LLAMA, ODD, batches_for, make_engine, run_file, whole_moments, whole_weights
from tests.gloo.ranks import run_ranks
from torch import Tensor

from shardwright.checkpoint import resume, saver
from shardwright.checkpoint.directory import complete_checkpoints
from shardwright.checkpoint.manifest import read_index
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

KINDS = ("ddp", "zero1", "zero2", "zero3")
ADAPTED = "tests.odd_models:adapted_model"
DROPOUT = {"model__kwargs": {"dropout": 0.5}}
STEPS = 6
SCHEDULE = {
    "training__max_steps": STEPS,
    "training__warmup_steps": 4,
    "training__lr_scheduler_type": "linear",
}
NOT_TIMED = ("train/", "eval/", "data/target_tokens", "data/padding", "update")


class Order:
    """Epochs as the loop asks for them."""

    def epoch(self, update: int) -> float:
        return update / 8


@dataclass
class Data:
    """Rows of tests/gloo/engine.py as the loop asks for them."""

    engine: Any
    order: Order = field(default_factory=Order)
    fingerprint: str = "rows"
    eval_fingerprint: str = ""

    @property
    def validation(self) -> list[Any]:
        return [batches_for(self.engine, 90)]

    def evaluation(self, device: torch.device, ready: Any) -> list[Any]:
        return self.validation

    @property
    def updates(self) -> int:
        return int(self.engine.updates)

    def resume_rows(self, former: Any) -> list[str]:
        """Any update can be begun with."""
        return []

    def updates_from(self, first: int, device: torch.device | None = None, ready: Any = None) -> Any:
        return (batches_for(self.engine, update) for update in range(first, STEPS))


@dataclass
class Flag:
    """Asks rank `rank` to stop in update `update`."""

    engine: Any
    rank: int = -1
    update: int = -1

    @property
    def requested(self) -> bool:
        batch = self.engine.batch
        return dist.get_rank() == self.rank and batch is not None and batch.update == self.update


def _trainer(directory: Path, model: str = ODD, fingerprint: str = "rows", **options: Any) -> Trainer:
    values = {"checkpoint__output_dir": str(directory), "checkpoint__save_steps": 2, **SCHEDULE, **options}
    loaded = run_file(model, **values)
    engine = make_engine(loaded)
    return Trainer(loaded, engine, Data(engine, fingerprint=fingerprint), Console(quiet=True))  # type: ignore[arg-type]


def _whole(trainer: Trainer) -> dict[str, Tensor]:
    moments = whole_moments(trainer.engine)
    flat = {f"{name}/{entry}": v for name, entries in moments.items() for entry, v in entries.items()}
    return whole_weights(trainer.engine) | flat


def _metrics(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith(NOT_TIMED)} for line in lines]


def _shared(function: Any) -> None:
    """Runs `function` on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        function()
    dist.barrier()


def _differences(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert found.keys() == right.keys(), sorted(found.keys() ^ right.keys())
    return [name for name, value in right.items() if not torch.equal(found[name], value)]


def _interrupt(whole: Path, halves: Path) -> None:
    """Makes `halves` what a crash in update 3 leaves: the checkpoint of 2, later metrics, half a line, half a save."""
    shutil.copytree(whole, halves, symlinks=True)
    for update in (4, 6):
        shutil.rmtree(halves / f"checkpoint-{update}")
    lines = (halves / "metrics.jsonl").read_text().splitlines(keepends=True)
    (halves / "metrics.jsonl").write_text("".join(lines[:3]) + '{"update": 3, "train/lo')
    (halves / "checkpoint-99").mkdir()
    (halves / ".checkpoint-4.incomplete").mkdir()
    (halves / ".checkpoint-4.incomplete" / "rest").write_text("")


def _resume(directory: Path, kind: str, **options: Any) -> dict[str, Any]:
    whole, halves = directory / f"whole {kind}", directory / f"halves {kind}"
    common = {"parallelism__data_parallel": kind, **DROPOUT, **options}
    first = _trainer(whole, **common)
    code = first.train(Flag(first.engine))  # type: ignore[arg-type]
    _shared(lambda: _interrupt(whole, halves))
    second = _trainer(halves, **common)
    again = second.train(Flag(second.engine))  # type: ignore[arg-type]
    forgetful = _trainer(directory / f"forgetful {kind}", **common, checkpoint__resume=str(whole / "checkpoint-2"))
    resumed = forgetful.resume()
    for entries in forgetful.engine.optimizer.state.values():
        for value in entries.values():
            value.zero_()
    for batch in forgetful.data.updates_from(2):
        forgetful.engine.forward_backward(batch)
        forgetful.engine.step()
    return {
        "codes": (code, again),
        "weights": _differences(_whole(second), _whole(first)),
        "final": _whole(first),
        "metrics": (_metrics(whole), _metrics(halves)),
        "forgetful": _differences(whole_weights(forgetful.engine), whole_weights(first.engine)),
        "resumed": str(resumed),
        "there": [p.name for p in complete_checkpoints(halves)],
        "latest": (halves / "latest").resolve().name,
    }


def _stop(directory: Path) -> dict[str, Any]:
    """Rank 1 alone is asked to stop in update 2; then the run goes on, and rank 1 would choose another checkpoint."""
    trainer = _trainer(directory / "stop", **DROPOUT)
    code = trainer.train(Flag(trainer.engine, rank=1, update=2))  # type: ignore[arg-type]
    at = trainer.at.update
    again = _trainer(directory / "stop", **DROPOUT)
    find = resume.find_checkpoint
    if dist.get_rank() == 1:
        resume.find_checkpoint = lambda output_dir, resume: output_dir / "checkpoint-2"
    resumed = again.resume()
    resume.find_checkpoint = find
    done = _trainer(directory / "stop", **DROPOUT)
    end = done.train(Flag(done.engine))  # type: ignore[arg-type]
    return {
        "code": code,
        "at": at,
        "resumed": str(resumed),
        "again": again.at.update,
        "end": end,
        "state": _whole(done),
    }


def _across(directory: Path, saved: str, loaded: str, **options: Any) -> list[str]:
    """A checkpoint of `saved` read by `loaded`; then saved again, without a step, and read once more."""
    first = _trainer(directory / f"{saved} to {loaded}", **options, parallelism__data_parallel=saved)
    for batch in list(first.data.updates_from(0))[:2]:
        first.engine.forward_backward(batch)
        first.engine.step()
    first.at.update = 2
    path = first.save()
    second = _trainer(
        directory / f"{saved} to {loaded} again",
        **options,
        parallelism__data_parallel=loaded,
        checkpoint__resume=str(path),
    )
    assert len(_differences(whole_weights(second.engine), whole_weights(first.engine))) > 10
    second.resume()
    differences = _differences(_whole(second), _whole(first))
    copy = second.save()
    third = _trainer(directory / "third", **options, parallelism__data_parallel=saved, checkpoint__resume=str(copy))
    third.resume()
    return differences + _differences(_whole(third), _whole(first))


def _frozen(directory: Path) -> dict[str, Any]:
    options = {"model__freeze": ["embed*", "blocks.*.base*"]}
    first = _trainer(directory / "frozen", ADAPTED, **options)
    first.engine.module.seen.add_(0.5)
    path = first.save()
    second = _trainer(directory / "frozen again", ADAPTED, checkpoint__resume=str(path), **options)
    with torch.no_grad():  # as after a start from another seed
        for p in second.engine.module.parameters():
            p.add_(1.0)
    other = _differences(whole_weights(second.engine), whole_weights(first.engine))
    second.resume()
    return {
        "before": len(other),
        "after": _differences(whole_weights(second.engine), whole_weights(first.engine)),
        "buffer": torch.equal(second.engine.module.seen, torch.arange(8.0) + 0.5),
        "stored": sorted(read_index(path).shapes),
    }


def _message(trainer: Trainer) -> str:
    try:
        trainer.resume()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


def _refusals(directory: Path) -> dict[str, str]:
    narrow = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
    first = _trainer(directory / "refused", LLAMA, **narrow)
    path = first.save()
    fewer = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    bf16 = {f"precision__{name}_dtype": "bf16" for name in ("param", "reduce", "master")}
    at = {"checkpoint__resume": str(path)}
    sizes = {"checkpoint__accept_changes": ["model.config_overrides"]}
    thin = {**fewer, "num_hidden_layers": 3, "hidden_size": 16}
    found = {
        "dtype": _message(_trainer(directory / "a", LLAMA, **bf16, **at)),
        "extra": _message(_trainer(directory / "a", LLAMA, model__config_overrides=fewer, **narrow, **at, **sizes)),
        "more": _message(
            _trainer(directory / "a", LLAMA, model__config_overrides={**fewer, "num_hidden_layers": 4}, **narrow, **at, **sizes)
        ),
        "shape": _message(
            _trainer(directory / "a", LLAMA, model__config_overrides=thin, **narrow, **at, **sizes)
        ),
        "data": _message(_trainer(directory / "a", LLAMA, "other rows", **narrow, **at)),
        "seed": _message(_trainer(directory / "a", LLAMA, training__seed=1, **narrow, **at)),
        "batch": _message(_trainer(directory / "a", LLAMA, training__global_batch_size=6, **narrow, **at)),
    }  # fmt: skip
    if dist.get_rank() == 0:
        found["never"] = _message_of(lambda: find_checkpoint(directory / "refused", "never"))
        found["nowhere"] = _message_of(lambda: find_checkpoint(directory, str(directory / "refused" / "checkpoint-1")))
    return found


def _message_of(action: Any) -> str:
    try:
        action()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


def _names(directory: Path) -> list[set[str]]:
    """Keys of the state with every way of wrapping blocks."""
    return [
        set(_trainer(directory, LLAMA, **options).checkpoints.state())
        for options in (
            {"parallelism__data_parallel": "ddp"},
            {},
            {"memory__activation_checkpointing": "full"},
            {"memory__activation_checkpointing": "selective", "memory__compile": True},
            {"memory__compile": True, "parallelism__data_parallel": "ddp"},
        )
    ]


def _kept(directory: Path) -> dict[str, Any]:
    trainer = _trainer(directory / "kept", checkpoint__save_total_limit=2, checkpoint__save_steps=1)
    for update in (1, 2, 3, 4):
        trainer.at.update = update
        trainer.save()
    kept = [p.name for p in complete_checkpoints(directory / "kept")]
    trainer.at.update = 2  # after a fall back to an older checkpoint
    trainer.save()
    fallen = [p.name for p in complete_checkpoints(directory / "kept")]
    write = saver.write_parts

    def fail(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*arguments, **options)

    saver.write_parts = fail
    trainer.at.update = 5
    message = _message_of(trainer.save)
    saver.write_parts = write
    return {
        "kept": kept,
        "fallen": fallen,
        "failed": [p.name for p in complete_checkpoints(directory / "kept")],
        "message": message,
        "latest": (directory / "kept" / "latest").resolve().name,
    }


class Counting(torch.optim.Optimizer):
    """SGD whose step shrinks with a plain number that it keeps for each parameter, as older optimizers do."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entries = self.state[p]
                    entries.setdefault("count", 0)
                    entries["count"] += 1
                    p.add_(p.grad, alpha=-group["lr"] / entries["count"])


def _numbers(directory: Path) -> dict[str, Any]:
    options = {"training__optimizer": "tests.gloo.checkpoint.test_state_goes_on:Counting"}
    first = _trainer(directory / "numbers", **options)
    first.train(Flag(first.engine))  # type: ignore[arg-type]
    second = _trainer(
        directory / "numbers again", checkpoint__resume=str(directory / "numbers" / "checkpoint-4"), **options
    )
    second.resume()
    counts = {s["count"] for s in second.engine.optimizer.state.values()}
    second.train(Flag(second.engine))  # type: ignore[arg-type]
    next(iter(first.engine.optimizer.state.values()))["count"] = "text"
    return {
        "counts": counts,
        "weights": _differences(whole_weights(second.engine), whole_weights(first.engine)),
        "refused": _message_of(first.checkpoints.state),
    }


def _all(directory: Path) -> dict[str, Any]:
    sgd = {"training__optimizer": "sgd", "training__optimizer_kwargs": {"momentum": 0.9}}
    muon = {"training__optimizer": "muon"}
    facts: dict[str, Any] = {f"resume {kind}": _resume(directory, kind) for kind in KINDS}
    facts["resume momentum"] = _resume(directory / "momentum", "zero3", **sgd)
    facts |= {
        f"across {a} {b}": _across(directory, a, b) for a, b in (("ddp", "zero3"), ("zero3", "ddp"), ("zero1", "zero2"))
    }
    facts["across muon"] = _across(directory / "muon", "zero3", "ddp", **muon)
    facts |= {
        "stop": _stop(directory),
        "frozen": _frozen(directory),
        "refusals": _refusals(directory),
        "names": _names(directory),
        "kept": _kept(directory),
        "numbers": _numbers(directory),
    }
    return facts


def _loaded(path: Path, kind: str) -> dict[str, Tensor]:
    trainer = _trainer(
        path.parent / f"at {dist.get_world_size()}", **DROPOUT, parallelism__data_parallel=kind,
        checkpoint__resume=str(path),
    )  # fmt: skip
    trainer.resume()
    trainer.at.update = STEPS + dist.get_world_size()
    trainer.save()
    return _whole(trainer)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def facts(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, directory)


@pytest.mark.parametrize("kind", (*KINDS, "momentum"))
def test_resume_is_bit_identical(kind: str, facts: list[dict[str, Any]]) -> None:
    """A54 A55 A69: weights and moments after a resume are those of an uninterrupted run; without the moments they are not."""
    for rank in facts:
        found = rank[f"resume {kind}"]
        assert found["codes"] == (0, 0)
        assert found["weights"] == []
        assert len(found["forgetful"]) > 10
        assert found["resumed"].endswith("checkpoint-2")
        assert found["there"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert found["latest"] == "checkpoint-6"


@pytest.mark.parametrize("kind", (*KINDS, "momentum"))
def test_metrics_of_a_resumed_run_read_like_one_run(kind: str, facts: list[dict[str, Any]]) -> None:
    """A52: learning rates are one function of the update before and after; losses, norms, counts and evaluation too."""
    whole, halves = facts[0][f"resume {kind}"]["metrics"]
    assert halves == whole
    rates = [line["train/lr"] for line in whole if "train/lr" in line]
    assert rates == pytest.approx([0.01 * f for f in (0, 0.25, 0.5, 0.75, 1, 0.5)])
    assert [line["update"] for line in whole] == [0, 1, 2, 3, 4, 5, 5]
    assert whole[-1]["eval/target_tokens"] > 0
    totals = [line["train/target_tokens"] for line in whole[:-1]]
    assert totals == sorted(set(totals))


def test_a_stop_asked_of_one_rank(facts: list[dict[str, Any]]) -> None:
    """A102: both ranks save after the same update and end with 75. A103: the checkpoint to resume is rank 0's choice."""
    for rank in facts:
        found = rank["stop"]
        assert (found["code"], found["at"], found["end"]) == (75, 3, 0)
        assert found["resumed"].endswith("checkpoint-3") and found["again"] == 3
        assert set(found["state"]) == set(facts[0]["stop"]["state"])
        assert _differences(found["state"], facts[0]["stop"]["state"]) == []


@pytest.mark.parametrize("pair", ("ddp zero3", "zero3 ddp", "zero1 zero2", "muon"))
def test_kinds_read_each_other(pair: str, facts: list[dict[str, Any]]) -> None:
    """A71: every kind reads every other's. A72: load, then save without a step: the same tensors."""
    assert facts[0][f"across {pair}"] == []


def test_world_sizes_read_each_other(directory: Path, facts: list[dict[str, Any]]) -> None:
    """A71 A125: two ranks to one, and what one rank writes to two and four."""
    path = directory / "whole zero3" / "checkpoint-6"
    (one,) = run_ranks(_loaded, 1, path, "zero3")
    two, _ = run_ranks(_loaded, 2, path.parent / "at 1" / f"checkpoint-{STEPS + 1}", "ddp")
    four, *_ = run_ranks(_loaded_on_four, 4, path.parent / "at 1" / "at 2" / f"checkpoint-{STEPS + 2}")
    assert _differences(two, one) == [] and _differences(four, one) == []
    assert len(one) > 50 and facts[0]["resume zero3"]["final"].keys() == one.keys()
    assert _differences(one, facts[0]["resume zero3"]["final"]) == []


def _loaded_on_four(path: Path) -> dict[str, Tensor]:
    trainer = _trainer(path.parent / "at 4", **DROPOUT, checkpoint__resume=str(path))
    trainer.resume()
    return _whole(trainer)


def test_frozen_weights_and_buffers_are_kept(facts: list[dict[str, Any]]) -> None:
    """A70: before loading the frozen weights differ, and not after; persistent buffers too."""
    for rank in facts:
        found = rank["frozen"]
        assert found["before"] > 3 and found["after"] == [] and found["buffer"]
        assert "model.embed.weight" in found["stored"] and "model.seen" in found["stored"]
        assert not [key for key in found["stored"] if key.startswith("optimizer.embed")]


def test_what_does_not_fit_is_refused(facts: list[dict[str, Any]]) -> None:
    """A63: another dtype. A64: tensors only in the checkpoint, or only in the model; another shape; other data."""
    for rank in facts:
        found = rank["refusals"]
        assert "of another shape or dtype: model." in found["dtype"]
        assert "stored (257, 32) torch.float32, here (257, 32) torch.bfloat16" in found["dtype"]
        assert "only in the checkpoint: model.model.layers.2." in found["extra"]
        assert "not in the checkpoint: model.model.layers.3." in found["more"]
        assert "stored (257, 32) torch.float32, here (257, 16) torch.float32" in found["shape"]
        assert "other data" in found["data"]
        like = "was trained with global_batch_size 8, seed 42, shuffle true; this run has global_batch_size"
        assert f"{like} 8, seed 1, shuffle true" in found["seed"]
        assert f"{like} 6, seed 42, shuffle true" in found["batch"]
    found = facts[0]["refusals"]
    assert "holds checkpoint-0 of an earlier run" in found["never"]
    assert "checkpoint-1 holds no complete checkpoint" in found["nowhere"] and "checkpoint-0`?" in found["nowhere"]


def test_names_do_not_depend_on_wrappers(facts: list[dict[str, Any]]) -> None:
    """A65: the same keys with recomputation, compilation, ddp and sharding; those of the unsplit model."""
    first, *others = facts[0]["names"]
    assert all(names == first for names in others)
    assert "model.model.layers.0.self_attn.q_proj.weight" in first


def test_what_is_kept(facts: list[dict[str, Any]]) -> None:
    """A60: the newest ones stay, one that is ahead is not counted, and a save that fails on one rank costs nothing."""
    for rank in facts:
        found = rank["kept"]
        assert found["kept"] == ["checkpoint-3", "checkpoint-4"]
        assert found["fallen"] == found["failed"] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
        assert "rank 1: OSError" in found["message"] and "No space left" in found["message"]
        assert found["latest"] == "checkpoint-2"


def test_numbers_of_an_optimizer_are_kept(facts: list[dict[str, Any]]) -> None:
    """A54: a count kept as a Python number comes back too; a state that cannot be stored is refused, not dropped."""
    for rank in facts:
        found = rank["numbers"]
        assert found["counts"] == {4} and found["weights"] == []
        assert "Counting keeps count of three as str" in found["refused"]

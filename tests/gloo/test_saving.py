"""Saving beside training, what fails while saving, and what comes back: two ranks, the loop of `train`.

Covers A52, A54, A56, A57, A59, A60, A61, A62, A72, A73 and A76 of the known faults.
"""

from __future__ import annotations

import gc
import hashlib
import io
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.checkpoints import flip
from tests.gloo.engine import LLAMA, ODD, batches_for, make_engine, run_file, whole_weights
from tests.gloo.ranks import run_ranks
from tests.gloo.test_checkpoint import Data, Flag, _differences, _message, _metrics, _shared, _whole
from tests.odd_models import OddModel
from torch import Tensor, nn

from shardwright.arch.inventory import shape_from_config
from shardwright.checkpoint import saver, store
from shardwright.drill.disk import fill, small_disk
from shardwright.errors import CheckpointError
from shardwright.layout.names import with_layout
from shardwright.measure.live_memory import LiveMemory
from shardwright.plan.host import host_bytes
from shardwright.plan.of_run import job_of, layout_of
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
STEPS = 6


def _trainer(directory: Path, model: str = ODD, **options: Any) -> tuple[Trainer, io.StringIO]:
    values = {"training__max_steps": STEPS, "checkpoint__output_dir": str(directory), **options}
    loaded = run_file(model, **({"checkpoint__save_steps": 2} | values))
    engine, screen = make_engine(loaded), io.StringIO()
    quiet = dist.get_rank() != 0
    console = Console(file=screen, quiet=quiet, width=1000)
    return Trainer(loaded, engine, Data(engine), console), screen  # type: ignore[arg-type]


def _train(trainer: Trainer) -> int:
    return trainer.train(Flag(trainer.engine))  # type: ignore[arg-type]


def _raised(action: Any) -> str:
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*checkpoint-*"))


def _files(directory: Path) -> dict[str, str]:
    """Hashes of all tensors' files and indices of a run."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("checkpoint-*/tensors/*"))
    }


# In the background


def _beside(directory: Path) -> dict[str, Any]:
    common: dict[str, Any] = {"checkpoint__save_steps": 1}
    plain, _ = _trainer(directory / "at once", **common)
    _train(plain)
    beside, screen = _trainer(directory / "beside", **common, checkpoint__async_save=True)
    _train(beside)
    index = store.read_index(directory / "beside" / "checkpoint-6")
    own = f"rank-{dist.get_rank():05d}.safetensors"
    share = (index.directory / own).stat().st_size - index.headers[own][0]
    return {
        "files": (_files(directory / "at once"), _files(directory / "beside")),
        "staging": (beside.checkpoints.saver.staging_bytes, share),
        "screen": screen.getvalue(),
        "names": _names(directory / "beside"),
    }


def _overwritten(directory: Path) -> dict[str, Any]:
    """Weights, moments and counts are overwritten as soon as `before_step` returns, while the writer is held up."""
    trainer, _ = _trainer(directory / "overwritten", checkpoint__async_save=True)
    for batch in list(trainer.data.updates_from(0))[:2]:
        trainer.engine.forward_backward(batch)
        trainer.engine.step()
    trainer.at.update = 1
    trainer.save()
    right = _whole(trainer)
    held, write = threading.Event(), saver.write_parts

    def late(*arguments: Any) -> Any:
        held.wait()
        return write(*arguments)

    copy = saver._copy

    def slowly(copies: Any) -> None:
        threading.Event().wait(0.3)
        copy(copies)

    saver.write_parts, saver._copy = late, slowly
    trainer.at.update = 2
    trainer.checkpoints.start()
    trainer.checkpoints.saver.before_step()
    with torch.no_grad():
        for tensor in trainer.checkpoints.state().values():
            if isinstance(tensor, Tensor):
                tensor.fill_(0)
    polled = trainer.checkpoints.saver.poll()
    before = store.find(directory / "overwritten", "auto")
    other, _ = _trainer(directory / "overwritten", checkpoint__async_save=True)
    other.resume()
    while_writing = other.at.update
    held.set()
    saver.write_parts, saver._copy = write, copy
    done = trainer.checkpoints.saver.finish()
    other.resume()
    return {
        "polled": polled,
        "before": before.name if before else "",
        "while writing": while_writing,
        "done": done.name if done else "",
        "differences": _differences(_whole(other), right),
        "right": len(right),
    }


def _busy(directory: Path, busy: str) -> dict[str, Any]:
    trainer, screen = _trainer(
        directory / busy,
        checkpoint__async_save=True,
        checkpoint__async_when_busy=busy,
        checkpoint__save_steps=1,
    )
    held, write = threading.Event(), saver.write_parts

    def late(path: Path, parts: Any) -> Any:
        if "checkpoint-1." in str(path):
            held.wait(20)
        return write(path, parts)

    saver.write_parts = late
    batches = iter(list(trainer.data.updates_from(0)))
    for update in (1, 2, 3):
        trainer._update(batches, Flag(trainer.engine))  # type: ignore[arg-type]
        if update == 3 or (update == 2 and busy == "wait"):
            held.set()
        if update == 3:
            trainer.checkpoints.saver.finish()
        trainer.checkpoints.between_updates(due=True, last=False)
    trainer.checkpoints.saver.finish()
    saver.write_parts = write
    return {"names": _names(directory / busy), "screen": screen.getvalue()}


# Failing


def _full(directory: Path, **options: Any) -> dict[str, Any]:
    """Rank 1 may write no more than 1000 bytes a file during the save after update 4."""
    trainer, screen = _trainer(directory, **options)
    start, limits = trainer.checkpoints.start, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited() -> None:
        if dist.get_rank() == 1 and trainer.at.update == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        elif trainer.at.update != 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        start()
        trainer.checkpoints.saver.before_step()

    trainer.checkpoints.start = limited  # type: ignore[method-assign]
    error = _raised(lambda: _train(trainer))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    return {
        "error": error,
        "at": trainer.at.update,
        "names": _names(directory),
        "screen": screen.getvalue(),
        "verified": [store.verify(path) for path in store.complete_checkpoints(directory)],
    }


def _no_space(disk: str, **options: Any) -> dict[str, Any]:
    """A file takes all but 4 KiB of the disk before the save after update 4, and goes after it."""
    directory, ballast = Path(disk) / "run", Path(disk) / "ballast"
    trainer, screen = _trainer(directory, **options)
    start = trainer.checkpoints.start

    def filled() -> None:
        if trainer.at.update == 4:
            _shared(lambda: fill(Path(disk), left=4096))
        elif trainer.at.update > 5:
            _shared(lambda: ballast.unlink(missing_ok=True))
        start()
        trainer.checkpoints.saver.before_step()

    trainer.checkpoints.start = filled  # type: ignore[method-assign]
    error = _raised(lambda: _train(trainer))
    _shared(lambda: ballast.unlink(missing_ok=True))
    found = {
        "error": error,
        "names": _names(directory),
        "screen": screen.getvalue(),
        "metrics": [line for line in _metrics(directory) if "train/loss" in line],
        "verified": [store.verify(path) for path in store.complete_checkpoints(directory)],
    }
    dist.barrier()
    _shared(lambda: shutil.rmtree(directory))
    return found


def _forbidden(directory: Path) -> dict[str, Any]:
    """The run's directory is a file; a rank's state cannot be stored; rank 0 cannot complete."""
    trainer, _ = _trainer(directory / "file" / "below")
    _shared(lambda: (directory / "file").write_text(""))
    found = {"directory": _raised(trainer.save)}
    trainer, _ = _trainer(directory / "incomplete")
    trainer.save()
    complete = saver.directory.complete

    def fail(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    saver.directory.complete = fail
    trainer.at.update = 1
    found["complete"] = _raised(trainer.save)
    dist.barrier()
    saver.directory.complete = complete
    found["names"] = str(_names(directory / "incomplete"))
    return found


def _damaged(directory: Path) -> dict[str, Any]:
    """A byte of each kind of file of the newest checkpoint flips, one after the other; then of the others too."""
    first, _ = _trainer(directory / "damaged")
    _train(first)
    found: dict[str, Any] = {}
    newest = directory / "damaged" / "checkpoint-6"
    for name in ("manifest.json", "config.yaml", "tensors/index.json", "tensors/rank-00001.safetensors"):
        _shared(lambda file=newest / name: flip(file, 200))
        trainer, screen = _trainer(directory / "damaged")
        path = trainer.resume()
        found[name] = (path.name if path else "", trainer.at.update, screen.getvalue())
        dist.barrier()
        _shared(lambda file=newest / name: flip(file, 200))
    for update in (2, 4, 6):
        place = directory / "damaged" / f"checkpoint-{update}" / "tensors" / "rank-00000.safetensors"
        _shared(lambda file=place: flip(file, -1))
    trainer, _ = _trainer(directory / "damaged")
    found["all"] = _message(trainer)
    named, _ = _trainer(directory / "other", checkpoint__resume=str(newest))
    found["named"] = _message(named)
    return found


# What comes back


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


class Running(OddModel):
    """With running statistics of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + input_ids.double().mean().to(self.mean.dtype) * 0.1
        return super().forward(input_ids)


def running_model() -> nn.Module:
    return Running()


def _resumed(directory: Path, model: str = ODD, other: str = "zero3", **options: Any) -> dict[str, Any]:
    first, _ = _trainer(directory, model, **options)
    _train(first)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    second, _ = _trainer(
        directory.with_name(f"{directory.name} again"), model, **options, parallelism__data_parallel=other,
        checkpoint__resume=str(directory / "checkpoint-4"),
    )  # fmt: skip
    second.resume()
    groups = [
        {k: v for k, v in g.items() if k in ("d", "k", "seen")} for g in second.engine.optimizer.param_groups
    ]
    second.train(Flag(second.engine))  # type: ignore[arg-type]
    found, right = _whole(second), _whole(first)
    return {
        "differences": _differences(found, right),
        "gap": max((found[name] - value).abs().max().item() for name, value in right.items()),
        "groups": groups,
    }


def _best(directory: Path) -> dict[str, Any]:
    losses = iter((5.0, 3.0, 4.0, 3.5, 3.0, 6.0))
    options: dict[str, Any] = {
        "data__validation": ["-"], "training__eval_steps": 1, "checkpoint__keep_best": True,
        "checkpoint__save_total_limit": 1, "checkpoint__save_steps": 1,
    }  # fmt: skip
    trainer, _ = _trainer(directory / "best", **options)
    trainer.engine.evaluate = lambda batches: (next(losses), 1)  # type: ignore[method-assign]
    _train(trainer)
    again, _ = _trainer(directory / "best", **options)
    again.resume()
    return {
        "names": _names(directory / "best"),
        "link": (directory / "best" / "best").resolve().name,
        "best": (again.at.best, again.at.eval_loss),
    }


def _settings(directory: Path) -> dict[str, Any]:
    trainer, _ = _trainer(directory / "settings", training__lr_scheduler_type="linear")
    trainer.save()
    at = {"checkpoint__resume": str(directory / "settings" / "checkpoint-0")}
    other = {"training__learning_rate": 0.5, "training__lr_scheduler_type": "cosine", "logging__log_steps": 3}
    accepted = ["training.learning_rate", "training.lr_scheduler_type"]
    refused, _ = _trainer(directory / "a", **at, **other)
    confirmed, screen = _trainer(directory / "a", **at, **other, checkpoint__accept_changes=accepted)
    message = _message(confirmed)
    seeded, _ = _trainer(
        directory / "a", **at, training__seed=1, checkpoint__accept_changes=["training.seed"]
    )
    return {
        "refused": _message(refused),
        "confirmed": (message, screen.getvalue()),
        "seeded": _message(seeded),
    }


def _partial(directory: Path) -> dict[str, Any]:
    """A model with three blocks and a wider vocabulary reads the checkpoint of one with two."""
    first, _ = _trainer(directory / "partial")
    for batch in list(first.data.updates_from(0))[:2]:
        first.engine.forward_backward(batch)
        first.engine.step()
    path = first.save()
    wider = {"model__kwargs": {"vocab": 33, "layers": 3}, "checkpoint__accept_changes": ["model.kwargs"]}
    second, screen = _trainer(
        directory / "b",
        **wider,
        checkpoint__resume=str(path),
        checkpoint__partial=["embed", "head", "blocks.2"],
    )
    start, right = whole_weights(second.engine), whole_weights(first.engine)
    second.resume()
    found = whole_weights(second.engine)
    kept = [name for name in start if name.startswith(("embed", "head", "blocks.2"))]
    strict, _ = _trainer(
        directory / "b", **wider, checkpoint__resume=str(path), checkpoint__partial=["embed"]
    )
    state = {local.name for local in second.engine.locals if second.engine.optimizer.state.get(local.tensor)}
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
    first, _ = _trainer(directory / "peak", LLAMA, **model, **narrow)
    first.engine.forward_backward(batches_for(first.engine, 0))
    first.engine.step()
    path = first.save()
    share = sum(p.to_local().nbytes for p in first.engine.module.parameters())
    del first
    gc.collect()
    second, _ = _trainer(directory / "peak", LLAMA, **model, **narrow)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = _status_bytes("VmRSS")
    second.resume()
    return {
        "added": _status_bytes("VmHWM") - before,
        "share": share,
        "at": second.at.update,
        "saved": int(path.exists()),
    }


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _staged(directory: Path) -> dict[str, tuple[int, int, int, int]]:
    """Layout -> bytes that the main thread makes at most in a first and a second save; the buffer; what plan says."""
    sizes = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    wide = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
    found = {}
    for name in ("zero3", "ddp", "tp2"):
        options = {
            "model__config_overrides": sizes,
            "checkpoint__output_dir": str(directory / f"staged {name}"),
        }
        loaded = with_layout(run_file(LLAMA, checkpoint__async_save=True, **options, **wide), name)
        live = LiveMemory()
        with live:
            live.enter("update")
            engine = make_engine(loaded)
            engine.forward_backward(batches_for(engine, 0))
            engine.step()
            trainer = Trainer(loaded, engine, Data(engine), Console(quiet=True))  # type: ignore[arg-type]
            rises = [_rise(trainer, live, update) for update in (1, 2)]
        shape = shape_from_config(engine.module.config.to_dict())
        planned = host_bytes(job_of(loaded.run, shape), layout_of(loaded.run, engine.axes)).save
        found[name] = (*rises, trainer.checkpoints.saver.staging_bytes, planned)
    return found


def _rise(trainer: Trainer, live: LiveMemory, update: int) -> int:
    trainer.at.update, before = update, live.live
    live.clear()
    live.enter("save")
    trainer.checkpoints.start()
    trainer.checkpoints.saver.finish()
    return live.timeline.by_phase["save"] - before


def _running(directory: Path) -> str:
    trainer, _ = _trainer(directory / "running", "tests.gloo.test_saving:running_model")
    return _raised(lambda: _train(trainer))


def _alone(directory: Path) -> str:
    """Rank 0 saves and rank 1 does not."""
    trainer, _ = _trainer(directory / "alone")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    error = ""
    if dist.get_rank() == 0:
        try:
            trainer.save()
        except RuntimeError as failure:
            error = str(failure)
    else:
        threading.Event().wait(4)
    return error


def _all(directory: Path, disk: str) -> dict[str, Any]:
    warn = {"checkpoint__on_save_error": "warn"}
    grouped = {"training__optimizer": "tests.gloo.test_saving:Grouped"}
    return {
        "beside": _beside(directory),
        "overwritten": _overwritten(directory),
        "wait": _busy(directory, "wait"),
        "skip": _busy(directory, "skip"),
        "full": {
            "stop": _full(directory / "full stop"),
            "warn": _full(directory / "full warn", **warn),
            "stop beside": _full(directory / "full stop beside", checkpoint__async_save=True),
            "warn beside": _full(directory / "full warn beside", **warn, checkpoint__async_save=True),
        },
        "no space": {
            "stop": _no_space(disk),
            "warn beside": _no_space(disk, **warn, checkpoint__async_save=True),
        }
        if disk
        else {},
        "staged": _staged(directory),
        "forbidden": _forbidden(directory),
        "damaged": _damaged(directory),
        "grouped": _resumed(directory / "grouped", **grouped),
        "grouped ddp": _resumed(directory / "grouped ddp", other="ddp", **grouped),
        "drawing": _resumed(directory / "drawing", "tests.gloo.test_saving:drawing_model"),
        "best": _best(directory),
        "settings": _settings(directory),
        "partial": _partial(directory),
        "peak": _peak(directory),
        "running": _running(directory),
        "alone": _alone(directory),
    }


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(a disk of 2 MiB, ""), or ("", why there is none)."""
    place = tmp_path_factory.mktemp("saving") / "disk"
    with small_disk(place, 2 * 2**20) as refused:
        yield ("", refused) if refused else (str(place), "")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, disk: tuple[str, str]) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, tmp_path_factory.mktemp("saving"), disk[0], timeout=170.0)


def test_saving_beside_training_writes_the_same_bytes(facts: list[dict[str, Any]]) -> None:
    """A56: tensors and index of each of 6 updates; the copy is this rank's share and no more."""
    for rank in facts:
        at_once, beside = rank["beside"]["files"]
        assert len(at_once) == 18 and beside == at_once
        staged, share = rank["beside"]["staging"]
        assert 0 < staged == share
    assert rank["beside"]["names"] == [f"checkpoint-{update}" for update in range(1, 7)]
    assert facts[0]["beside"]["screen"].count("Saved ") == 6


def test_what_is_overwritten_after_the_call_is_not_saved(facts: list[dict[str, Any]]) -> None:
    """A56: every weight, moment and count is that of the call. A57: until it is complete, the one before is read."""
    for rank in facts:
        found = rank["overwritten"]
        assert found["polled"] is None and found["before"] == "checkpoint-1" and found["while writing"] == 1
        assert found["done"] == "checkpoint-2" and found["differences"] == [] and found["right"] > 50


def test_a_second_save_waits_or_is_skipped(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert rank["wait"]["names"] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        assert rank["skip"]["names"] == ["checkpoint-1", "checkpoint-3"]
    assert "Not saved after update 2" in facts[0]["skip"]["screen"]


@pytest.mark.parametrize("how", ("stop", "warn", "stop beside", "warn beside"))
def test_a_full_disk_on_one_rank(how: str, facts: list[dict[str, Any]]) -> None:
    """A59 A60: both ranks learn of it after the same update; checkpoint-2 is whole, no half one stays."""
    for rank in facts:
        found = rank["full"][how]
        assert found["verified"] == [[]] * len(found["names"])
        if how.startswith("stop"):
            assert found["error"].startswith(
                "SaveError: The checkpoint was not written: rank 1: OSError: [Errno 27]"
            )
            assert found["names"] == ["checkpoint-2"] and found["at"] in (4, 5, 6)
            assert found["at"] == facts[0]["full"][how]["at"]
        else:
            assert found["error"] == "" and found["names"] == ["checkpoint-2", "checkpoint-6"]
    if how.startswith("warn"):
        assert "rank 1: OSError: [Errno 27] File too large" in facts[0]["full"][how]["screen"]
        assert "The run goes on" in facts[0]["full"][how]["screen"]


@pytest.mark.parametrize("how", ("stop", "warn beside"))
def test_a_disk_that_is_full(how: str, facts: list[dict[str, Any]], disk: tuple[str, str]) -> None:
    """A60: ENOSPC of a file system: what was there before is whole, no half one stays, and the run stops or goes on as told."""
    if disk[1]:
        pytest.skip(f"no small disk can be mounted: {disk[1]}")
    for rank in facts:
        found = rank["no space"][how]
        assert found["verified"] == [[]] * len(found["names"])
        if how == "stop":
            assert "OSError: [Errno 28] No space left on device" in found["error"]
            assert found["names"] == ["checkpoint-2"]
        else:
            assert found["error"] == "" and found["names"] == ["checkpoint-2", "checkpoint-6"]
    if how == "warn beside":
        assert "[Errno 28] No space left on device" in facts[0]["no space"][how]["screen"]
        assert [line["update"] for line in facts[0]["no space"][how]["metrics"]] == list(range(STEPS))


@pytest.mark.parametrize("layout", ("zero3", "ddp", "tp2"))
def test_the_copy_stays_within_the_plan(layout: str, facts: list[dict[str, Any]]) -> None:
    """A save in the background makes one copy of a rank's share, the first time, and no more than `plan` says.

    The rest, at most 64 KiB, is what ranks tell each other. Replicas under ddp share the writing; plan says what one may take.
    """
    for rank in facts:
        first, second, buffer, planned = rank["staged"][layout]
        assert buffer <= first <= buffer + 2**16 and second <= 2**16
        assert first <= planned + 2**16
        assert buffer > (0.45 if layout == "ddp" else 0.9) * planned > 2**18


def test_what_rank_0_cannot_do_is_an_error_on_all(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["forbidden"]
        assert (
            found["directory"].startswith("SaveError") and "rank 0: NotADirectoryError" in found["directory"]
        )
        assert "rank 0: OSError: [Errno 5] Input/output error" in found["complete"]
        assert found["names"] == "['checkpoint-0']"


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
        assert rank[case]["gap"] < 1e-12
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
        assert (
            "training.learning_rate 0.01 -> 0.5; training.lr_scheduler_type 'linear' -> 'cosine'." in refused
        )
        assert "log_steps" not in refused
        assert rank["settings"]["confirmed"][0] == rank["settings"]["seeded"] == ""
    assert (
        "Changed since checkpoint-0: logging.log_steps 1 -> 3; training.l"
        in facts[0]["settings"]["confirmed"][1]
    )


def test_partial_loads_are_asked_for(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["partial"]
        assert found["kept"] == found["read"] == found["fresh"] == []
        assert found["counts"][0] > 5 and found["counts"][1] > 20
        assert "not in the checkpoint: model.blocks.2" in found["strict"]
        assert "head.weight: stored (31, 6) torch.float64, here (33, 6) torch.float64" in found["strict"]
    assert "Not from checkpoint-0 (checkpoint.partial): " in facts[0]["partial"]["screen"]


def test_a_load_takes_the_moments_and_one_piece(facts: list[dict[str, Any]]) -> None:
    """A73: each rank reads its share; beside the two moments of it, which stay, nothing but a buffer of a piece."""
    for rank in facts:
        share = rank["peak"]["share"]
        assert share > 30e6 and rank["peak"]["added"] < 2 * share + 24e6


def test_buffers_that_differ_between_ranks_are_refused(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert "The buffer mean differs between ranks 0 and 1." in rank["running"]


def test_one_rank_alone_does_not_wait_for_ever(facts: list[dict[str, Any]]) -> None:
    """A76: bounded by the group's timeout, 2 s here."""
    assert "imed out" in facts[0]["alone"], facts[0]["alone"]

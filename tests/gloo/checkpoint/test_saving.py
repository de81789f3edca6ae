"""Saving beside training and what fails while saving: two ranks, the loop of `train`.

Covers A52, A56, A57, A59, A60, A72 and A76 of the known faults.
"""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.gloo.checkpoint.test_state_goes_on import Data, Flag, _differences, _metrics, _shared, _whole
from tests.gloo.engine import LLAMA, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks
from tests.gloo.saved_runs import STEPS, files_of, make_trainer, names, raised, train
from tests.odd_models import OddModel
from tests.started import LIMIT
from torch import Tensor, nn

from shardwright.arch.config_json import shape_from_config
from shardwright.checkpoint import saver
from shardwright.checkpoint.directory import complete_checkpoints
from shardwright.checkpoint.manifest import read_index, verify
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.layout.names import with_layout
from shardwright.measure.live_memory import LiveMemory
from shardwright.planner.host import host_bytes
from shardwright.planner.problem import layout_of, problem_of
from shardwright.tools.drill.disk import fill, small_disk
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


# In the background


def _beside(directory: Path) -> dict[str, Any]:
    common: dict[str, Any] = {"checkpoint__save_steps": 1}
    plain, _ = make_trainer(directory / "at once", **common)
    train(plain)
    beside, screen = make_trainer(directory / "beside", **common, checkpoint__async_save=True)
    train(beside)
    index = read_index(directory / "beside" / "checkpoint-6")
    own = f"rank-{dist.get_rank():05d}.safetensors"
    share = (index.directory / own).stat().st_size - index.headers[own][0]
    return {
        "files": (files_of(directory / "at once"), files_of(directory / "beside")),
        "staging": (beside.checkpoints.saver.staging_bytes, share),
        "screen": screen.getvalue(),
        "names": names(directory / "beside"),
    }


def _overwritten(directory: Path) -> dict[str, Any]:
    """Weights, moments and counts are overwritten as soon as `before_step` returns, while the writer is held up."""
    trainer, _ = make_trainer(directory / "overwritten", checkpoint__async_save=True)
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

    copy = saver._copy_to_host

    def slowly(copies: Any, queued: Any) -> None:
        threading.Event().wait(0.3)
        copy(copies, queued)

    saver.write_parts, saver._copy_to_host = late, slowly
    trainer.at.update = 2
    trainer.checkpoints.start()
    trainer.checkpoints.saver.before_step()
    with torch.no_grad():
        for tensor in trainer.checkpoints.state().values():
            if isinstance(tensor, Tensor):
                tensor.fill_(0)
    polled = trainer.checkpoints.saver.poll()
    before = find_checkpoint(directory / "overwritten", "auto")
    other, _ = make_trainer(directory / "overwritten", checkpoint__async_save=True)
    other.resume()
    while_writing = other.at.update
    held.set()
    saver.write_parts, saver._copy_to_host = write, copy
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
    trainer, screen = make_trainer(
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
    return {"names": names(directory / busy), "screen": screen.getvalue()}


# Failing


def _full(directory: Path, **options: Any) -> dict[str, Any]:
    """Rank 1 may write no more than 1000 bytes a file during the save after update 4."""
    trainer, screen = make_trainer(directory, **options)
    start, limits = trainer.checkpoints.start, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited() -> None:
        if dist.get_rank() == 1 and trainer.at.update == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        elif trainer.at.update != 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        start()
        trainer.checkpoints.saver.before_step()

    trainer.checkpoints.start = limited  # type: ignore[method-assign]
    error = raised(lambda: train(trainer))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    return {
        "error": error,
        "at": trainer.at.update,
        "names": names(directory),
        "screen": screen.getvalue(),
        "verified": [verify(path) for path in complete_checkpoints(directory)],
    }


def _no_space(disk: str, **options: Any) -> dict[str, Any]:
    """A file takes all but 4 KiB of the disk before the save after update 4, and goes after it."""
    directory, ballast = Path(disk) / "run", Path(disk) / "ballast"
    trainer, screen = make_trainer(directory, **options)
    start = trainer.checkpoints.start

    def filled() -> None:
        if trainer.at.update == 4:
            _shared(lambda: fill(Path(disk), left=4096))
        elif trainer.at.update > 5:
            _shared(lambda: ballast.unlink(missing_ok=True))
        start()
        trainer.checkpoints.saver.before_step()

    trainer.checkpoints.start = filled  # type: ignore[method-assign]
    error = raised(lambda: train(trainer))
    _shared(lambda: ballast.unlink(missing_ok=True))
    found = {
        "error": error,
        "names": names(directory),
        "screen": screen.getvalue(),
        "metrics": [line for line in _metrics(directory) if "train/loss" in line],
        "verified": [verify(path) for path in complete_checkpoints(directory)],
    }
    dist.barrier()
    _shared(lambda: shutil.rmtree(directory))
    return found


def _forbidden(directory: Path) -> dict[str, Any]:
    """The run's directory is a file; a rank's state cannot be stored; rank 0 cannot complete."""
    trainer, _ = make_trainer(directory / "file" / "below")
    _shared(lambda: (directory / "file").write_text(""))
    found = {"directory": raised(trainer.save)}
    trainer, _ = make_trainer(directory / "incomplete")
    trainer.save()
    complete = saver.directory.complete

    def fail(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    saver.directory.complete = fail
    trainer.at.update = 1
    found["complete"] = raised(trainer.save)
    dist.barrier()
    saver.directory.complete = complete
    found["names"] = str(names(directory / "incomplete"))
    return found


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
        planned = host_bytes(problem_of(loaded.run, shape), layout_of(loaded.run, engine.axes)).save
        found[name] = (*rises, trainer.checkpoints.saver.staging_bytes, planned)
    return found


def _rise(trainer: Trainer, live: LiveMemory, update: int) -> int:
    trainer.at.update, before = update, live.live
    live.clear()
    live.enter("save")
    trainer.checkpoints.start()
    trainer.checkpoints.saver.finish()
    return live.peak_by_phase["save"] - before


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


def _running(directory: Path) -> str:
    trainer, _ = make_trainer(directory / "running", "tests.gloo.checkpoint.test_saving:running_model")
    return raised(lambda: train(trainer))


def _alone(directory: Path) -> str:
    """Rank 0 saves; rank 1 does not, and stays until rank 0 has given up."""
    trainer, _ = make_trainer(directory / "alone")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    error = ""
    if dist.get_rank() == 0:
        try:
            trainer.save()
        except RuntimeError as failure:
            error = str(failure)
        (directory / "given up").touch()
    deadline = time.monotonic() + LIMIT
    while not (directory / "given up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return error


def _all(directory: Path, disk: str) -> dict[str, Any]:
    warn = {"checkpoint__on_save_error": "warn"}
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
    return run_ranks(_all, 2, tmp_path_factory.mktemp("saving"), disk[0])


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
            assert found["error"].startswith("SaveError: The checkpoint was not written: rank 1: OSError: [Errno 27]")
            assert found["names"] == ["checkpoint-2"] and found["at"] in (4, 5, 6)
            assert found["at"] == facts[0]["full"][how]["at"]
        else:
            assert found["error"] == "" and found["names"] == ["checkpoint-2", "checkpoint-6"]
    if how.startswith("warn"):
        assert "rank 1: OSError: [Errno 27] File too large" in facts[0]["full"][how]["screen"]
        assert "The run continues" in facts[0]["full"][how]["screen"]


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
        assert found["directory"].startswith("SaveError") and "rank 0: NotADirectoryError" in found["directory"]
        assert "rank 0: OSError: [Errno 5] Input/output error" in found["complete"]
        assert found["names"] == "['checkpoint-0']"


def test_buffers_that_differ_between_ranks_are_refused(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert "The buffer mean differs between ranks 0 and 1." in rank["running"]


def test_one_rank_alone_does_not_wait_for_ever(facts: list[dict[str, Any]]) -> None:
    """A76: bounded by the group's timeout, 2 s here."""
    assert "imed out" in facts[0]["alone"], facts[0]["alone"]

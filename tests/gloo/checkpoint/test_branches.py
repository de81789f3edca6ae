"""Runs that go back, run into a file system that refuses, or have reached their goal: two ranks, the loop of `train`."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.checkpoints import flip
from tests.gloo.checkpoint import test_own_disks as own_disks
from tests.gloo.checkpoint.test_state_goes_on import (
    Flag,
    _differences,
    _message_of,
    _metrics,
    _shared,
    _whole,
)
from tests.gloo.engine import ODD, run_file
from tests.gloo.ranks import run_ranks
from tests.gloo.saved_runs import make_trainer, names, raised, train

from shardwright.checkpoint import saver
from shardwright.checkpoint.directory import complete_checkpoints
from shardwright.checkpoint.manifest import read_manifest, verify
from shardwright.config.load import Loaded
from shardwright.launch.lock import lock_of
from shardwright.mesh.cluster_environment import Job, RankInfo
from shardwright.train import worker
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def _state(trainer: Trainer, screen: Any) -> dict[str, Any]:
    directory = trainer.output_dir
    return {
        "at": trainer.at.update,
        "names": names(directory),
        "latest": os.readlink(directory / "latest") if (directory / "latest").is_symlink() else "",
        "screen": screen.getvalue(),
        "branches": [branch.number for branch in trainer.checkpoints._lineage],
    }


def _start(directory: Path, job: Job, end: int | None = None, **options: Any) -> dict[str, Any]:
    """What one start of ranks comes to: it ends when it has resumed, or is asked to stop after update `end`."""
    trainer, screen = make_trainer(directory, **options)
    found = {}
    if end is None:
        trainer.resume(job)
    else:
        flag = Flag(trainer.engine, rank=1, update=end - 1)
        found["code"] = trainer.train(flag, job)  # type: ignore[arg-type]
        found["state"] = _whole(trainer)
    dist.barrier()
    return found | _state(trainer, screen)


def _back(directory: Path) -> dict[str, Any]:
    """2, 4 and 6 are there, then 2 is named: the starts that follow, one after the other."""
    run, chosen = directory / "back", {"checkpoint__resume": str(directory / "back" / "checkpoint-2")}
    second, fifth = Job("second"), Job("fifth")
    return {
        "whole": _start(run, Job("first"), 6),
        "killed": _start(run, second, **chosen),
        "restarted": _start(run, Job("second", again=True), **chosen),
        "other job": _start(run, Job("third")),
        "stopped": _start(run, second, 3, **chosen),
        "requeued": _start(run, Job("second", again=True), **chosen),
        "never": _message_of(lambda: _start(run, second, checkpoint__resume="never")),
        "to the end": _start(run, Job("fourth"), 6),
        "metrics": [line["update"] for line in _metrics(run) if "train/loss" in line],
        "twice": _start(run, fifth, 3, **chosen),
        "after twice": _start(run, Job("sixth")),
        "lineage": [
            (path.name, [branch.number for branch in read_manifest(path).lineage]) for path in complete_checkpoints(run)
        ],
    }


def _elsewhere(directory: Path) -> dict[str, Any]:
    run, chosen = directory / "elsewhere", {"checkpoint__resume": str(directory / "back" / "checkpoint-4")}
    return {
        "chosen": _start(run, Job("one"), **chosen),
        "restarted": _start(run, Job("one", again=True), **chosen),
        "auto": _start(run, Job("two")),
        "trained": _start(run, Job("two"), 5),
        "again": _start(run, Job("three")),
    }


def _refusing(directory: Path, **options: Any) -> dict[str, Any]:
    """A share without links and without sync of directories, and a file that is held: one save after each update."""
    (before := make_trainer(directory)[0]).at.update = 0
    before.save()
    _shared(lambda: (directory / "checkpoint-0" / "tensors" / ".nfs01").touch())
    kept = os.unlink, os.symlink, os.fsync
    os.unlink, os.symlink, os.fsync = _hold(os.unlink), _no_link, _no_sync(os.fsync)  # type: ignore[assignment]
    trainer, screen = make_trainer(directory, checkpoint__save_steps=1, checkpoint__save_total_limit=1, **options)
    code = train(trainer)
    dist.barrier()
    found = _state(trainer, screen) | {"code": code, "verified": verify(directory / "checkpoint-6")}
    again, screen = make_trainer(directory, **options)
    found["again"] = (train(again), screen.getvalue().count("Device or resource busy"), names(directory))
    os.unlink, os.symlink, os.fsync = kept
    dist.barrier()
    trainer.checkpoints.refuse_unsaved()
    train(make_trainer(directory, **options)[0])
    dist.barrier()
    return found | {"freed": names(directory)}


def _fallen(directory: Path) -> list[int]:
    """Where starts go on from: 6 damaged, mended, damaged while the run goes on from 4 and saves 5, and mended again."""
    run, job = directory / "fallen", Job("job")
    file = run / "checkpoint-6" / "tensors" / "rank-00001.safetensors"
    _start(run, job, 6)
    found = []
    for end in (None, None, 5, None):
        _shared(lambda: flip(file, -1))
        found.append(_start(run, job, end)["at"])
        dist.barrier()
    return found


def _hold(unlink: Any) -> Any:
    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if os.path.basename(os.fspath(path)) == ".nfs01":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, dir_fd=dir_fd)

    return refuse


def _no_link(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def _no_sync(fsync: Any) -> Any:
    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    return refuse


def _unsaved(directory: Path, at: int) -> dict[str, Any]:
    """Rank 1 cannot write the checkpoint of update `at`, and on_save_error is warn."""
    trainer, _ = make_trainer(directory, checkpoint__on_save_error="warn")
    write = saver.write_parts

    def fail(path: Path, parts: Any) -> Any:
        if dist.get_rank() == 1 and f"checkpoint-{at}." in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, parts)

    saver.write_parts = fail
    code = train(trainer)
    saver.write_parts = write
    dist.barrier()
    return {"code": code, "end": raised(trainer.checkpoints.refuse_unsaved), "names": names(directory)}


def _reached(directory: Path) -> dict[str, Any]:
    """The loss is reached in update 2; the same run once more; and three that have something left to do."""
    run, found = directory / "reached", {}
    goal = {"training__until_eval_loss": 100.0, "training__eval_steps": 2, "data__validation": ["-"]}
    starts: dict[str, dict[str, Any]] = {
        "first": goal,
        "again": goal,
        "longer": goal | {"training__max_steps": 12, "training__lr_scheduler_type": "constant"},
    }
    for name, options in starts.items():
        found[name] = _goal(run, **({"training__lr_scheduler_type": "constant"} | options))
    for name, options, rows in (
        ("lower", goal | {"training__until_eval_loss": 0.001}, ""),
        ("other rows", goal, "other rows"),
        ("the same rows", goal, "rows"),
    ):
        _shared(lambda name=name: shutil.copytree(run, directory / name, symlinks=True))
        found[name] = _goal(directory / name, rows, **({"training__lr_scheduler_type": "constant"} | options))
    return found


def _goal(directory: Path, rows: str = "rows", **options: Any) -> dict[str, Any]:
    trainer, screen = make_trainer(directory, **options)
    trainer.checkpoints._eval_data = rows
    code = train(trainer)
    dist.barrier()
    return _state(trainer, screen) | {"code": code, "updates": len(trainer._metrics.seconds)}


def _two_disks(directory: Path) -> dict[str, Any]:
    """Each rank is a host. b was away with what it had before the run went back, and comes back with it."""
    disk, place = "ab"[dist.get_rank()], directory / "disks"
    own_disks._save(place, "ab")
    _shared(lambda: shutil.copytree(place / "b", place / "b before", symlinks=True))
    trainer, screen = own_disks._trainer(
        place, disk, checkpoint__resume=str(place / disk / "checkpoint-2"), checkpoint__copies=1
    )
    trainer.train(Flag(trainer.engine, rank=1, update=2), Job("back"))  # type: ignore[arg-type]
    found = {"stopped": _state(trainer, screen)}
    again, screen = own_disks._trainer(place, disk)
    again.resume(Job("auto"))
    found["again"] = _state(again, screen)
    named, screen = own_disks._trainer(place, disk, checkpoint__resume=str(place / disk / "latest"))
    named.resume(Job("named"))
    found["named"] = _state(named, screen)
    _shared(lambda: shutil.rmtree(place / "b"))
    _shared(lambda: shutil.move(place / "b before", place / "b"))
    back, screen = own_disks._trainer(place, disk)
    back.resume(Job("came back"))
    return found | {"came back": _state(back, screen)}


def _held(directory: Path) -> dict[str, Any]:
    """Ranks that no launcher of ours has started: rank 0 holds the directory, or each rank that of its host."""
    found = {}
    for storage, local, disks in (("shared", dist.get_rank(), "aa"), ("per_host", 0, "ab")):
        place = RankInfo(dist.get_rank(), local, 2, 2 if storage == "shared" else 1, 1, "torchrun")
        disk = directory / f"held {storage}" / disks[dist.get_rank()]
        loaded = run_file(ODD, checkpoint__output_dir=str(disk), checkpoint__storage=storage)
        with worker._own_directory(loaded, place):
            inside = [lock_of(disk, "train").exists(), _message_of(partial(_enter, loaded, place))]
        dist.barrier()
        found[storage] = [*inside, disk.exists()]
    return found


def _enter(loaded: Loaded, place: RankInfo) -> None:
    with worker._own_directory(loaded, place):
        raise AssertionError("both have it")


def _all(directory: Path) -> dict[str, Any]:
    warn = {"checkpoint__on_save_error": "warn"}
    return {
        "back": _back(directory),
        "elsewhere": _elsewhere(directory),
        "fallen": _fallen(directory),
        "refusing": {
            "stop": _refusing(directory / "refusing"),
            "warn beside": _refusing(directory / "refusing beside", checkpoint__async_save=True, **warn),
        },
        "last": _unsaved(directory / "last", 6),
        "before": _unsaved(directory / "before", 4),
        "reached": _reached(directory),
        "disks": _two_disks(directory),
        "held": _held(directory),
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, tmp_path_factory.mktemp("branches"))


def test_the_branch_chosen_is_the_branch_continued(facts: list[dict[str, Any]]) -> None:
    """Before its first save from 2, then from what was saved; 4 and 6 of the branch left are passed over, on both ranks."""
    for rank in facts:
        found = rank["back"]
        assert found["whole"]["names"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        for name, at in (("killed", 2), ("restarted", 2), ("other job", 2), ("stopped", 3), ("requeued", 3)):
            assert (found[name]["at"], found[name]["latest"]) == (at, f"checkpoint-{at}"), name
            assert found[name]["branches"] == [1, 2], name
        assert found["stopped"]["code"] == 75
        assert found["stopped"]["names"] == [f"checkpoint-{n}" for n in (2, 3, 4, 6)]
    screen = facts[0]["back"]["killed"]["screen"]
    assert "checkpoint-4, checkpoint-6 in" in screen and "are not on the branch that this run follows" in screen


def test_what_the_branch_reaches_again(facts: list[dict[str, Any]]) -> None:
    """The same settings, so the same bits as the branch that was left; metrics have each update once."""
    for rank in facts:
        found = rank["back"]
        assert found["to the end"]["at"] == 6
        assert _differences(found["to the end"]["state"], found["whole"]["state"]) == []
        assert found["metrics"] == list(range(6))
        assert "holds checkpoint-6 of an earlier run" in found["never"]
    screen = facts[0]["back"]["to the end"]["screen"]
    for number in (4, 6):
        assert f"checkpoint-{number} of a branch that was left is replaced." in screen
    dropped = "entries of an earlier attempt, from update 3 on, are dropped"
    assert dropped in facts[0]["back"]["stopped"]["screen"]


def test_back_twice(facts: list[dict[str, Any]]) -> None:
    """Named once more, 2 begins a branch of its own; what each checkpoint descends from is in its manifest."""
    for rank in facts:
        found = rank["back"]
        assert found["twice"]["branches"] == [1, 3] and found["after twice"]["at"] == 3
        assert found["lineage"] == [
            ("checkpoint-2", [1]),
            ("checkpoint-3", [1, 3]),
            ("checkpoint-4", [1, 2]),
            ("checkpoint-6", [1, 2]),
        ]


def test_a_run_that_began_elsewhere(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["elsewhere"]
        for name, at in (("chosen", 4), ("restarted", 4), ("auto", 4), ("trained", 5), ("again", 5)):
            assert found[name]["at"] == at, name
        assert found["auto"]["branches"] == found["again"]["branches"] == [1, 2, 3]
        assert found["again"]["names"] == ["checkpoint-5"]


def test_damage_that_is_mended_is_undone(facts: list[dict[str, Any]]) -> None:
    """As long as nothing was saved since; what was saved since is a branch, and 6 was left."""
    assert [rank["fallen"] for rank in facts] == [[4, 6, 5, 5]] * 2


@pytest.mark.parametrize("how", ("stop", "warn beside"))
def test_what_a_share_refuses_ends_no_save(how: str, facts: list[dict[str, Any]]) -> None:
    """Six saves, the last one whole; each thing is said once; when the file is free, the old checkpoint goes."""
    for rank in facts:
        found = rank["refusing"][how]
        assert found["code"] == 0 and found["at"] == 6 and found["verified"] == []
        assert found["names"] == [".checkpoint-0.removed", "checkpoint-6"]
        assert found["again"] == (0, int(rank is facts[0]), found["names"]), "a start without a save says it too"
        assert found["freed"] == ["checkpoint-6"], "and removes what is free"
    screen = facts[0]["refusing"][how]["screen"]
    for said in ("Device or resource busy", "latest cannot be made", "does not sync directories"):
        assert screen.count(said) == 1, said
    assert screen.count("Saved ") == 6 and "was not written" not in screen


def test_a_last_checkpoint_that_is_missing_is_an_error(facts: list[dict[str, Any]]) -> None:
    """The run goes on, but its end is no 0 without the last checkpoint; one in between that failed is made up for."""
    for rank in facts:
        assert rank["last"]["names"] == ["checkpoint-2", "checkpoint-4"]
        assert rank["last"]["end"].startswith("SaveError: The run has ended without its last checkpoint.")
        assert "rank 1: OSError: [Errno 28]" in rank["last"]["end"]
        assert rank["before"]["names"] == ["checkpoint-2", "checkpoint-6"] and rank["before"]["end"] == ""


def test_a_goal_that_is_reached_stays_reached(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["reached"]
        assert [found[name]["updates"] for name in ("first", "again", "longer")] == [2, 0, 0]
        assert [found[name]["updates"] for name in ("lower", "other rows", "the same rows")] == [4, 2, 0]
        assert {each["code"] for each in found.values()} == {0}
        assert found["again"]["names"] == ["checkpoint-2"]
    assert "the run has reached its goal" in facts[0]["reached"]["again"]["screen"]
    assert "data.validation holds other rows than before" in facts[0]["reached"]["other rows"]["screen"]


def test_branches_on_own_disks(facts: list[dict[str, Any]]) -> None:
    """Every host follows what was chosen last, also one that has not heard of it."""
    for rank in facts:
        found = rank["disks"]
        assert [found[name]["at"] for name in ("stopped", "again", "named", "came back")] == [3, 3, 3, 3]
        assert found["again"]["branches"] == found["came back"]["branches"] == [1, 2]
        assert found["came back"]["latest"] == ("checkpoint-3" if rank is facts[0] else "checkpoint-2")


def test_ranks_without_our_launcher_hold_the_directory(facts: list[dict[str, Any]]) -> None:
    """A second job is refused on all its ranks alike, in a shared directory and on own disks; nothing is left."""
    for rank in facts:
        for storage in ("shared", "per_host"):
            there, message, after = rank["held"][storage]
            assert there and "is in use by `train`" in message and not after, (storage, message)

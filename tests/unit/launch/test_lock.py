"""One run at a time in a directory: who is refused, who takes over, and with what help of the file system."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.places import ROOT

from shardwright.errors import ConfigError
from shardwright.launch import lock
from shardwright.launch.lock import OLD_SECONDS, Owner, lock_of, owned, read_owner
from shardwright.mesh.cluster_environment import Job, job_of

HOLDS = """
import sys
from pathlib import Path
from shardwright.launch.lock import owned
with owned(Path(sys.argv[1]), "train", print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that owns `tmp_path`, until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SLURM_JOB_ID": "77"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def take(directory: Path, **options: Any) -> list[str]:
    """What is said by one that takes the directory and gives it back."""
    said: list[str] = []
    with owned(directory, "train", said.append, **options):
        assert read_owner(lock_of(directory, "train")) is not None
    assert not lock_of(directory, "train").exists()
    return said


def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def written(directory: Path, owner: Owner) -> Path:
    path = lock_of(directory, "train")
    path.write_text(json.dumps(asdict(owner)))
    return path


def elsewhere() -> Owner:
    return replace(Owner.this_process("train"), host="node7", machine="node7 another boot", job="")


@pytest.mark.parametrize("flock", (True, False))
def test_the_second_is_refused_and_told_by_whom(
    flock: bool, other: subprocess.Popen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flock:
        no_flock(monkeypatch)
    with pytest.raises(ConfigError) as error:
        take(tmp_path)
    for part in (str(tmp_path), f"`train`, process {other.pid} on ", "(job slurm 77), since 20"):
        assert part in error.value.what
    assert str(lock_of(tmp_path, "train")) in error.value.fix
    with owned(tmp_path, "drill", print):  # another verb, in files of its own
        pass
    other.communicate("")
    assert take(tmp_path) == []


@pytest.mark.parametrize("flock", (True, False))
@pytest.mark.parametrize("reaped", (True, False))
def test_a_killed_owner_is_followed_at_once(
    flock: bool, reaped: bool, other: subprocess.Popen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL the file is still there; a process that its parent has not waited for has ended too."""
    if not flock:
        no_flock(monkeypatch)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    (line,) = take(tmp_path)
    assert f"process {other.pid} on " in line and "takes the directory over" in line


def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    written(tmp_path, replace(Owner.this_process("train"), started="1"))
    assert len(take(tmp_path)) == 1


def test_children_of_a_dead_owner_hold_nothing(tmp_path: Path) -> None:
    """A process that the owner forked still has the file open, and so its flock; its number says that it is gone."""
    path = written(tmp_path, replace(Owner.this_process("train"), started="1"))
    with path.open("rb") as inherited:
        fcntl.flock(inherited, fcntl.LOCK_EX)
        assert len(take(tmp_path)) == 1


def test_an_owner_on_another_machine_is_told_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive: refused. Silent: taken over after the wait. Silent for long: taken over without a wait."""
    path, ended = written(tmp_path, elsewhere()), threading.Event()
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.05)

    def beat() -> None:
        while not ended.wait(0.02):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(ConfigError, match="on node7, since"):
        take(tmp_path, patience=60.0)
    ended.set()
    heart.join()
    said = take(tmp_path, patience=0.1)
    assert "up to 0.1 s for its heartbeat" in said[0] and "takes the directory over" in said[1] and len(said) == 2
    path = written(tmp_path, elsewhere())
    old = path.stat().st_mtime - OLD_SECONDS - 60
    os.utime(path, (old, old))
    (line,) = take(tmp_path, patience=60.0)
    assert "takes the directory over" in line


def test_an_owner_elsewhere_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the directory back while somebody waits for its heartbeat: that one has a file of its own then."""
    path, sleep = written(tmp_path, elsewhere()), lock.clock.sleep

    def removed(seconds: float) -> None:
        path.unlink(missing_ok=True)
        sleep(0)

    monkeypatch.setattr(lock.clock, "sleep", removed)
    take(tmp_path, patience=1.0)


def test_of_two_at_once_without_flock_the_last_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_flock(monkeypatch)
    monkeypatch.setattr(lock.clock, "sleep", lambda seconds: written(tmp_path, elsewhere()))
    with pytest.raises(ConfigError, match="on node7"):
        take(tmp_path)
    assert read_owner(lock_of(tmp_path, "train")) == elsewhere(), "the other's file stays"


def test_an_owner_that_was_taken_for_dead_removes_nothing(tmp_path: Path) -> None:
    """It was stopped for so long that another machine took the directory over."""
    with owned(tmp_path, "train", print):
        written(tmp_path, elsewhere())
    assert read_owner(lock_of(tmp_path, "train")) == elsewhere()


def test_the_owner_keeps_its_heart_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with owned(tmp_path, "train", print):
        path = lock_of(tmp_path, "train")
        os.utime(path, (1, 1))
        while path.stat().st_mtime == 1:
            lock.clock.sleep(0.01)


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), owned(tmp_path / "run", "train", print):
        raise ValueError
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        take(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("environment", "job"),
    (
        ({}, Job()),
        ({"SLURM_JOB_ID": "7"}, Job("slurm 7")),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, Job("slurm 7", again=True)),
        ({"SHARDWRIGHT_JOB": "launcher a", "TORCHELASTIC_RESTART_COUNT": "0"}, Job("launcher a")),
        ({"SHARDWRIGHT_JOB": "launcher a", "TORCHELASTIC_RESTART_COUNT": "2"}, Job("launcher a", again=True)),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("torchrun x", True)),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, Job("torchrun a:1")),
    ),
)  # fmt: skip
def test_names_of_jobs(environment: dict[str, str], job: Job) -> None:
    assert job_of(environment) == job


def test_a_start_that_waited_while_another_took_over_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen the same dead owner; the second finds the first one there when it has waited."""
    path, dead = lock_of(tmp_path, "train"), replace(Owner.this_process("train"), machine="elsewhere")
    path.write_text(json.dumps(asdict(dead)))
    first, judge = replace(Owner.this_process("train"), job="first"), lock._gone

    def taken_over(owner: Owner, *arguments: Any) -> bool:
        if owner != dead:
            return judge(owner, *arguments)
        path.write_text(json.dumps(asdict(first)))
        return True

    monkeypatch.setattr(lock, "_gone", taken_over)
    with pytest.raises(ConfigError, match="job first"), owned(tmp_path, "train", print):
        pass
    assert read_owner(path) == first

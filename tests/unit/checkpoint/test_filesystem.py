"""What a file system refuses without ending a save: removals, links, syncs of directories. Without ranks."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import written

from shardwright.checkpoint import directory
from shardwright.checkpoint.directory import Retention, complete_checkpoints
from shardwright.checkpoint.manifest import verify
from shardwright.checkpoint.resume import find_checkpoint

LIMIT = Retention(1)


def hold(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Files called `name` cannot be removed."""
    unlink = os.unlink

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if os.path.basename(os.fspath(path)) == name:
            raise OSError(number, os.strerror(number), path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)


def left_over(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.glob(".checkpoint-*"))


@pytest.mark.parametrize("number", (errno.EBUSY, errno.EACCES))
def test_a_file_that_cannot_be_removed(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoints count, one line says it each time; all else of the old one goes; freed, the rest goes too."""
    (written(tmp_path, 2) / "tensors" / ".nfs01").touch()
    with monkeypatch.context() as held:
        hold(held, ".nfs01", number)
        said: list[list[str]] = []
        for update in (4, 6, 8):
            written(tmp_path, update, retention=LIMIT, notes=(notes := []))
            said.append(notes)
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-8"]
        assert verify(tmp_path / "checkpoint-8") == []
        assert left_over(tmp_path) == [".checkpoint-2.removed"]
        rest = [p.name for p in (tmp_path / ".checkpoint-2.removed").rglob("*") if p.is_file()]
        assert rest == [".nfs01"], "what is not held is freed"
        assert len(said[0]) == 1 and ".checkpoint-2.removed cannot be removed" in said[0][0]
        assert os.strerror(number) in said[0][0] and {*said[1], *said[2]} == set(said[0]), "one text, so said once"
    written(tmp_path, 10, retention=LIMIT, notes=(notes := []))
    assert notes == [] and left_over(tmp_path) == []


def test_a_checkpoint_whose_name_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share where a directory with an open file cannot be renamed: the old checkpoint stays whole."""
    written(tmp_path, 2)
    rename = Path.rename

    def refuse(self: Path, target: Any) -> Path:
        if self.name == "checkpoint-2":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return rename(self, target)

    with monkeypatch.context() as held:
        held.setattr(Path, "rename", refuse)
        written(tmp_path, 4, retention=LIMIT, notes=(notes := []))
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
        assert verify(tmp_path / "checkpoint-2") == [] and "checkpoint-2 cannot be removed" in notes[0]
    written(tmp_path, 6, retention=LIMIT)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-6"]


def test_leftovers_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half save that cannot be removed does not stand in the way of the next one of its update; nor do two of them."""
    hold(monkeypatch, "held", errno.EBUSY)
    for _ in range(3):
        (tmp_path / ".checkpoint-2.incomplete").mkdir()
        (tmp_path / ".checkpoint-2.incomplete" / "held").touch()
        written(tmp_path, 2, notes=(notes := []))
        assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-2" and notes
    assert len(left_over(tmp_path)) == 3


def test_an_old_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    """Moved to another disk by hand: the link goes, what it names stays."""
    (tmp_path / "run").mkdir()
    shutil.move(written(tmp_path / "run", 2), tmp_path / "moved")
    (tmp_path / "run" / "checkpoint-2").symlink_to(tmp_path / "moved")
    written(tmp_path / "run", 4, retention=LIMIT, notes=(notes := []))
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert notes == [] and left_over(tmp_path / "run") == [] and verify(tmp_path / "moved") == []


def copied_as_directory(output_dir: Path) -> None:
    (output_dir / "latest").unlink()
    shutil.copytree(output_dir / "checkpoint-2", output_dir / "latest")


def copied_as_file(output_dir: Path) -> None:
    (output_dir / "latest").unlink()
    (output_dir / "latest").write_text("checkpoint-2")


@pytest.mark.parametrize(("make", "kind"), ((copied_as_directory, "a directory"), (copied_as_file, "a file")))
def test_latest_that_is_no_link(make: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    """It is left as it is, said, and nobody needs it."""
    written(tmp_path, 2)
    make(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("latest/*"))
    written(tmp_path, 4, notes=(notes := []))
    assert len(notes) == 1 and f"latest is {kind}, not a link" in notes[0]
    assert sorted(path.name for path in tmp_path.rglob("latest/*")) == before
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-4"


def test_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    written(tmp_path, 2, notes=(notes := []))
    written(tmp_path, 4, notes=(again := []))
    assert notes == again and len(notes) == 1 and "latest cannot be made" in notes[0]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-4" and not (tmp_path / "latest").exists()


def test_links_that_cannot_be_renamed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` follows all the same: removed, then named."""

    def refuse(self: Path, target: Any) -> Path:
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(Path, "replace", refuse)
    for update in (2, 4):
        written(tmp_path, update, notes=(notes := []))
        assert notes == [] and (tmp_path / "latest").resolve().name == f"checkpoint-{update}"


def no_sync_of_directories(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


def test_no_sync_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync_of_directories(monkeypatch, errno.EINVAL)
    for update in (2, 4):
        path = written(tmp_path, update, retention=LIMIT, notes=(notes := []))
        assert verify(path) == [] and len(set(notes)) == 1 and "does not sync directories" in notes[0]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_no_sync_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that cannot sync anything: said, once for files and once for directories; another error is an error."""

    def refuse(number: int) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    path = written(tmp_path, 2, notes=(notes := []))
    assert verify(path) == [] and "does not sync files" in notes[0] and len(set(notes)) == 2
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        written(tmp_path, 4)


def test_a_sync_that_has_lost_something_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input/output error is no missing feature: the checkpoint before stays, and no half one gets a name."""
    written(tmp_path, 2)
    no_sync_of_directories(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        written(tmp_path, 4, retention=LIMIT)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_directory_that_cannot_be_listed_ends_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(output_dir: Path) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(directory, "complete_checkpoints", refuse)
    path = written(tmp_path, 2, retention=LIMIT, notes=(notes := []))
    assert verify(path) == [] and "Stale file handle. The next save tries again." in notes[0]

"""Branches of a run that went back: which checkpoint is gone on from, which go, where links point. Without ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import xxhash
from tests.checkpoints import flip, written

from shardwright.checkpoint import resume as resume_module
from shardwright.checkpoint.directory import Retention, complete_checkpoints, restore_replaced
from shardwright.checkpoint.manifest import Branch, Lineage, LineageNode, read_manifest, verify
from shardwright.checkpoint.resume import (
    LINEAGE,
    Choice,
    begin_branch,
    choose_branch,
    current_lineage,
    find_checkpoint,
    new_branch,
    read_choice,
    resume_setting,
    stays_on_branch,
    write_choice,
)
from shardwright.errors import CheckpointError, ConfigError

A: Lineage = (Branch(1, "a", 0),)
B: Lineage = (*A, Branch(2, "b", 2))
C: Lineage = (*A, Branch(3, "c", 2))
D: Lineage = (*B, Branch(4, "d", 3))


def names(output_dir: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(output_dir)]


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Checkpoints 2, 4, 6 of one run, which then goes back to 2."""
    for update in (2, 4, 6):
        written(tmp_path, update, lineage=A)
    begin_branch(tmp_path, Choice(B, "checkpoint-2", "job"), read_manifest(tmp_path / "checkpoint-2"))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "on", "off"),
    (
        (A, {(2, A), (9, A)}, {(2, B), (3, B), (2, ())}),
        (B, {(1, A), (2, A), (3, B), (9, B)}, {(3, A), (4, A), (3, C)}),
        (C, {(2, A), (3, C)}, {(3, A), (3, B)}),
        (D, {(2, A), (3, B), (5, D)}, {(4, A), (4, B), (3, C)}),
        ((), {(7, ())}, {(7, A)}),
        ((Branch(1, "n", 6),), {(4, ()), (6, ())}, {(8, ())}),
    ),
)
def test_what_a_line_has_gone_through(
    line: Lineage, on: set[tuple[int, Lineage]], off: set[tuple[int, Lineage]]
) -> None:
    """Back to 2 twice (b, c), and from 3 of b once more (d); checkpoints that say nothing of a branch are the root."""
    for update, own in on:
        assert LineageNode(Path(), update, own).is_on(line), (update, own)
    for update, own in off:
        assert not LineageNode(Path(), update, own).is_on(line), (update, own)


def test_when_a_branch_begins() -> None:
    """Only what leaves something newer behind, or comes from elsewhere, begins a branch; numbers count up."""
    nodes = [LineageNode(Path(), update, A) for update in (2, 4)]
    assert stays_on_branch(A, nodes[1], nodes) and not stays_on_branch(A, nodes[0], nodes)
    assert stays_on_branch(B, nodes[0], nodes), "nothing was saved on b yet: the checkpoint it began from"
    assert not stays_on_branch(B, nodes[1], nodes), "4 was left"
    assert not stays_on_branch(B, LineageNode(Path(), 1, A), []), "before the place where b begins"
    assert not stays_on_branch(A, None, []) and not stays_on_branch((), LineageNode(Path(), 2, ()), [])
    (same,) = {
        choose_branch(None, nodes, nodes[1], "checkpoint-4", "j", passed).lineage
        for passed in ((), ("checkpoint-3", "x"))
    }
    assert same == A
    new = choose_branch(None, nodes, nodes[1], "checkpoint-4", "j", ("checkpoint-6",))
    assert new.lineage[:1] == A and new.lineage[1].begin == 4, "something newer is there that cannot be read"
    assert new.origin == "checkpoint-4" and choose_branch(None, nodes, nodes[1], "/else/checkpoint-4", "j").lineage != A
    assert new_branch(nodes[0], 5, "x") == (*A, Branch(5, "x", 2)) and new_branch(None, 1, "y")[0].begin == 0
    assert current_lineage(None, [LineageNode(Path(), 6, A), LineageNode(Path(), 3, B)]) == B, (
        "the highest number was chosen last"
    )


def test_auto_stays_on_the_branch_that_was_chosen(left: Path) -> None:
    """Killed before its first save: from 2, which was chosen; then from what it saved; damaged, the one before on it."""
    assert find_checkpoint(left, "auto") == left / "checkpoint-2"
    assert (left / "latest").resolve().name == "checkpoint-2"
    newer = written(left, 3, lineage=B)
    assert find_checkpoint(left, "auto") == newer and (left / "latest").resolve().name == "checkpoint-3"
    (left / LINEAGE).unlink()
    assert find_checkpoint(left, "auto") == newer, "manifests alone tell it"
    (left / LINEAGE).write_text("{")
    assert find_checkpoint(left, "auto") == newer, "and where the note is damaged"
    (left / LINEAGE).unlink()
    shutil.rmtree(left / "checkpoint-3")
    begin_branch(left, Choice(B, "checkpoint-2", "job"), None)
    written(left, 5, lineage=B)
    (left / "checkpoint-5" / "config.yaml").unlink()
    assert find_checkpoint(left, "auto") == left / "checkpoint-2", "not 4, which was left"


def test_nothing_good_on_the_branch_is_an_error(left: Path) -> None:
    shutil.rmtree(left / "checkpoint-2")
    with pytest.raises(CheckpointError, match="checkpoint-4, checkpoint-6 of a branch that was left"):
        find_checkpoint(left, "auto")
    assert find_checkpoint(left, str(left / "checkpoint-6")) == left / "checkpoint-6", "named, it is taken"
    with pytest.raises(ConfigError, match="holds checkpoint-6 of an earlier run"):
        find_checkpoint(left, "never")


def test_a_directory_that_was_copied_keeps_its_branch(left: Path, tmp_path: Path) -> None:
    copy = tmp_path.with_name(f"{tmp_path.name}-copy")
    shutil.copytree(left, copy, symlinks=True)
    shutil.rmtree(left)
    assert find_checkpoint(copy, "auto") == copy / "checkpoint-2"


def test_a_branch_from_another_directory(tmp_path: Path) -> None:
    """Until its first save a run that began elsewhere goes on from there; when that is gone, it is no fresh start."""
    there, here = tmp_path / "there", tmp_path / "here"
    first = written(there, 4, lineage=A)
    begin_branch(here, Choice((*A, Branch(2, "b", 4)), str(first), "job"), read_manifest(first))
    assert find_checkpoint(here, "auto") == first and not (here / "latest").is_symlink()
    written(here, 5, lineage=(*A, Branch(2, "b", 4)))
    assert find_checkpoint(here, "auto") == here / "checkpoint-5"
    shutil.rmtree(here / "checkpoint-5")
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match="has saved nothing since"):
        find_checkpoint(here, "auto")
    written(there, 4, lineage=C)
    with pytest.raises(CheckpointError, match="is gone or changed"):
        find_checkpoint(here, "auto")


def test_latest_and_best_name_checkpoints(left: Path) -> None:
    assert find_checkpoint(left, str(left / "latest")) == left / "checkpoint-2"
    shutil.rmtree(left / "checkpoint-2")
    with pytest.raises(CheckpointError, match="checkpoint-2 holds no complete checkpoint"):
        find_checkpoint(left, str(left / "latest"))


def test_the_same_job_does_not_choose_twice() -> None:
    mine = Choice(B, "checkpoint-2", "slurm 7")
    assert resume_setting("run/checkpoint-2", mine, "slurm 7") == "auto" == resume_setting("never", mine, "slurm 7")
    assert resume_setting("run/checkpoint-2", mine, "slurm 8") == "run/checkpoint-2", "another job"
    assert resume_setting("run/checkpoint-2", mine, "") == "run/checkpoint-2", "started for the first time"
    assert resume_setting("run/checkpoint-2", Choice(B, None, ""), "") == "run/checkpoint-2", "a job without a name"
    assert resume_setting("run/checkpoint-2", None, "slurm 7") == "run/checkpoint-2", "it had not chosen yet"


def test_a_number_that_is_reached_again_is_replaced(left: Path) -> None:
    """The old one keeps its name until the new one is whole; after a crash between, it comes back, and is not taken."""
    notes: list[str] = []
    path = written(left, 4, lineage=B, notes=notes)
    assert read_manifest(path).lineage == B and verify(path) == []
    assert f"{path} of a branch that was left is replaced." in notes
    again: list[str] = []
    written(left, 4, lineage=B, notes=again)
    assert again == [], "one of the branch itself: nothing to say"
    old = left / "checkpoint-6"
    old.rename(left / ".checkpoint-6.replaced")
    restore_replaced(left)
    assert old.exists() and find_checkpoint(left, "auto") == path


def test_what_goes_of_a_branch_that_was_left(left: Path) -> None:
    """Left ones do not count, stay while they are ahead, and go when the branch has passed them; also those of every N."""
    written(left, 5, lineage=A)
    retention, notes = Retention(2, every=5), list[str]()
    written(left, 3, lineage=B, retention=retention, notes=notes)
    assert names(left) == [f"checkpoint-{n}" for n in (2, 3, 4, 5, 6)] and notes == []
    written(left, 4, lineage=B, retention=retention, notes=notes)
    assert names(left) == [f"checkpoint-{n}" for n in (3, 4, 5, 6)], "the two newest of the branch, and what is ahead"
    written(left, 7, lineage=B, retention=retention, notes=notes)
    assert names(left) == ["checkpoint-4", "checkpoint-7"]
    assert [note for note in notes if "checkpoint-5 is removed: the checkpoint belongs to a branch" in note]
    assert [note for note in notes if "checkpoint-6 is removed: the checkpoint belongs to a branch" in note]


def test_what_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    """And goes only when all that is kept is newer: the manifest may be readable again a moment later."""
    for update in (2, 4, 6):
        written(tmp_path, update, lineage=A)
    (tmp_path / "checkpoint-4" / "manifest.json").write_text("{")
    written(tmp_path, 8, lineage=A, retention=Retention(3))
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (2, 4, 6, 8)]
    written(tmp_path, 10, lineage=A, retention=Retention(3), notes=(notes := []))
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (6, 8, 10)]
    assert notes == [
        f"{tmp_path / 'checkpoint-4'} is removed: the checkpoint cannot be read (checkpoint.save_total_limit)."
    ]


def test_best_is_of_the_branch(tmp_path: Path) -> None:
    """Losses 3, 2, 1 at 2, 4, 6; back at 2 the best is 2 itself. Losses over other rows are not compared."""
    keep = Retention(best=True)
    for update, loss in ((2, 3.0), (4, 2.0), (6, 1.0)):
        written(tmp_path, update, lineage=A, eval_loss=loss, eval_data="rows", retention=keep)
    assert (tmp_path / "best").resolve().name == "checkpoint-6"
    begin_branch(tmp_path, Choice(B, "checkpoint-2", ""), read_manifest(tmp_path / "checkpoint-2"))
    assert (tmp_path / "best").resolve().name == "checkpoint-2"
    written(tmp_path, 3, lineage=B, eval_loss=2.5, eval_data="rows", retention=keep)
    assert (tmp_path / "best").resolve().name == "checkpoint-3"
    written(tmp_path, 5, lineage=B, eval_loss=9.0, eval_data="other rows", retention=keep)
    assert (tmp_path / "best").resolve().name == "checkpoint-5"
    begin_branch(tmp_path, Choice((Branch(9, "z", 0),), None, ""), None)
    assert not (tmp_path / "best").is_symlink() and not (tmp_path / "latest").is_symlink()


def test_losses_of_checkpoints_that_do_not_say_their_rows_count(tmp_path: Path) -> None:
    """A run that an older version began keeps its best checkpoint."""
    written(tmp_path, 2, lineage=A, eval_loss=0.5)
    written(tmp_path, 4, lineage=A, eval_loss=0.8)
    written(tmp_path, 6, lineage=A, eval_loss=0.9, eval_data="rows", retention=Retention(1, best=True))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert (tmp_path / "best").resolve().name == "checkpoint-2"


def test_checkpoints_without_lineage_are_read(tmp_path: Path) -> None:
    """As those that were written before there were branches: the highest number, and no key of a branch in the manifest."""
    for update in (2, 4):
        path = written(tmp_path, update)
        values = json.loads((path / "manifest.json").read_text())
        for key in ("lineage", "eval_data", "checksum"):
            del values[key]
        values["checksum"] = lineage_less_checksum(values)
        (path / "manifest.json").write_text(json.dumps(values))
        assert read_manifest(path).lineage == () and verify(path) == []
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-4"
    begin_branch(tmp_path, Choice((Branch(1, "n", 2),), "checkpoint-2", ""), None)
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-2"


def lineage_less_checksum(values: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def test_a_choice_is_written_where_nothing_can_be_renamed_over(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(resume_module.os, "rename", refuse)
    write_choice(left, Choice(D, None, "other"))
    assert read_choice(left) == Choice(D, None, "other")


def test_a_damaged_checkpoint_of_the_branch_gives_way(left: Path) -> None:
    written(left, 3, lineage=B)
    flip(written(left, 5, lineage=B) / "manifest.json", 20)
    assert find_checkpoint(left, "auto") == left / "checkpoint-3"

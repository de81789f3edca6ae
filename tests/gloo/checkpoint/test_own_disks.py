"""Each host with its own disk: every rank is a host here, with a directory of its own, and writes, copies and reads back.

Disks are lost, damaged and come back, ranks move and become fewer; whole weights and moments are gathered and compared
with those that were saved.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.checkpoints import flip
from tests.gloo.checkpoint.test_state_goes_on import Data, Flag, _message, _whole
from tests.gloo.engine import ODD, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks
from torch import Tensor

from shardwright.checkpoint.manifest import verify
from shardwright.checkpoint.multi_host import transfer
from shardwright.errors import SaveError
from shardwright.train.loop import Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
UPDATES, ROWS = 6, 12
Digests = dict[str, str]


class Rows(Data):
    """As many as divide by 1, 2 and 3."""

    @property
    def validation(self) -> Any:
        return None

    def updates_from(self, first: int, device: torch.device | None = None, ready: Any = None) -> Any:
        return (batches_for(self.engine, update, rows=ROWS) for update in range(first, UPDATES))


def _trainer(directory: Path, disk: str, **options: Any) -> tuple[Trainer, io.StringIO]:
    """A trainer of this rank whose host has the directory `disk`."""
    values = {
        "training__max_steps": UPDATES, "checkpoint__save_steps": 2, "checkpoint__storage": "per_host",
        "checkpoint__output_dir": str(directory / disk), "training__global_batch_size": ROWS, **options,
    }  # fmt: skip
    loaded, screen = run_file(ODD, **values), io.StringIO()
    engine = make_engine(loaded)
    console = Console(file=screen, quiet=dist.get_rank() != 0, width=2000)
    return Trainer(loaded, engine, Rows(engine), console), screen  # type: ignore[arg-type]


def _digests(trainer: Trainer) -> Digests:
    return {name: _digest(value) for name, value in _whole(trainer).items()}


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def _save(directory: Path, disks: str, **options: Any) -> dict[str, Any]:
    """Trains to the end on one rank for each letter of `disks`."""
    trainer, screen = _trainer(directory, disks[dist.get_rank()], **options)
    trainer.train(Flag(trainer.engine))  # type: ignore[arg-type]
    return {"digests": _digests(trainer), "screen": screen.getvalue()}


def _resume(directory: Path, disks: str, **options: Any) -> dict[str, Any]:
    """What comes back on these disks, from other first values."""
    trainer, screen = _trainer(directory, disks[dist.get_rank()], **options)
    with torch.no_grad():
        for p in trainer.engine.module.parameters():
            p.fill_(7.0)
    message = _message(trainer)
    return {
        "at": trainer.at.update,
        "digests": _digests(trainer) if not message else {},
        "message": message,
        "screen": screen.getvalue(),
    }


def _sequence(directory: Path, runs: list[tuple[str, str, str, dict[str, Any]]]) -> dict[str, Any]:
    """`(name, work, disks, options)` one after the other in one start of ranks.

    work: `save`; `resume`; or the name of a run whose disks are copied, to be resumed from. Damage is done before.
    """
    found: dict[str, Any] = {}
    for name, work, disks, options in runs:
        acts = options.pop("damage", ())
        if work not in ("save", "resume"):
            found[name, "save"] = found.get((work, "save"))
            acts = [("copy", work), *acts]
        if dist.get_rank() == 0:
            _damage(directory / name, acts)
        dist.barrier()
        if work == "save":
            found[name, "save"] = _save(directory / name, disks, **options)
        else:
            found[name, "resume"] = _resume(directory / name, disks, **options)
        dist.barrier()
    return found


def _damage(directory: Path, acts: Any) -> None:
    for act, *words in acts:
        if act == "copy":
            shutil.copytree(directory.with_name(words[0]), directory, symlinks=True)
        elif act == "lose":
            shutil.rmtree(directory / words[0])
        elif act == "flip":
            flip(directory / words[0] / "checkpoint-6" / words[1], -1)


def _fails(directory: Path) -> dict[str, Any]:
    """Rank 1's host cannot write the copy that it keeps; later its file changes on the way."""
    trainer, _ = _trainer(directory / "fails", "ab"[dist.get_rank()])
    trainer.at.update = 1
    trainer.save()
    write, check = transfer.write_span, transfer.checksum

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    found = {}
    for number, (name, fake) in enumerate((("write_span", full), ("checksum", lambda data: "another"))):
        if dist.get_rank() == 1:
            setattr(transfer, name, fake)
        trainer.at.update = 2 + number
        try:
            trainer.save()
        except SaveError as error:
            found[name] = str(error)
        transfer.write_span, transfer.checksum = write, check
        dist.barrier()
    found["names"] = str(sorted(p.name for p in (directory / "fails").glob("*/*checkpoint-*")))
    return found


def _on_two(directory: Path) -> dict[str, Any]:
    second = "tensors/rank-00001.safetensors"
    found = _sequence(
        directory,
        [
            ("kept", "save", "ab", {}),
            ("kept", "resume", "ab", {}),
            ("flipped", "kept", "ab", {"damage": [("flip", "b", second)]}),
            ("flipped twice", "kept", "ab", {"damage": [("flip", "a", second), ("flip", "b", second)]}),
            ("index", "kept", "ab", {"damage": [("flip", "a", "tensors/index.json"), ("flip", "a", "manifest.json")]}),
            ("beside", "save", "ab", {"checkpoint__async_save": True}),
            ("lost", "beside", "ab", {"damage": [("lose", "b")]}),
            ("single", "save", "ab", {"checkpoint__copies": 0}),
            ("swapped", "single", "ba", {}),
            ("uncopied", "single", "ab", {"damage": [("lose", "b")]}),
            ("limited", "save", "ab", {"checkpoint__save_total_limit": 1, "checkpoint__save_steps": 1}),
            ("together", "save", "aa", {}),
            ("together", "resume", "aa", {}),
        ],
    )  # fmt: skip
    return found | {"fails": _fails(directory)}


def _on_three(directory: Path) -> dict[str, Any]:
    third = "tensors/rank-00002.safetensors"
    return _sequence(
        directory,
        [
            ("three", "save", "abc", {}),
            ("neighbours", "three", "abc", {"damage": [("lose", "b"), ("lose", "c")]}),
            ("twice", "save", "abc", {"checkpoint__copies": 2}),
            ("moved", "twice", "cab", {"damage": [("lose", "a"), ("lose", "b")]}),
            ("remote", "twice", "abc", {"damage": [("lose", "c"), ("flip", "a", third)]}),
        ],
    )


def _on_two_of_three(directory: Path) -> dict[str, Any]:
    return _sequence(directory, [("fewer", "three", "ac", {"damage": [("lose", "b")]})])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def two(place: Path) -> list[dict[Any, Any]]:
    return run_ranks(_on_two, 2, place)


@pytest.fixture(scope="module")
def three(place: Path) -> list[dict[Any, Any]]:
    return run_ranks(_on_three, 3, place)


def _files(directory: Path, update: int = 6) -> list[str]:
    return sorted(p.stem for p in (directory / f"checkpoint-{update}" / "tensors").glob("*.safetensors"))


def _same(ranks: list[dict[Any, Any]], name: str) -> None:
    for rank in ranks:
        found, right = rank[name, "resume"], rank[name, "save"]
        assert found["message"] == "" and found["at"] == 6
        assert found["digests"] == right["digests"] and len(right["digests"]) > 50


def test_each_host_writes_its_own_and_one_copy(place: Path, two: Any, three: Any) -> None:
    for disk in "ab":
        assert _files(place / "kept" / disk) == ["rank-00000", "rank-00001"]
    assert _files(place / "single" / "b") == ["rank-00001"]
    left = {disk: _files(place / "three" / disk) for disk in "ac"}
    assert left == {"a": ["rank-00000", "rank-00002"], "c": ["rank-00001", "rank-00002"]}
    manifests = {(place / "kept" / disk / "checkpoint-6" / "manifest.json").read_bytes() for disk in "ab"}
    assert len(manifests) == 1
    both = [(place / "kept" / disk / "checkpoint-6/tensors/rank-00001.safetensors").read_bytes() for disk in "ab"]
    assert both[0] == both[1] and len(both[0]) > 1000
    assert [verify(place / "kept" / disk / f"checkpoint-{u}") for disk in "ab" for u in (2, 4, 6)] == [[]] * 6
    assert "2 hosts" in two[0]["kept", "save"]["screen"]


@pytest.mark.parametrize("name", ("kept", "swapped", "index", "together"))
def test_resume_where_all_disks_are_there(name: str, two: Any) -> None:
    """On the same hosts; with ranks exchanged and no copies; with the small files of one host damaged; on one host."""
    _same(two, name)


def test_a_lost_disk_is_made_up_for_by_its_copy(place: Path, two: Any) -> None:
    """Saved in the background: after a resume without b's disk, rank 1 has what a keeps of it."""
    _same(two, "lost")
    assert "Resumed" not in two[0]["lost", "resume"]["screen"]


def test_two_copies_outlive_two_disks(three: Any) -> None:
    """And ranks are on other hosts than before."""
    _same(three, "moved")


def test_what_is_lost_for_good_is_named(two: Any, three: Any) -> None:
    """Without a copy; and two neighbours of three."""
    for rank in two:
        assert (
            "no host that is here has tensors/rank-00001.safetensors, which was on"
            in rank["uncopied", "resume"]["message"]
        )
    for rank in three:
        message = rank["neighbours", "resume"]["message"]
        assert "no host that is here has tensors/rank-00001.safetensors, which was on" in message
        assert "(host 1) and" in message and "(host 2)" in message
        assert "is whole on the 3 hosts that are here" in message and rank["neighbours", "resume"]["at"] == 0


def test_a_damaged_file_gives_way_to_its_copy(two: Any, three: Any) -> None:
    """One flipped bit of rank 1's file on its own host; with the copy damaged too, the checkpoint before is used.

    And of a copy that another host is asked for first, its own disk being lost: a second copy is asked for then.
    """
    _same(three, "remote")
    assert "rank-00002.safetensors is not what was written" in three[0]["remote", "resume"]["screen"]
    _same(two, "flipped")
    screen = two[0]["flipped", "resume"]["screen"]
    assert "rank-00001.safetensors is not what was written" in screen and "Another host is asked" in screen
    for rank in two:
        assert rank["flipped twice", "resume"]["at"] == 4 and rank["flipped twice", "resume"]["message"] == ""
    assert "checkpoint-6 is not used" in two[0]["flipped twice", "resume"]["screen"]


def test_retention_on_each_host(place: Path, two: Any) -> None:
    names = [sorted(p.name for p in (place / "limited" / disk).glob("*checkpoint-*")) for disk in "ab"]
    assert names == [["checkpoint-6"]] * 2
    assert {(place / "limited" / disk / "latest").resolve().name for disk in "ab"} == {"checkpoint-6"}


def test_a_copy_that_cannot_be_made_is_no_checkpoint(two: Any) -> None:
    """Both ranks learn of it; a half one stays nowhere, and the one before is there."""
    for rank in two:
        found = rank["fails"]
        assert "rank 1: OSError: [Errno 28] No space left on device" in found["write_span"]
        assert "has not arrived as rank 0 has written it" in found["checksum"]
        assert found["names"] == str(["checkpoint-1", "checkpoint-1"])


def test_fewer_hosts(place: Path, three: Any) -> None:
    """Two of three go on without the third, and one alone cannot: it is told what is missing."""
    found = run_ranks(_on_two_of_three, 2, place)
    for rank in found:
        assert rank["fewer", "resume"]["digests"] == three[0]["three", "save"]["digests"]
    (alone,) = run_ranks(_sequence, 1, place, [("alone", "three", "a", {})])
    message = alone["alone", "resume"]["message"]
    assert "none of them is good" in message and "rank-00001.safetensors is not here: it was written on" in message

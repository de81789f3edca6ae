"""What is found, verified, refused and kept of checkpoint directories, without ranks. Rows A57, A59, A60 and A62."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import TENSORS_OF, flip, forge, written

from shardwright.checkpoint.directory import (
    Retention,
    best_of,
    complete_checkpoints,
    restore_replaced,
    skipped,
    surplus,
)
from shardwright.checkpoint.manifest import MANIFEST, problems_of, read_index, read_manifest, verify
from shardwright.checkpoint.parts import PIECE_BYTES, RankPart, pieces, rows_of, writers
from shardwright.checkpoint.reader import covers, read_into
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.errors import CheckpointError, DamagedCheckpointError
from shardwright.mesh.shard_geometry import Box

FILES = ("manifest.json", "config.yaml", "tensors/index.json", "tensors/rank-00000.safetensors")


def test_a_directory_without_manifest_never_counts(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    for update in (10, 2):
        written(tmp_path, update)
    (tmp_path / ".checkpoint-12.incomplete").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoint-10"
    assert (tmp_path / "latest").resolve().name == "checkpoint-2", "the last one that was written"
    assert [(path.name, reason) for path, reason in skipped(tmp_path)] == [
        (".checkpoint-12.incomplete", "it was not completed"),
        ("checkpoint-9", "it has no manifest.json"),
    ]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path / "checkpoint-9"))


def test_tensors_are_safetensors_that_others_read(tmp_path: Path) -> None:
    """A62: nothing but JSON and safetensors, which the safetensors package reads."""
    path = written(tmp_path, 3, numbers={"optimizer.weight.count": 7})
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == sorted(FILES)
    found = load_file(path / FILES[3])
    assert found.keys() == TENSORS_OF.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in TENSORS_OF.items())
    assert verify(path) == []
    assert read_index(path).numbers == {"optimizer.weight.count": 7}
    assert read_manifest(path).target_tokens == 30


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", (0, 20, -9, -3))
def test_a_flipped_byte_is_found(name: str, at: int, tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    assert verify(path) == []
    flip(path / name, at % (path / name).stat().st_size if abs(at) < (path / name).stat().st_size else 0)
    (problem,) = verify(path)
    assert name in problem
    flip(path / name, at % (path / name).stat().st_size if abs(at) < (path / name).stat().st_size else 0)
    assert verify(path) == []


def test_every_byte_of_the_tensors_is_covered(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    for at in range((path / FILES[3]).stat().st_size):
        flip(path / FILES[3], at)
        assert len(verify(path)) == 1, at
        flip(path / FILES[3], at)


def test_a_flipped_byte_is_not_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    flip(path / FILES[3], -1)
    into = {key: torch.zeros_like(value) for key, value in TENSORS_OF.items()}
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000\.safetensors is not what was written: bytes \d+ to"):
        read_into(read_index(path), into)


@pytest.mark.parametrize("name", FILES)
def test_a_short_or_missing_file_gives_way_to_the_one_before(name: str, tmp_path: Path) -> None:
    """A57 A59: the manifest names every part with its size; without any of them an older checkpoint is used."""
    older, newer = written(tmp_path, 3), written(tmp_path, 6)
    data = (newer / name).read_bytes()
    (newer / name).write_bytes(data[:-1] if name != MANIFEST else data[:-5])
    assert find_checkpoint(tmp_path, "auto") == older
    assert [path for path, _ in skipped(tmp_path)] == [newer]
    if name != MANIFEST:
        assert skipped(tmp_path)[0][1] == f"{newer / name} has {len(data) - 1:,} bytes where {len(data):,} were written"
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        find_checkpoint(tmp_path, str(newer))
    (newer / name).unlink()
    assert find_checkpoint(tmp_path, "auto") == older and len(skipped(tmp_path)) == 1
    for file in FILES[1:]:
        (older / file).unlink()
    with pytest.raises(CheckpointError, match="none of them is good"):
        find_checkpoint(tmp_path, "auto")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"update": 3,')
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="has format 1; this version reads 2"):
        read_manifest(tmp_path)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", (False, True))
def test_a_poisoned_file_is_refused_and_not_executed(name: str, forged: bool, tmp_path: Path) -> None:
    """The payload works where it is unpickled; in a checkpoint, with checksums made right too, it is data or refused."""
    target, path = tmp_path / "executed", written(tmp_path / "run", 3)
    payload = pickle.dumps(Payload(target))
    pickle.loads(payload)
    target.rmdir()  # it works
    size = (path / name).stat().st_size
    if forged and name != MANIFEST:
        forge(path, name, payload)
    else:
        (path / name).write_bytes(payload.ljust(size, b"\0"))
    assert any(name in problem for problem in verify(path))
    into = {key: torch.zeros_like(value) for key, value in TENSORS_OF.items()}
    if name != FILES[1]:
        with pytest.raises(CheckpointError, match=Path(name).name):
            read_into(read_index(path), into)
    assert not target.exists()


@pytest.mark.parametrize(
    "change",
    (
        {"file": "../../secret.safetensors"},
        {"file": "/etc/passwd"},
        {"start": [-1, 0]},
        {"start": [3, 0]},
        {"begin": -8},
        {"rows": 0},
        {"checksums": []},
        {"shape": [10**9, 3]},
    ),
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    found = json.loads((path / FILES[2]).read_bytes())
    names = ("file", "begin", "start", "shape", "rows", "checksums")
    part = dict(zip(names, found["tensors"]["model.weight"]["parts"][0])) | change
    found["tensors"]["model.weight"]["parts"] = [list(part.values())]
    forge(path, FILES[2], json.dumps(found).encode())
    assert problems_of(path) == []
    with pytest.raises(CheckpointError, match="is no index of a checkpoint"):
        read_index(path)
    assert len(verify(path)) == 1


@pytest.mark.parametrize(
    ("retention", "gone"),
    (
        (Retention(), []),
        (Retention(2), [2, 4, 6, 8, 10]),
        (Retention(2, every=4), [2, 6, 10]),
        (Retention(1, best=True), [2, 4, 8, 10, 12]),
        (Retention(1, every=5, best=True), [2, 4, 8, 12]),
    ),
)
def test_which_go(retention: Retention, gone: list[int]) -> None:
    """A60: 16 and 18 are ahead of 14, which was just written; 16 has the lowest loss of all."""
    updates, losses = [2, 4, 6, 8, 10, 12, 14, 16, 18], {2: 3.0, 6: 1.0, 8: 1.0, 16: 0.5}
    assert surplus(updates, 14, losses, retention) == gone
    assert best_of(losses, 14) == 6 and best_of(losses, 1) is None


def test_what_is_kept_on_the_disk(tmp_path: Path) -> None:
    """A60: the best one stays and is linked; at no instant is there less than one, also where one is replaced."""
    for update, loss in ((1, 5.0), (2, 3.0), (3, 4.0), (4, None), (5, 6.0)):
        written(tmp_path, update, retention=Retention(1, best=True), eval_loss=loss)
        assert complete_checkpoints(tmp_path)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-5"]
    assert (tmp_path / "best").resolve().name == "checkpoint-2"
    (tmp_path / "checkpoint-5").rename(tmp_path / ".checkpoint-5.replaced")  # a crash while it was replaced
    restore_replaced(tmp_path)
    assert verify(tmp_path / "checkpoint-5") == []
    written(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "checkpoint-2",
        "checkpoint-5",
        "latest",
    ]


def test_pieces_are_runs_of_rows() -> None:
    box = Box((5, 2), (10, 3))
    assert [p.start[0] for p in pieces(box, 4)] == [5, 9, 13] and [p.shape for p in pieces(box, 4)][-1] == (
        2,
        3,
    )
    assert rows_of(Box((0, 0), (10**6, 1024)), 4) * 1024 * 4 == PIECE_BYTES
    assert rows_of(Box((), ()), 4) == rows_of(Box((0, 0), (2, 10**9)), 4) == 1
    assert list(pieces(Box((0,), (0,)), 4)) == [] and list(pieces(Box((), ()), 1)) == [Box((), ())]
    assert box.meet(Box((0, 0), (6, 9))) == Box((5, 2), (1, 3)) and box.meet(Box((0, 0), (5, 9))) is None


def test_who_writes_what() -> None:
    """Replicas are written once and shared out; what is missing or ambiguous is refused."""
    whole = [RankPart(f"model.{n}", torch.float32, (8,), Box((0,), (8,))) for n in range(4)]
    halves = [RankPart("model.s", torch.float32, (6,), Box((start,), (3,))) for start in (0, 3)]
    first, second = writers([[*whole, halves[0]], [*whole, halves[1]]])
    assert sorted(h.key for h in first) == sorted(["model.s", "model.0", "model.2"])
    assert sorted(h.key for h in second) == sorted(["model.s", "model.1", "model.3"])
    with pytest.raises(CheckpointError, match="hold 3 elements of"):
        writers([[halves[0]], []])
    other = RankPart("model.0", torch.bfloat16, (8,), Box((0,), (8,)))
    with pytest.raises(
        CheckpointError, match=r"model.0 is torch.bfloat16 \(8,\) on one rank and torch.float32 \(8,\) on another"
    ):
        writers([[whole[0]], [other]])


def test_patterns_of_partial_loads() -> None:
    assert covers(["head"], "model.head.weight") and covers(["head"], "optimizer.head.weight.exp_avg")
    assert covers(["*lora*"], "model.blocks.0.lora_a") and not covers(["head"], "model.ahead.weight")
    assert not covers([], "model.head.weight")

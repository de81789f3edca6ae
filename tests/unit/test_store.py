"""What is found and refused of checkpoint directories, without ranks. Row A60."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.checkpoint.store import MANIFEST, complete_checkpoints, find, read_manifest
from shardwright.errors import CheckpointError


def test_a_directory_without_manifest_never_counts(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / ".checkpoint-12.incomplete").mkdir()
    for update in (10, 2):
        (tmp_path / f"checkpoint-{update}").mkdir()
        (tmp_path / f"checkpoint-{update}" / MANIFEST).write_text("{}")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find(tmp_path, str(tmp_path / "checkpoint-9"))


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"update": 3,')
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        read_manifest(tmp_path)

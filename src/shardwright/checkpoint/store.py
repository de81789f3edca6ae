"""Checkpoints as the rest of the program sees them: `save`, `find`, `load`, `verify`, and what a manifest says.

See `directory` for what lies on the disk, `saver` for how it gets there, `reader` for how it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardwright.checkpoint.choose import asked, find
from shardwright.checkpoint.directory import (
    BEST,
    LATEST,
    bring_back,
    complete_checkpoints,
    members_of,
    skipped,
)
from shardwright.checkpoint.files import CONFIG, INDEX, MANIFEST, TENSORS
from shardwright.checkpoint.lineage import line_of, read_choice
from shardwright.checkpoint.manifest import (
    Manifest,
    problems_of,
    read_config,
    read_index,
    read_manifest,
    stored_keys,
    torch_version,
    verify,
)
from shardwright.checkpoint.multi_host.hosts import from_rank
from shardwright.checkpoint.parts import Value
from shardwright.checkpoint.reader import load, read_whole
from shardwright.checkpoint.retention import Retention
from shardwright.checkpoint.saver import Saver

__all__ = [
    "BEST",
    "CONFIG",
    "INDEX",
    "LATEST",
    "MANIFEST",
    "TENSORS",
    "Manifest",
    "Retention",
    "Saver",
    "asked",
    "bring_back",
    "complete_checkpoints",
    "find",
    "load",
    "problems_of",
    "read_choice",
    "read_config",
    "read_index",
    "read_manifest",
    "read_whole",
    "save",
    "skipped",
    "stored_keys",
    "torch_version",
    "verify",
]


def save(output_dir: Path, state: Mapping[str, Value], manifest: Manifest, run_yaml: str, keep: int | None) -> Path:
    """Writes one checkpoint and returns its directory; collective. keep: how many of the newest stay, None for all.

    The checkpoint is one of the branch that the directory follows. Raises `SaveError` on all ranks when one could not write;
    nothing older is touched before the new checkpoint is complete.
    """
    saver = Saver(output_dir, Retention(keep))
    line = from_rank(0, line_of(read_choice(output_dir), members_of(output_dir)))
    saver.save(state, replace(manifest, lineage=line), run_yaml)
    path = saver.finish()
    assert path is not None
    return path

"""Checkpoints made without ranks, and what can be done to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwright.checkpoint import directory
from shardwright.checkpoint.directory import Retention
from shardwright.checkpoint.index import TENSORS, file_order, write_parts
from shardwright.checkpoint.parts import rank_parts

TENSORS_OF = {
    "model.weight": torch.arange(12.0).reshape(4, 3),
    "model.mask": torch.tensor([True, False, True]),
    "model.scale": torch.tensor(2.5, dtype=torch.float64),
    "optimizer.weight.exp_avg": torch.arange(12.0).reshape(4, 3).bfloat16(),
}


def written(
    output_dir: Path,
    update: int,
    tensors: dict[str, Tensor] = TENSORS_OF,
    numbers: dict[str, int | float] | None = None,
    retention: Retention | None = None,
    notes: list[str] | None = None,
    **manifest: Any,
) -> Path:
    """A complete checkpoint that one rank would have written. notes: takes what the save says."""
    said_before = directory.prepare(output_dir, update)
    place = directory.incomplete_of(output_dir, update) / TENSORS / "rank-00000.safetensors"
    record = write_parts(place, [(held, tensors[held.key]) for held in file_order(rank_parts(tensors))])
    said = directory.Manifest(update, 10 * update, "rows", "", 1, "zero3 1 rank", "", **manifest)
    after = directory.complete(output_dir, [record], numbers or {}, said, "model: {}\n", retention or Retention())
    if notes is not None:
        notes += [*said_before, *after]
    return directory.checkpoint_of(output_dir, update)


def flip(path: Path, at: int) -> None:
    """Changes one bit of byte `at` of a file (from its end where negative)."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(path: Path, name: str, data: bytes) -> None:
    """Replaces a file of a checkpoint and makes every checksum right again, as somebody who means harm would."""
    (path / name).write_bytes(data)
    values = json.loads((path / "manifest.json").read_text())
    values["files"][name] = {"bytes": len(data), "checksum": xxhash.xxh3_64_hexdigest(data)}
    del values["checksum"]
    text = json.dumps(values, sort_keys=True)
    values["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
    (path / "manifest.json").write_text(json.dumps(values))

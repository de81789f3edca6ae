"""What two runs have come to: stored tensors bit for bit, and the entries of their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint.manifest import read_manifest
from shardwright.checkpoint.reader import read_whole
from shardwright.measure import metric_names as names
from shardwright.measure.metrics_log import METRICS


def stored_state(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, and every number as one; needs no ranks."""
    tensors, numbers = read_whole(path)
    return tensors | {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}


def first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """The first tensor whose bits differ, and by how much; empty when all are equal."""
    if one.keys() != other.keys():
        return f"{len(one.keys() ^ other.keys())} names differ: {min(one.keys() ^ other.keys())}"
    for name, value in one.items():
        right = other[name]
        if value.dtype != right.dtype or value.shape != right.shape:
            return f"{name} is {value.dtype} {tuple(value.shape)} against {right.dtype} {tuple(right.shape)}"
        if not torch.equal(_bits(value), _bits(right)):
            return f"{name} differs by {(value.double() - right.double()).abs().max().item():.2e}"
    return ""


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def compare_checkpoints(one: Path, other: Path) -> str:
    """What differs between two checkpoints of the same update; empty when nothing does."""
    left, right = read_manifest(one), read_manifest(other)
    if (left.update, left.target_tokens) != (right.update, right.target_tokens):
        return f"update {left.update}, {left.target_tokens} targets against {right.update}, {right.target_tokens}"
    return first_difference(stored_state(one), stored_state(other))


_EXACT = (names.LOSS, names.GRAD_NORM, names.LEARNING_RATE, names.TARGETS_SO_FAR, names.REAL_TOKENS, names.EVAL_LOSS)
ROWS = (names.TARGETS_SO_FAR, names.TARGET_TOKENS, names.REAL_TOKENS)


def entries(output_dir: Path) -> list[dict[str, float]]:
    """The entries of metrics.jsonl."""
    lines = (output_dir / METRICS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def compare_metrics(output_dir: Path, reference: Path) -> tuple[int | None, str]:
    """(update, what) of the first entry that differs from the reference's, or is missing, or doubled; (None, "") for none."""
    own, right = entries(output_dir), entries(reference)
    for one, other in zip(own, right):
        if one["update"] != other["update"]:
            return int(other["update"]), f"metrics have update {one['update']} where {other['update']} belongs"
        for key in _EXACT:
            if one.get(key) != other.get(key):
                return int(
                    other["update"]
                ), f"{key} of update {other['update']} is {one.get(key)}, not {other.get(key)}"
    if len(own) != len(right):
        return int((own + right)[-1]["update"]), f"metrics have {len(own)} entries, the reference {len(right)}"
    return None, ""

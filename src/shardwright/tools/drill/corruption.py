"""Corruption of checkpoint files: every kind must be detected, and no file may be executed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.checkpoint.index import INDEX, TENSORS
from shardwright.checkpoint.manifest import MANIFEST, verify


def _flip(path: Path) -> None:
    """Inverts one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


class _Command:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self._marker,)


def _replace_by_pickle(path: Path) -> None:
    """Replaces a file by a pickle that makes the file `executed` beside the checkpoint when it is loaded."""
    checkpoint = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
    path.write_bytes(pickle.dumps(_Command(checkpoint.parent / EXECUTED)))


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


EXECUTED, PICKLE = "executed", "replaced by a pickled command"
KINDS: dict[str, Callable[[Path], None]] = {
    "a flipped bit": _flip,
    "cut in half": _truncate,
    "gone": lambda path: path.unlink(),
    PICKLE: _replace_by_pickle,
}


def files_of(checkpoint: Path) -> Iterator[Path]:
    """One file of each kind: manifest, index, a tensor file."""
    tensors = checkpoint / TENSORS
    yield from (checkpoint / MANIFEST, tensors / INDEX, max(tensors.glob("*.safetensors")))


def corrupt(checkpoint: Path, kind: str, number: int) -> str:
    """Applies `kind` to one file of the checkpoint, chosen by `number`; returns what was done."""
    path = list(files_of(checkpoint))[number % 3]
    KINDS[kind](path)
    return f"{path.relative_to(checkpoint.parent)} {kind}"


def undetected(checkpoint: Path, scratch: Path) -> list[str]:
    """Corruptions of a copy of `checkpoint` that `verify` does not detect; empty is right."""
    missed = []
    for number in range(len(list(files_of(checkpoint)))):
        for kind in KINDS:
            copy = scratch / checkpoint.name
            shutil.copytree(checkpoint, copy)
            done = corrupt(copy, kind, number)
            if not verify(copy):
                missed.append(done)
            shutil.rmtree(copy)
    return missed

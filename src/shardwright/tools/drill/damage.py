"""Damage to checkpoints on the disk, each kind to a copy of its own, and what must become of a run that finds them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.checkpoint.index import INDEX, TENSORS
from shardwright.checkpoint.manifest import MANIFEST, verify


def _flip(path: Path) -> None:
    """Inverts one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


class _Command:
    """What makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self._marker,)


def _poison(path: Path) -> None:
    """Puts a pickle in place of the file that touches `executed` beside the checkpoint when it is loaded."""
    checkpoint = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
    path.write_bytes(pickle.dumps(_Command(checkpoint.parent / EXECUTED)))


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


EXECUTED, POISON = "executed", "replaced by a pickled command"
KINDS: dict[str, Callable[[Path], None]] = {
    "a flipped bit": _flip,
    "cut in half": _truncate,
    "gone": lambda path: path.unlink(),
    POISON: _poison,
}


def files_of(checkpoint: Path) -> Iterator[Path]:
    """One file of each kind: manifest, index, a tensor file."""
    tensors = checkpoint / TENSORS
    yield from (checkpoint / MANIFEST, tensors / INDEX, max(tensors.glob("*.safetensors")))


def damage(checkpoint: Path, kind: str, number: int) -> str:
    """Does `kind` to the `number`th file of the checkpoint; returns what was done."""
    path = list(files_of(checkpoint))[number % 3]
    KINDS[kind](path)
    return f"{path.relative_to(checkpoint.parent)} {kind}"


def unnoticed(checkpoint: Path, scratch: Path) -> list[str]:
    """Kinds of damage to a copy of `checkpoint` that `verify` does not see; empty is right."""
    missed = []
    for number in range(len(list(files_of(checkpoint)))):
        for kind in KINDS:
            copy = scratch / checkpoint.name
            shutil.copytree(checkpoint, copy)
            done = damage(copy, kind, number)
            if not verify(copy):
                missed.append(done)
            shutil.rmtree(copy)
    return missed

"""Reading tensors of any layout into tensors of this one, with every piece checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.directory import read_index
from shardwright.checkpoint.files import Index, damaged, read_piece
from shardwright.checkpoint.parts import PIECE_BYTES, Box, Value, box_of, byte_view, local_part, pieces
from shardwright.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")
NUMBERS_OF_GROUPS = "optimizer_group."
"""Keys that a fresh optimizer may lack: numbers of its groups that have changed since it was made."""


@dataclass(frozen=True)
class Wanted:
    """A piece of a file, and where what is needed of it goes."""

    offset: int
    box: Box
    checksum: str
    key: str
    local: Tensor
    own: Box


def covers(patterns: Sequence[str], key: str) -> bool:
    """Whether a pattern names the parameter or buffer that `key` is about."""
    name = key.partition(".")[2]
    return any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for pattern in patterns)


def load(path: Path, state: Mapping[str, Value], partial: Sequence[str] = ()) -> dict[str, int | float]:
    """Fills the tensors of `state` in place, whatever layout wrote them; returns the numbers of the checkpoint. Collective.

    Names, shapes and dtypes must be the checkpoint's exactly. partial: patterns of names that may be missing on either
    side, or differ: these tensors stay as they are. Raises `CheckpointError` on all ranks alike where the two do not fit,
    `DamagedCheckpointError` where a byte is not what was written; tensors are then partly overwritten.
    """
    return load_index(path, agreed(lambda: read_index(path)), state, partial)


def load_index(
    path: Path, index: Index, state: Mapping[str, Value], partial: Sequence[str] = ()
) -> dict[str, int | float]:
    """`load` with the index already read."""
    _agree_fit(path, index, state, partial)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    agreed(lambda: read_into(index, tensors, partial))
    return index.numbers


def agreed(work: Callable[[], T]) -> T:
    """What `work` returns; what any rank finds wrong with a checkpoint is so on all of them. Collective."""
    result: list[T] = []
    problem = (False, "")
    try:
        result.append(work())
    except (CheckpointError, OSError) as error:
        damaged = isinstance(error, DamagedCheckpointError | OSError)
        problem = (not damaged, str(error))
    found = [(other, text) for other, text in _everyone(problem) if text]
    if found:
        kind = CheckpointError if any(other for other, _ in found) else DamagedCheckpointError
        raise kind(" ".join(dict.fromkeys(text for _, text in found)))
    return result[0]


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _agree_fit(path: Path, index: Index, state: Mapping[str, Value], partial: Sequence[str]) -> None:
    """Raises `CheckpointError` on every rank unless names, shapes and dtypes of all ranks are those of the index."""
    stored = index.shapes
    there = stored.keys() | index.numbers.keys()
    held = {key for keys in _everyone(list(state)) for key in keys}  # pipeline stages hold different names
    missing, extra = sorted(state.keys() - there), sorted(there - held)
    wrong = [
        f"{key}: stored {stored[key][1]} {stored[key][0]}, here {tuple(value.shape)} {value.dtype}"
        for key, value in state.items()
        if isinstance(value, Tensor) and key in stored and stored[key] != (value.dtype, tuple(value.shape))
    ]
    wrong += [
        f"{key}: a number on one side and a tensor on the other"
        for key, value in state.items()
        if key in there and isinstance(value, Tensor) == (key in index.numbers)
    ]
    parts = (
        (missing, "not in the checkpoint"),
        (extra, "only in the checkpoint"),
        (wrong, "of another shape or dtype"),
    )
    problems = []
    for names, what in parts:
        left = [
            name
            for name in names
            if not covers(partial, name.split(":")[0]) and not name.startswith(NUMBERS_OF_GROUPS)
        ]
        if left:
            more = " ..." if len(left) > 5 else ""
            problems.append(f"{len(left)} {what}: {', '.join(left[:5])}{more}")
    if problem := next((text for text in _everyone("; ".join(problems)) if text), ""):
        raise CheckpointError(
            f"{path} does not fit this model. {problem}.",
            "",
            "Use the run file it was saved with, or name what may differ with checkpoint.partial.",
        )


def read_into(index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str] = ()) -> None:
    """Fills the local parts of `tensors` from the files of `index`; those that do not fit are left where `partial` covers them.

    Each piece is read once and in the order of the file, straight into the tensor where it lies there in one run.
    """
    wanted: dict[str, list[Wanted]] = {}
    for key, tensor in tensors.items():
        stored = index.tensors.get(key)
        if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            assert covers(partial, key), f"{key} was checked"
            continue
        own, local = box_of(key, tensor), local_part(tensor)
        for part in stored.parts:
            if not own.meet(part.box):
                continue
            offset = part.begin
            for piece, right in zip(pieces(part.box, part.rows), part.checksums):
                if own.meet(piece):
                    wanted.setdefault(part.file, []).append(Wanted(offset, piece, right, key, local, own))
                offset += piece.elements * tensor.element_size()
    scratch = torch.empty(0, dtype=torch.uint8)
    with ExitStack() as files, torch.no_grad():
        for name, found in sorted(wanted.items()):
            where = index.directory / name
            try:
                descriptor = files.enter_context(where.open("rb")).fileno()
            except OSError as error:
                raise damaged(where, f"cannot be read: {error.strerror}") from None
            size, right = index.headers[name]
            read_piece(descriptor, where, 0, memoryview(bytearray(size)), right, "the header")
            for want in sorted(found, key=lambda w: w.offset):
                scratch = _read(descriptor, where, want, scratch)


def read_whole(path: Path) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """Every tensor of a checkpoint, unsplit, and its numbers; needs no ranks."""
    index = read_index(path)
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in index.shapes.items()}
    read_into(index, tensors)
    return tensors, index.numbers


def _read(descriptor: int, path: Path, want: Wanted, scratch: Tensor) -> Tensor:
    """Reads one piece and puts it where it belongs; returns the scratch buffer, which may have grown."""
    met = want.own.meet(want.box)
    assert met is not None
    target = want.local[met.within(want.own)]
    if met == want.box and target.is_contiguous() and target.device.type == "cpu":
        read_piece(descriptor, path, want.offset, byte_view(target), want.checksum, want.key)
        return scratch
    size = want.box.elements * want.local.element_size()
    if scratch.numel() < size:
        scratch = torch.empty(max(size, PIECE_BYTES), dtype=torch.uint8)
    data = scratch[:size]
    read_piece(descriptor, path, want.offset, byte_view(data), want.checksum, want.key)
    whole = data.view(want.local.dtype).reshape(want.box.shape)
    target.copy_(whole[met.within(want.box)])
    return scratch


def unread(index: Index, state: Mapping[str, Value]) -> list[str]:
    """Keys of `state` that a partial load of `index` leaves as they are."""
    shapes = index.shapes
    return [
        key
        for key, value in state.items()
        if (isinstance(value, Tensor) and shapes.get(key) != (value.dtype, tuple(value.shape)))
        or (not isinstance(value, Tensor) and key not in index.numbers)
    ]

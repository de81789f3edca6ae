"""Reading tensors of any layout into tensors of this one, with every piece checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.checkpoint.files import Index, damaged, read_piece
from shardwright.checkpoint.manifest import Manifest, read_config, read_index, read_manifest
from shardwright.checkpoint.multi_host.hosts import everyone
from shardwright.checkpoint.parts import PIECE_BYTES, Box, Value, box_of, local_part, pieces
from shardwright.errors import CheckpointError, DamagedCheckpointError
from shardwright.models.safetensors_io import byte_view

T = TypeVar("T")
NUMBERS_OF_GROUPS = "optimizer_group."
"""Keys that a fresh optimizer may lack: numbers of its groups that have changed since it was made."""


@dataclass(frozen=True)
class Wanted:
    """A piece of a file, and where what is needed of it goes: `local` holds the box `own`."""

    offset: int
    box: Box
    checksum: str
    key: str
    local: Tensor
    own: Box

    @property
    def length(self) -> int:
        """Bytes of the piece."""
        return self.box.elements * self.local.element_size()

    def put(self, data: Tensor) -> None:
        """Copies from the bytes of the whole piece (uint8, contiguous) what this rank holds of it."""
        met = self.own.meet(self.box)
        assert met is not None
        whole = data.view(self.local.dtype).reshape(self.box.shape)
        with torch.no_grad():
            self.local[met.within(self.own)].copy_(whole[met.within(self.box)])


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
    source = Directory(path)
    return load_index(source, source.index(), state, partial)


class Source(Protocol):
    """A checkpoint that ranks read together, wherever its files lie. All methods are collective."""

    @property
    def path(self) -> Path: ...

    def manifest(self) -> Manifest: ...

    def config(self) -> str:
        """The resolved run file, as YAML."""
        ...

    def index(self) -> Index: ...

    def read(self, index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> None:
        """Fills `tensors` as `read_into` does. Raises the same error on all ranks."""
        ...


@dataclass(frozen=True)
class Directory:
    """A checkpoint that every rank can read whole."""

    path: Path

    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def config(self) -> str:
        return read_config(self.path)

    def index(self) -> Index:
        return agreed(lambda: read_index(self.path))

    def read(self, index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> None:
        agreed(lambda: read_into(index, tensors, partial))


def load_index(
    source: Source, index: Index, state: Mapping[str, Value], partial: Sequence[str] = ()
) -> dict[str, int | float]:
    """`load` from any source, with its index already read."""
    _agree_fit(source.path, index, state, partial)
    source.read(index, {key: value for key, value in state.items() if isinstance(value, Tensor)}, partial)
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
    found = [(other, text) for other, text in everyone(problem) if text]
    if found:
        kind = CheckpointError if any(other for other, _ in found) else DamagedCheckpointError
        raise kind(" ".join(dict.fromkeys(text for _, text in found)))
    return result[0]


def _agree_fit(path: Path, index: Index, state: Mapping[str, Value], partial: Sequence[str]) -> None:
    """Raises `CheckpointError` on every rank unless names, shapes and dtypes of all ranks are those of the index."""
    stored = index.shapes
    there = stored.keys() | index.numbers.keys()
    held = {key for keys in everyone(list(state)) for key in keys}  # pipeline stages hold different names
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
            name for name in names if not covers(partial, name.split(":")[0]) and not name.startswith(NUMBERS_OF_GROUPS)
        ]
        if left:
            more = " ..." if len(left) > 5 else ""
            problems.append(f"{len(left)} {what}: {', '.join(left[:5])}{more}")
    if problem := next((text for text in everyone("; ".join(problems)) if text), ""):
        raise CheckpointError(
            f"{path} does not fit this model. {problem}.",
            "",
            "Use the run file it was saved with, or name what may differ with checkpoint.partial.",
        )


def read_into(index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str] = ()) -> None:
    """Fills the local parts of `tensors` from the files of `index`; those that do not fit are left where `partial` covers them.

    Each piece is read once and in the order of the file, straight into the tensor where it lies there in one run.
    """
    for name, wanted in wanted_pieces(index, tensors, partial).items():
        read_file(index, name, wanted)


def wanted_pieces(index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> dict[str, list[Wanted]]:
    """The pieces of each file that the local parts of `tensors` need, in the order of the file."""
    wanted: dict[str, list[Wanted]] = {}
    for key, tensor in tensors.items():
        stored = index.tensors.get(key)
        if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            assert covers(partial, key), f"{key} was checked"
            continue
        own, local = box_of(key, tensor), local_part(tensor)
        for part in stored.parts:
            met = own.meet(part.box)
            if not met:
                continue
            offset, all_of_it = part.begin, met == part.box
            for piece, right in zip(pieces(part.box, part.rows), part.checksums):
                if all_of_it or own.meet(piece):
                    wanted.setdefault(part.file, []).append(Wanted(offset, piece, right, key, local, own))
                offset += piece.elements * tensor.element_size()
    return {name: sorted(found, key=lambda want: want.offset) for name, found in sorted(wanted.items())}


def read_file(index: Index, name: str, wanted: Sequence[Wanted]) -> None:
    """Reads pieces of one file to where they belong."""
    where, scratch = index.directory / name, torch.empty(0, dtype=torch.uint8)
    with ExitStack() as files, torch.no_grad():
        try:
            descriptor = files.enter_context(where.open("rb")).fileno()
        except OSError as error:
            raise damaged(where, f"cannot be read: {error.strerror}") from None
        size, right = index.headers[name]
        read_piece(descriptor, where, 0, memoryview(bytearray(size)), right, "the header")
        for want in wanted:
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
    if scratch.numel() < want.length:
        scratch = torch.empty(max(want.length, PIECE_BYTES), dtype=torch.uint8)
    data = scratch[: want.length]
    read_piece(descriptor, path, want.offset, byte_view(data), want.checksum, want.key)
    want.put(data)
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

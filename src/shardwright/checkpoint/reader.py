"""Reading tensors that any layout wrote into tensors of this layout, with every piece checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.checkpoint.filesystem import damaged, read_piece
from shardwright.checkpoint.index import Index
from shardwright.checkpoint.manifest import Manifest, read_config, read_index, read_manifest
from shardwright.checkpoint.parts import PIECE_BYTES, Value, local_part, pieces
from shardwright.errors import CheckpointError, DamagedCheckpointError
from shardwright.mesh.object_collectives import gather_objects
from shardwright.mesh.shard_geometry import Box, box_of
from shardwright.models.safetensors_io import byte_view

T = TypeVar("T")
NUMBERS_OF_GROUPS = "optimizer_group."
"""Keys that a fresh optimizer may lack: numbers of its groups that have changed since it was made."""


class CheckpointSource(Protocol):
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
class SharedCheckpoint:
    """A checkpoint that every rank can read whole."""

    path: Path

    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def config(self) -> str:
        return read_config(self.path)

    def index(self) -> Index:
        return _same_outcome(lambda: read_index(self.path))

    def read(self, index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> None:
        _same_outcome(lambda: read_into(index, tensors, partial))


def _same_outcome(work: Callable[[], T]) -> T:
    """What `work` returns; raises on all ranks what `work` finds wrong with a checkpoint on any of them. Collective."""
    result: list[T] = []
    problem = (False, "")
    try:
        result.append(work())
    except (CheckpointError, OSError) as error:
        problem = (isinstance(error, DamagedCheckpointError | OSError), str(error))
    found = [(is_damage, text) for is_damage, text in gather_objects(problem) if text]
    if found:
        kind = DamagedCheckpointError if all(is_damage for is_damage, _ in found) else CheckpointError
        raise kind(" ".join(dict.fromkeys(text for _, text in found)))
    return result[0]


def load(
    source: CheckpointSource, state: Mapping[str, Value], partial: Sequence[str] = (), index: Index | None = None
) -> dict[str, int | float]:
    """Fills the tensors of `state` in place, whatever layout wrote them; returns the numbers of the checkpoint. Collective.

    Names, shapes and dtypes must be those of `index`, the source's own by default. partial: patterns of names that may be
    missing on either side, or differ: these tensors stay as they are. Raises `CheckpointError` on all ranks alike where the
    two do not fit, `DamagedCheckpointError` where a byte is not what was written; tensors are then partly overwritten.
    """
    index = source.index() if index is None else index
    _check_fit(source.path, index, state, partial)
    source.read(index, {key: value for key, value in state.items() if isinstance(value, Tensor)}, partial)
    return index.numbers


def covers(patterns: Sequence[str], key: str) -> bool:
    """Whether a pattern names the parameter or buffer of `key`."""
    name = key.partition(".")[2]
    return any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for pattern in patterns)


def _check_fit(path: Path, index: Index, state: Mapping[str, Value], partial: Sequence[str]) -> None:
    """Raises `CheckpointError` on every rank unless names, shapes and dtypes of all ranks are those of the index."""
    stored = index.shapes
    there = stored.keys() | index.numbers.keys()
    held = {key for keys in gather_objects(list(state)) for key in keys}  # pipeline stages hold different names
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
    problems = []
    for names, what in (
        (sorted(state.keys() - there), "not in the checkpoint"),
        (sorted(there - held), "only in the checkpoint"),
        (wrong, "of another shape or dtype"),
    ):
        left = [
            name for name in names if not covers(partial, name.split(":")[0]) and not name.startswith(NUMBERS_OF_GROUPS)
        ]
        if left:
            more = " ..." if len(left) > 5 else ""
            problems.append(f"{len(left)} {what}: {', '.join(left[:5])}{more}")
    if problem := next((text for text in gather_objects("; ".join(problems)) if text), ""):
        raise CheckpointError(
            f"{path} does not fit this model. {problem}.",
            "",
            "Use the run file that the checkpoint was saved with, or name what may differ with checkpoint.partial.",
        )


@dataclass(frozen=True)
class WantedPiece:
    """The piece of a file from byte `offset`, and the tensor that needs a part of it: `local` holds the box `own`."""

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
        """Copies from the bytes of the whole piece (uint8, contiguous) the part that this rank holds."""
        met = self.own.meet(self.box)
        assert met is not None
        whole = data.view(self.local.dtype).reshape(self.box.shape)
        with torch.no_grad():
            self.local[met.within(self.own)].copy_(whole[met.within(self.box)])


def read_into(index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str] = ()) -> None:
    """Fills the local parts of `tensors` from the files of `index`; a tensor that `partial` covers may be left as it is.

    Each piece is read once and in the order of the file, straight into the tensor where the piece lies there in one run.
    """
    for name, wanted in wanted_pieces(index, tensors, partial).items():
        read_file(index, name, wanted)


def read_whole(path: Path) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """Every tensor of a checkpoint, unsplit, and its numbers; needs no ranks."""
    index = read_index(path)
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in index.shapes.items()}
    read_into(index, tensors)
    return tensors, index.numbers


def wanted_pieces(index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> dict[str, list[WantedPiece]]:
    """The pieces of each file that the local parts of `tensors` need, in the order of the file."""
    wanted: dict[str, list[WantedPiece]] = {}
    for key, tensor in tensors.items():
        stored = index.tensors.get(key)
        if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            assert covers(partial, key), f"{key} was checked"
            continue
        own, local = box_of(tensor, key), local_part(tensor)
        for part in stored.parts:
            met = own.meet(part.box)
            if not met:
                continue
            offset, all_of_it = part.begin, met == part.box
            for piece, expected in zip(pieces(part.box, part.rows), part.checksums):
                if all_of_it or own.meet(piece):
                    wanted.setdefault(part.file, []).append(WantedPiece(offset, piece, expected, key, local, own))
                offset += piece.elements * tensor.element_size()
    return {name: sorted(found, key=lambda want: want.offset) for name, found in sorted(wanted.items())}


def read_file(index: Index, name: str, wanted: Sequence[WantedPiece]) -> None:
    """Reads pieces of one file to where they belong."""
    path, scratch = index.directory / name, torch.empty(0, dtype=torch.uint8)
    try:
        file = path.open("rb")
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    with file, torch.no_grad():
        size, expected = index.headers[name]
        read_piece(file.fileno(), path, 0, memoryview(bytearray(size)), expected, "the header")
        for want in wanted:
            scratch = _read(file.fileno(), path, want, scratch)


def _read(descriptor: int, path: Path, want: WantedPiece, scratch: Tensor) -> Tensor:
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

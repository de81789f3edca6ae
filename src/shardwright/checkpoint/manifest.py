"""What a checkpoint says of itself, and whether its files are what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.files import (
    CONFIG,
    INDEX,
    MANIFEST,
    TENSORS,
    Index,
    checksum,
    damaged,
    file_pieces,
    parse_index,
    read_checked,
    read_piece,
)
from shardwright.checkpoint.lineage import Lineage, Member, parse_lineage
from shardwright.errors import CheckpointError

FORMAT = 2
_FILES = re.compile(r"config\.yaml|tensors/index\.json|tensors/rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    update: updates done, so the number of the next one. target_tokens: trained so far. data_fingerprint: of data,
    tokenizer and settings. row_order: what else says which rows an update holds.
    world_size, layout: of the run that wrote it; it can be read by any other.
    eval_loss: of these weights, where they were evaluated. best: (update, lowest evaluation loss so far).
    cursor: the rows that are done, and where the next update begins among them; None where nobody counted them.
    hosts: names of those whose disks hold it together; empty where it lies in one directory.
    lineage: the branches of the run that lead to it. eval_data: fingerprint of the rows that eval_loss and best are about.
    """

    update: int
    target_tokens: int
    data_fingerprint: str
    row_order: str
    world_size: int
    layout: str
    torch_version: str
    eval_loss: float | None = None
    best: tuple[int, float] | None = None
    cursor: dict[str, Any] | None = None
    hosts: tuple[str, ...] = ()
    lineage: Lineage = ()
    eval_data: str = ""
    format: int = FORMAT


def manifest_text(manifest: Manifest, files: Mapping[str, Any]) -> str:
    """JSON whose last key is the checksum of all before it. files: name -> bytes, and what else is recorded of each."""
    values = {**asdict(manifest), "files": files}
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1) + "\n"


def _checksum(values: Mapping[str, Any]) -> str:
    return checksum(json.dumps(values, sort_keys=True).encode())


def _values(path: Path) -> dict[str, Any]:
    """The content of a manifest. Raises `DamagedCheckpointError` unless its checksum is right."""
    where = path / MANIFEST
    try:
        values: dict[str, Any] = json.loads(where.read_bytes())
        right = values.pop("checksum", None)
        files = values.get("files", {})
        named = all(_FILES.fullmatch(name) and isinstance(files[name]["bytes"], int) for name in files)
    except OSError as error:
        raise damaged(where, f"cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise damaged(where, f"is damaged: {error}") from None
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {values.get('format')}; this version reads {FORMAT}.")
    if right != _checksum(values):
        raise damaged(where, "is damaged: its checksum differs")
    if not named:
        raise CheckpointError(f"{where} names files that do not belong to a checkpoint: {', '.join(files)}.")
    return values


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`."""
    values = _values(path)
    del values["files"]
    best, hosts, stream = values.pop("best"), values.pop("hosts", ()), values.pop("stream", None)
    values.setdefault("cursor", stream)  # older checkpoints have the cursor of a stream only, under this name
    lineage = _lineage(path, values.pop("lineage", ()))
    return Manifest(**values, best=tuple(best) if best else None, hosts=tuple(hosts), lineage=lineage)


def _lineage(path: Path, found: Any) -> Lineage:
    try:
        return parse_lineage(found)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path / MANIFEST} has a lineage that this version cannot read: {found!r}.") from None


def read_index(path: Path) -> Index:
    """What the checkpoint at `path` holds. Raises `DamagedCheckpointError` where the index is not what was written."""
    record = _values(path)["files"].get(f"{TENSORS}/{INDEX}", {})
    return parse_index(path / TENSORS, read_checked(path / TENSORS / INDEX, record))


def read_config(path: Path) -> str:
    """The resolved run file of the checkpoint at `path`, as YAML."""
    data = read_checked(path / CONFIG, _values(path)["files"].get(CONFIG, {}))
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path / CONFIG} is no text.") from None


def stored_keys(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, unsplit shape) of every tensor in the checkpoint."""
    return read_index(path).shapes


@dataclass(frozen=True)
class Share:
    """What one directory has of a checkpoint.

    member: what its manifest says of its place in the run. checksum: of the manifest, equal on hosts that wrote it together.
    held: files whose sizes are right. absent: the others, with the names of the hosts that had them. wrong: files that are not
    as they were written.
    """

    member: Member
    checksum: str
    held: tuple[str, ...]
    absent: dict[str, tuple[str, ...]]
    wrong: tuple[str, ...]


def share_of(path: Path) -> Share:
    """What the directory `path` has of its checkpoint, by names and sizes. Raises `CheckpointError` for its manifest."""
    values = _values(path)
    held, absent, wrong = [], {}, []
    for name, record in values["files"].items():
        hosts = tuple(values["hosts"][number] for number in record.get("hosts", ()))
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            absent[name] = hosts
            if not (hosts and isinstance(error, FileNotFoundError)):
                wrong.append(f"{path / name} cannot be read: {error.strerror}.")
            continue
        if size == record["bytes"]:
            held.append(name)
        else:
            absent[name] = hosts
            wrong.append(f"{path / name} has {size:,} bytes where {record['bytes']:,} were written.")
    return Share(_member(path, values), _checksum(values), tuple(held), absent, tuple(wrong))


def member_of(path: Path) -> Member:
    """The place of the checkpoint at `path` in its run."""
    return _member(path, _values(path))


def _member(path: Path, values: Mapping[str, Any]) -> Member:
    return Member(path, values["update"], _lineage(path, values.get("lineage", ())))


def problems_of(path: Path, whole: bool = True) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell, without reading the tensors; empty when nothing is.

    whole: files that other hosts keep are missed too.
    """
    try:
        share = share_of(path)
    except CheckpointError as error:
        return [str(error)]
    elsewhere = [(path / name, hosts) for name, hosts in share.absent.items() if hosts and whole]
    return [
        *share.wrong,
        *(
            f"{file} is not here: it was written on {' and '.join(hosts)}."
            for file, hosts in elsewhere
            if not file.exists()
        ),
    ]


def verify(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`, after reading every byte of it; empty when it is good. Needs no ranks."""
    found = problems_of(path)
    if found:
        return found
    try:
        index = read_index(path)
        read_config(path)
    except CheckpointError as error:
        return [str(error)]
    sizes = {name: record["bytes"] for name, record in _values(path)["files"].items()}
    for name in sorted(index.headers):
        try:
            _verify_file(index, name, sizes.get(f"{TENSORS}/{name}", -1))
        except CheckpointError as error:
            found.append(str(error))
    return found


def _verify_file(index: Index, name: str, size: int) -> None:
    path, end = index.directory / name, 0
    with path.open("rb") as file:
        for begin, length, right, key in file_pieces(index, name):
            if begin != end:
                raise damaged(path, f"has bytes from {end} that the index does not name")
            read_piece(file.fileno(), path, begin, memoryview(bytearray(length)), right, key)
            end = begin + length
    if end != size:
        raise damaged(path, f"has bytes from {end} that the index does not name")


def torch_version() -> str:
    """The version of torch that writes."""
    return torch.__version__

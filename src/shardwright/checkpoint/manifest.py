"""The manifest of a checkpoint: facts about the run, records of the files, and whether the files are as written.

A branch of a run begins where the run resumes from another checkpoint than the newest one of the branch before. A manifest
lists the branches that lead to its checkpoint (its lineage), so the order of descent survives when other checkpoints are
removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.filesystem import checksum, damaged, read_checked
from shardwright.checkpoint.index import INDEX, TENSORS, Index, parse_index, verify_file
from shardwright.errors import CheckpointError

MANIFEST, CONFIG = "manifest.json", "config.yaml"
FORMAT = 2
_FILES = re.compile(r"config\.yaml|tensors/index\.json|tensors/rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class Branch:
    """A branch of a run. begin: updates done where the branch begins.

    number: counted in one `output_dir`, so the branch with the highest number was chosen last.
    """

    number: int
    id: str
    begin: int


Lineage = tuple[Branch, ...]
"""The branches that lead to a checkpoint, the first one first. Empty for checkpoints of versions without branches."""


@dataclass(frozen=True)
class LineageNode:
    """A checkpoint in the tree of branches. update: updates done."""

    path: Path
    update: int
    lineage: Lineage

    def is_on(self, lineage: Lineage) -> bool:
        """Whether a run with this lineage has passed through the checkpoint."""
        depth = len(self.lineage)
        return lineage[:depth] == self.lineage and (depth == len(lineage) or self.update <= lineage[depth].begin)


def parse_lineage(found: Iterable[Mapping[str, Any]]) -> Lineage:
    """The lineage in the JSON of a manifest. Raises `KeyError`, `TypeError` or `ValueError` for any other JSON."""
    return tuple(Branch(int(b["number"]), str(b["id"]), int(b["begin"])) for b in found)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    update: int
    """Updates done, so the number of the next one."""
    target_tokens: int
    """Target tokens trained so far."""
    data_fingerprint: str
    """Of data, tokenizer and data settings."""
    row_order: str
    """The other settings that say which rows an update holds."""
    world_size: int
    """Ranks of the run that wrote the checkpoint; any other number can read it."""
    layout: str
    torch_version: str
    eval_loss: float | None = None
    """Evaluation loss of these weights; None where they were not evaluated."""
    best: tuple[int, float] | None = None
    """(update, loss) of the lowest evaluation loss so far."""
    cursor: dict[str, Any] | None = None
    """The rows that are done, and where the next update begins among them; None where nobody counted rows."""
    hosts: tuple[str, ...] = ()
    """Hosts whose disks hold the checkpoint together; empty where all of it lies in one directory."""
    lineage: Lineage = ()
    eval_data: str = ""
    """Fingerprint of the rows that `eval_loss` and `best` were computed on."""
    format: int = FORMAT


def manifest_text(manifest: Manifest, files: Mapping[str, Any]) -> str:
    """JSON whose last key is the checksum of all before it. files: name -> record with `bytes` and more."""
    values = {**asdict(manifest), "files": files}
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1) + "\n"


def _checksum(values: Mapping[str, Any]) -> str:
    return checksum(json.dumps(values, sort_keys=True).encode())


def _values(path: Path) -> dict[str, Any]:
    """The content of a manifest. Raises `DamagedCheckpointError` unless its checksum is right."""
    where = path / MANIFEST
    try:
        values: dict[str, Any] = json.loads(where.read_bytes())
        expected = values.pop("checksum", None)
        files = values.get("files", {})
        named = all(_FILES.fullmatch(name) and isinstance(files[name]["bytes"], int) for name in files)
    except OSError as error:
        raise damaged(where, f"cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise damaged(where, f"is damaged: {error}") from None
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {values.get('format')}; this version reads {FORMAT}.")
    if expected != _checksum(values):
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
    """The index of the checkpoint at `path`. Raises `DamagedCheckpointError` where the index is not what was written."""
    record = _values(path)["files"].get(f"{TENSORS}/{INDEX}", {})
    return parse_index(path / TENSORS, read_checked(path / TENSORS / INDEX, record))


def read_config(path: Path) -> str:
    """The resolved run file of the checkpoint at `path`, as YAML."""
    data = read_checked(path / CONFIG, _values(path)["files"].get(CONFIG, {}))
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path / CONFIG} is no text.") from None


@dataclass(frozen=True)
class Share:
    """The part of a checkpoint that one directory has."""

    node: LineageNode
    checksum: str
    """Of the manifest: equal on hosts that wrote one checkpoint together."""
    held: tuple[str, ...]
    """Files whose sizes are right."""
    absent: dict[str, tuple[str, ...]]
    """The other files, with the names of the hosts that had them."""
    problems: tuple[str, ...]
    """A line for each file that is not as written."""


def share_of(path: Path) -> Share:
    """The part of its checkpoint that directory `path` has, by names and sizes. Raises `CheckpointError` for its manifest."""
    values = _values(path)
    held, absent, problems = [], {}, []
    for name, record in values["files"].items():
        hosts = tuple(values["hosts"][number] for number in record.get("hosts", ()))
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            absent[name] = hosts
            if not (hosts and isinstance(error, FileNotFoundError)):
                problems.append(f"{path / name} cannot be read: {error.strerror}.")
            continue
        if size == record["bytes"]:
            held.append(name)
        else:
            absent[name] = hosts
            problems.append(f"{path / name} has {size:,} bytes where {record['bytes']:,} were written.")
    return Share(_node(path, values), _checksum(values), tuple(held), absent, tuple(problems))


def read_node(path: Path) -> LineageNode:
    """The place of the checkpoint at `path` in its run."""
    return _node(path, _values(path))


def _node(path: Path, values: Mapping[str, Any]) -> LineageNode:
    return LineageNode(path, values["update"], _lineage(path, values.get("lineage", ())))


def problems_of(path: Path, whole: bool = True) -> list[str]:
    """What is wrong with the names and sizes of a checkpoint's files, without reading the tensors; empty for nothing.

    whole: a file that only other hosts have is a problem too.
    """
    try:
        share = share_of(path)
    except CheckpointError as error:
        return [str(error)]
    elsewhere = [
        f"{path / name} is not here: it was written on {' and '.join(hosts)}."
        for name, hosts in share.absent.items()
        if whole and hosts and not (path / name).exists()
    ]
    return [*share.problems, *elsewhere]


def verify(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`, after reading every byte of it; empty for nothing. Needs no ranks."""
    if problems := problems_of(path):
        return problems
    try:
        index = read_index(path)
        read_config(path)
    except CheckpointError as error:
        return [str(error)]
    files = _values(path)["files"]
    for name in sorted(index.headers):
        try:
            verify_file(index, name, files.get(f"{TENSORS}/{name}", {"bytes": -1})["bytes"])
        except CheckpointError as error:
            problems.append(str(error))
    return problems

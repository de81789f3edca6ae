"""Directories of checkpoints: written aside, completed by their manifest, renamed into place, found again, verified.

`output_dir/checkpoint-{update}/` holds `tensors/` (one safetensors file a rank, and `index.json`), the resolved run file
and `manifest.json`, written last, with sizes and checksums. A directory without a manifest never counts. `latest` links to
the newest, `best` to the one with the lowest evaluation loss.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
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
    index_text,
    parse_index,
    read_checked,
    read_piece,
    sync,
    write_text,
)
from shardwright.checkpoint.keep import Retention, remove_old, replace_link
from shardwright.errors import CheckpointError, ConfigError, DamagedCheckpointError, did_you_mean

FORMAT = 2
LATEST, BEST = "latest", "best"
BLOCK_BYTES = 4 * 2**20
_FILES = re.compile(r"config\.yaml|tensors/index\.json|tensors/rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    update: updates done, so the number of the next one. target_tokens: trained so far. data_fingerprint: of data,
    tokenizer and settings. row_order: what else says which rows an update holds.
    world_size, layout: of the run that wrote it; it can be read by any other.
    eval_loss: of these weights, where they were evaluated. best: (update, lowest evaluation loss so far).
    stream: where the next update begins in data that is read as a stream.
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
    stream: dict[str, Any] | None = None
    format: int = FORMAT


def aside_of(output_dir: Path, update: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return output_dir / f".checkpoint-{update}.incomplete"


def prepare(output_dir: Path, update: int) -> None:
    """Makes the directory to write into; removes what earlier saves have left behind."""
    sweep(output_dir)
    (aside_of(output_dir, update) / TENSORS).mkdir(parents=True)


def bring_back(output_dir: Path) -> None:
    """Gives a checkpoint its name back that was about to be replaced by one of the same update when the run ended."""
    for replaced in output_dir.glob(".checkpoint-*.replaced"):
        final = output_dir / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            replaced.rename(final)


def sweep(output_dir: Path) -> None:
    """Removes incomplete and half-removed checkpoints."""
    bring_back(output_dir)
    for kind in ("incomplete", "removed", "replaced"):
        for left in output_dir.glob(f".checkpoint-*.{kind}"):
            shutil.rmtree(left)


def complete(
    output_dir: Path,
    records: list[dict[str, Any]],
    numbers: Mapping[str, int | float],
    manifest: Manifest,
    run_yaml: str,
    retention: Retention,
) -> Path:
    """Turns the directory that all ranks have written into a checkpoint: index, manifest, rename, links, removal of old ones.

    One rank does it, when the files of all are on the disk.
    """
    aside = aside_of(output_dir, manifest.update)
    final = output_dir / f"checkpoint-{manifest.update}"
    files = {f"{TENSORS}/{record['file']}": {"bytes": record["bytes"]} for record in records}
    files[f"{TENSORS}/{INDEX}"] = write_text(aside / TENSORS / INDEX, index_text(records, dict(numbers)))
    files[CONFIG] = write_text(aside / CONFIG, run_yaml)
    write_text(aside / MANIFEST, _manifest_text({**asdict(manifest), "files": files}))
    for directory in (aside / TENSORS, aside):
        sync(directory)
    replaced = output_dir / f".{final.name}.replaced"
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    try:
        sync(output_dir)
        shutil.rmtree(replaced, ignore_errors=True)
        replace_link(output_dir / LATEST, final.name)
        _retain(output_dir, manifest.update, retention)
        sync(output_dir)
    except OSError as error:
        raise OSError(f"{final} is complete, but what follows it failed: {error}") from error
    return final


def _retain(output_dir: Path, update: int, retention: Retention) -> None:
    losses = {}
    for path in complete_checkpoints(output_dir) if retention.best else []:
        if not problems_of(path) and (loss := read_manifest(path).eval_loss) is not None:
            losses[update_of(path)] = loss
    remove_old(output_dir, complete_checkpoints(output_dir), update, losses, retention)


def _manifest_text(values: Mapping[str, Any]) -> str:
    """JSON whose last key is the checksum of all before it."""
    text = json.dumps(values, sort_keys=True)
    return json.dumps({**values, "checksum": checksum(text.encode())}, indent=1) + "\n"


def update_of(path: Path) -> int:
    """The update in the name of a checkpoint directory."""
    return int(path.name.split("-")[1])


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Directories of `output_dir` that hold a complete checkpoint, oldest first."""
    found = [
        p
        for p in output_dir.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", p.name) and (p / MANIFEST).is_file()
    ]
    return sorted(found, key=update_of)


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
    if right != checksum(json.dumps(values, sort_keys=True).encode()):
        raise damaged(where, "is damaged: its checksum differs")
    if not named:
        raise CheckpointError(f"{where} names files that do not belong to a checkpoint: {', '.join(files)}.")
    return values


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`."""
    values = _values(path)
    del values["files"]
    best = values.pop("best")
    return Manifest(**values, best=tuple(best) if best else None)


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


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell, without reading the tensors; empty when nothing is."""
    try:
        files = _values(path)["files"]
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, record in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            found.append(f"{path / name} cannot be read: {error.strerror}.")
            continue
        if size != record["bytes"]:
            found.append(f"{path / name} has {size:,} bytes where {record['bytes']:,} were written.")
    return found


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


def skipped(output_dir: Path) -> list[tuple[Path, str]]:
    """(path, reason) of everything in `output_dir` that is not a good checkpoint as far as names and sizes tell."""
    found = [(p, "it was not completed") for p in sorted(output_dir.glob(".checkpoint-*.incomplete"))]
    for p in sorted(output_dir.glob("checkpoint-*")):
        if re.fullmatch(r"checkpoint-\d+", p.name):
            reasons = problems_of(p) if (p / MANIFEST).is_file() else [f"it has no {MANIFEST}"]
            found += [(p, reasons[0].rstrip("."))] if reasons else []
    return found


def find(output_dir: Path, resume: str, bad: Collection[Path] = ()) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: `auto`, `never` or a directory.

    `auto` is the newest whose names and sizes are right, and that is not in `bad`. Raises `ConfigError` for `never`
    where an earlier run has left checkpoints: theirs and the new ones would be taken for one run's. Raises
    `CheckpointError` where checkpoints are there and none of them is good.
    """
    there = complete_checkpoints(output_dir)
    if resume == "never":
        if there:
            raise ConfigError(
                f"checkpoint.resume is never, but {output_dir} holds {there[-1].name} of an earlier run.",
                "Checkpoints of two runs in one directory cannot be told apart.",
                "Set another checkpoint.output_dir, or resume with checkpoint.resume auto.",
            )
        return None
    if resume == "auto":
        good = next((p for p in reversed(there) if p not in bad and not problems_of(p)), None)
        if there and good is None:
            raise CheckpointError(
                f"{output_dir} holds {len(there)} checkpoint(s), and none of them is good. {_reason(there[-1])}",
                "The run would start from nothing.",
                "Restore one of them, or set another checkpoint.output_dir.",
            )
        return good
    path = Path(resume)
    if not (path / MANIFEST).is_file():
        others = [str(p) for p in complete_checkpoints(path.parent)]
        raise CheckpointError(
            f"{path} holds no complete checkpoint.", f"It has no {MANIFEST}.", did_you_mean(str(path), others)
        )
    if path in bad or problems_of(path):
        raise DamagedCheckpointError(
            f"{path} is damaged. {_reason(path)}", "", "Name another with checkpoint.resume."
        )
    return path


def _reason(path: Path) -> str:
    return next(iter(problems_of(path) or verify(path)), "")


def torch_version() -> str:
    """The version of torch that writes."""
    return torch.__version__

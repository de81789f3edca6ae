"""Directories of checkpoints: written aside, completed by their manifest, renamed into place, found again, verified.

`output_dir/checkpoint-{update}/` holds `tensors/` (one safetensors file a rank, and `index.json`), the resolved run file
and `manifest.json`, written last, with sizes and checksums. A directory without a manifest never counts. `latest` links to
the newest, `best` to the one with the lowest evaluation loss. Where each host has its own `output_dir`, each has all of
this but for the tensor files, of which it has those of its ranks and of the hosts that it keeps copies for.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.checkpoint.files import CONFIG, INDEX, MANIFEST, TENSORS, index_text, sync, write_text
from shardwright.checkpoint.keep import Retention, remove_old, replace_link
from shardwright.checkpoint.manifest import Manifest, manifest_text, problems_of, read_manifest, verify
from shardwright.errors import CheckpointError, ConfigError, DamagedCheckpointError, did_you_mean

LATEST, BEST = "latest", "best"


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
    """Turns the directory that all ranks have written into a checkpoint: `seal`, `publish`, `retain`.

    One rank does it, when the files of all are on the disk.
    """
    seal(output_dir, records, numbers, manifest, run_yaml)
    final = publish(output_dir, manifest.update)
    retain(output_dir, manifest.update, retention)
    return final


def seal(
    output_dir: Path,
    records: list[dict[str, Any]],
    numbers: Mapping[str, int | float],
    manifest: Manifest,
    run_yaml: str,
) -> None:
    """Writes index, run file and manifest.

    records: as `write_parts` returns them, perhaps with `hosts`: the numbers of those that have the file.
    """
    aside = aside_of(output_dir, manifest.update)
    files: dict[str, dict[str, Any]] = {
        f"{TENSORS}/{record['file']}": {key: record[key] for key in ("bytes", "hosts") if key in record}
        for record in records
    }
    files[f"{TENSORS}/{INDEX}"] = write_text(aside / TENSORS / INDEX, index_text(records, dict(numbers)))
    files[CONFIG] = write_text(aside / CONFIG, run_yaml)
    write_text(aside / MANIFEST, manifest_text(manifest, files))


def publish(output_dir: Path, update: int) -> Path:
    """Gives a sealed checkpoint its name, and points `latest` to it."""
    aside, final = aside_of(output_dir, update), output_dir / f"checkpoint-{update}"
    for directory in (aside / TENSORS, aside):
        sync(directory)
    replaced = output_dir / f".{final.name}.replaced"
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    with _already(final):
        sync(output_dir)
        shutil.rmtree(replaced, ignore_errors=True)
        replace_link(output_dir / LATEST, final.name)
    return final


def retain(output_dir: Path, update: int, retention: Retention) -> None:
    """Removes what `retention` does not keep, now that the checkpoint of `update` is there."""
    with _already(output_dir / f"checkpoint-{update}"):
        losses = {}
        for path in complete_checkpoints(output_dir) if retention.best else []:
            if not problems_of(path, whole=False) and (loss := read_manifest(path).eval_loss) is not None:
                losses[update_of(path)] = loss
        remove_old(output_dir, complete_checkpoints(output_dir), update, losses, retention)
        sync(output_dir)


@contextmanager
def _already(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{final} is complete, but what follows it failed: {error}") from error


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


def skipped(output_dir: Path, whole: bool = True) -> list[tuple[Path, str]]:
    """(path, reason) of everything in `output_dir` that is not a good checkpoint as far as names and sizes tell.

    whole: see `problems_of`.
    """
    found = [(p, "it was not completed") for p in sorted(output_dir.glob(".checkpoint-*.incomplete"))]
    for p in sorted(output_dir.glob("checkpoint-*")):
        if re.fullmatch(r"checkpoint-\d+", p.name):
            reasons = problems_of(p, whole) if (p / MANIFEST).is_file() else [f"it has no {MANIFEST}"]
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
        refuse_earlier(output_dir, [p.name for p in there])
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


def refuse_earlier(output_dir: Path, names: Sequence[str]) -> None:
    """Raises `ConfigError` where checkpoints of an earlier run are there that are not to be resumed."""
    if names:
        raise ConfigError(
            f"checkpoint.resume is never, but {output_dir} holds {names[-1]} of an earlier run.",
            "Checkpoints of two runs in one directory cannot be told apart.",
            "Set another checkpoint.output_dir, or resume with checkpoint.resume auto.",
        )


def _reason(path: Path) -> str:
    return next(iter(problems_of(path) or verify(path)), "")

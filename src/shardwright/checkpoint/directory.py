"""Directories of checkpoints: written aside, completed by their manifest, renamed into place, found again, verified.

`output_dir/checkpoint-{update}/` holds `tensors/` (one safetensors file a rank, and `index.json`), the resolved run file
and `manifest.json`, written last, with sizes and checksums. A directory without a manifest never counts. `latest` links to
the newest, `best` to the one with the lowest evaluation loss. Where each host has its own `output_dir`, each has all of
this but for the tensor files, of which it has those of its ranks and of the hosts that it keeps copies for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.checkpoint.files import CONFIG, INDEX, MANIFEST, TENSORS, index_text, write_text
from shardwright.checkpoint.lineage import Lineage, Member, follows
from shardwright.checkpoint.manifest import Manifest, manifest_text, member_of, problems_of, read_manifest
from shardwright.checkpoint.refused import discard, point, retire, sync_directories, sync_files
from shardwright.checkpoint.retention import Retention, best_of, surplus
from shardwright.errors import CheckpointError

LATEST, BEST = "latest", "best"


def aside_of(output_dir: Path, update: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return output_dir / f".checkpoint-{update}.incomplete"


def prepare(output_dir: Path, update: int) -> list[str]:
    """Makes the directory to write into; removes what earlier saves have left behind. Returns what was refused."""
    notes = sweep(output_dir)
    (aside_of(output_dir, update) / TENSORS).mkdir(parents=True)
    return notes + sync_files(output_dir)


def _named(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))


def bring_back(output_dir: Path) -> None:
    """Gives a checkpoint its name back that was about to be replaced by one of the same update when the run ended."""
    for replaced in output_dir.glob(".checkpoint-*.replaced"):
        if not _named(replaced).exists():
            replaced.rename(_named(replaced))


def sweep(output_dir: Path) -> list[str]:
    """Removes incomplete and half-removed checkpoints; returns what was refused."""
    bring_back(output_dir)
    notes = finish_removals(output_dir)
    for kind in ("incomplete", "replaced"):
        for left in sorted(output_dir.glob(f".checkpoint-*.{kind}")):
            notes += retire(left)
    return notes


def finish_removals(output_dir: Path) -> list[str]:
    """Removes what is left of checkpoints that have lost their names; returns what is refused again."""
    return [note for left in sorted(output_dir.glob(".checkpoint-*.removed")) for note in discard(left)]


def complete(
    output_dir: Path,
    records: list[dict[str, Any]],
    numbers: Mapping[str, int | float],
    manifest: Manifest,
    run_yaml: str,
    retention: Retention,
) -> list[str]:
    """Turns the directory that all ranks have written into a checkpoint: `seal`, `publish`, `retain`.

    One rank does this, when the files of all ranks are on the disk. Returns what a person should know.
    """
    seal(output_dir, records, numbers, manifest, run_yaml)
    return publish(output_dir, manifest) + retain(output_dir, manifest, retention)


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


def publish(output_dir: Path, manifest: Manifest) -> list[str]:
    """Gives a sealed checkpoint its name, and points `latest` to it; returns what a person should know.

    Nothing after the rename raises, except where the disk has lost the new name.
    """
    aside, final = aside_of(output_dir, manifest.update), checkpoint_of(output_dir, manifest.update)
    notes = sync_directories(output_dir, aside / TENSORS, aside)
    replaced = output_dir / f".{final.name}.replaced"
    if final.exists():
        if _on_line(manifest.lineage, final) is False:
            notes.append(f"{final} of a branch that was left is replaced.")
        final.rename(replaced)
    aside.rename(final)
    try:
        notes += sync_directories(output_dir, output_dir)
    except OSError as error:
        raise OSError(f"{final} is complete, but what follows it failed: {error}") from error
    if replaced.exists():
        notes += retire(replaced)
    return notes + point(output_dir / LATEST, final.name)


def _on_line(line: Lineage, path: Path) -> bool | None:
    """Whether the checkpoint at `path` is on `line`; None where its manifest cannot be read."""
    try:
        return follows(line, member_of(path))
    except CheckpointError:
        return None


def retain(output_dir: Path, manifest: Manifest, retention: Retention) -> list[str]:
    """Removes what `retention` does not keep, now that the checkpoint of `manifest` is there; points `best` to the best.

    Only checkpoints on the line of `manifest` count. Those of a branch that was left go as soon as the line has passed them,
    unreadable ones when all that is kept is newer. Returns what a person should know; nothing here ends a save.
    """
    try:
        on = {path: _on_line(manifest.lineage, path) for path in complete_checkpoints(output_dir)}
        line = {update_of(path): path for path in on if on[path]}
        notes = point_best(output_dir, list(line.values()), manifest) if retention.best else []
        losses = _losses(list(line.values()), manifest) if retention.best else {}
        gone = surplus(list(line), manifest.update, losses, retention)
        for update in gone:
            notes += retire(line[update])
        if retention.newest is not None:
            oldest = min(line.keys() - set(gone), default=0)
            left = [p for p in on if on[p] is False and update_of(p) < manifest.update]
            unread = [p for p in on if on[p] is None and update_of(p) < oldest]
            for path in (*left, *unread):
                why = "belongs to a branch that was left" if path in left else "cannot be read"
                notes += retire(path) or [f"{path} is removed: the checkpoint {why} (checkpoint.save_total_limit)."]
        return notes + sync_directories(output_dir, output_dir)
    except OSError as error:
        return [f"Older checkpoints in {output_dir} were not looked through: {error}. The next save tries again."]


def _losses(line: Sequence[Path], manifest: Manifest) -> dict[int, float]:
    """Update -> evaluation loss of the good checkpoints that were evaluated on the same rows as `manifest`.

    Checkpoints of older versions do not say their rows and are trusted.
    """
    good = [read_manifest(path) for path in line if not problems_of(path, whole=False)]
    return {m.update: m.eval_loss for m in good if m.eval_loss is not None and m.eval_data in ("", manifest.eval_data)}


def point_best(output_dir: Path, line: Sequence[Path], manifest: Manifest) -> list[str]:
    """Points `best` to the checkpoint of `line` with the lowest evaluation loss up to `manifest`, if there is one."""
    best = best_of(_losses(line, manifest), manifest.update)
    return [] if best is None else point(output_dir / BEST, checkpoint_of(output_dir, best).name)


def checkpoint_of(output_dir: Path, update: int) -> Path:
    return output_dir / f"checkpoint-{update}"


def update_of(path: Path) -> int:
    """The update in the name of a checkpoint directory."""
    return int(path.name.split("-")[1])


def is_named(name: str) -> bool:
    """Whether this is the name of a checkpoint."""
    return re.fullmatch(r"checkpoint-\d+", name) is not None


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Directories of `output_dir` that hold a complete checkpoint, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if is_named(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=update_of)


def skipped(output_dir: Path, whole: bool = True) -> list[tuple[Path, str]]:
    """(path, reason) of everything in `output_dir` that is not a good checkpoint as far as names and sizes tell.

    whole: see `problems_of`.
    """
    found = [(p, "it was not completed") for p in sorted(output_dir.glob(".checkpoint-*.incomplete"))]
    for p in sorted(output_dir.glob("checkpoint-*")):
        if is_named(p.name):
            reasons = problems_of(p, whole) if (p / MANIFEST).is_file() else [f"it has no {MANIFEST}"]
            found += [(p, reasons[0].rstrip("."))] if reasons else []
    return found


def members_of(output_dir: Path) -> list[Member]:
    """The checkpoints of `output_dir` whose manifests can be read, oldest first."""
    found = []
    for path in complete_checkpoints(output_dir):
        try:
            found.append(member_of(path))
        except CheckpointError:
            continue  # `skipped` names it
    return found

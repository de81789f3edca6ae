"""Directories of checkpoints: written under another name, completed by their manifest, renamed, found again, removed.

`output_dir/checkpoint-{update}/` holds `tensors/` (one safetensors file a rank, and `index.json`), the resolved run file
and `manifest.json`, written last, with sizes and checksums. A directory without a manifest never counts. `latest` links to
the newest, `best` to the one with the lowest evaluation loss. Where each host has its own `output_dir`, each has all of
this but for the tensor files, of which it has those of its ranks and of the hosts that it keeps copies for.

Functions that return a list of lines do what they can; each line tells a person what the file system refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.filesystem import (
    remove,
    remove_renamed,
    set_link,
    sync_directories,
    try_sync,
    write_text,
)
from shardwright.checkpoint.index import INDEX, TENSORS, index_text
from shardwright.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    Lineage,
    LineageNode,
    Manifest,
    manifest_text,
    problems_of,
    read_manifest,
    read_node,
)
from shardwright.errors import CheckpointError

LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class Retention:
    """newest: how many of the newest stay (None: all). every: those of each N updates stay. best: the best one stays."""

    newest: int | None = None
    every: int | None = None
    best: bool = False


def checkpoint_of(output_dir: Path, update: int) -> Path:
    return output_dir / f"checkpoint-{update}"


def incomplete_of(output_dir: Path, update: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return output_dir / f".checkpoint-{update}.incomplete"


def update_of(path: Path) -> int:
    """The update in the name of a checkpoint directory."""
    return int(path.name.split("-")[1])


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"checkpoint-\d+", name) is not None


# Written


def prepare(output_dir: Path, update: int) -> list[str]:
    """Makes the directory to write into; removes what earlier saves have left behind."""
    restore_replaced(output_dir)
    notes = retry_removals(output_dir)
    for kind in ("incomplete", "replaced"):
        for left in sorted(output_dir.glob(f".checkpoint-*.{kind}")):
            notes += remove(left)
    (incomplete_of(output_dir, update) / TENSORS).mkdir(parents=True)
    return notes + try_sync(output_dir)


def restore_replaced(output_dir: Path) -> None:
    """Gives a checkpoint its name back that was about to be replaced by one of the same update when the run ended."""
    for replaced in output_dir.glob(".checkpoint-*.replaced"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists():
            replaced.rename(final)


def retry_removals(output_dir: Path) -> list[str]:
    """Removes what is left of checkpoints whose removal was refused before."""
    return [note for left in sorted(output_dir.glob(".checkpoint-*.removed")) for note in remove_renamed(left)]


def complete(
    output_dir: Path,
    records: list[dict[str, Any]],
    numbers: Mapping[str, int | float],
    manifest: Manifest,
    run_yaml: str,
    retention: Retention,
) -> list[str]:
    """Turns the directory that all ranks have written into a checkpoint. One rank calls it, when all files are on the disk."""
    write_manifest(output_dir, records, numbers, manifest, run_yaml)
    return publish(output_dir, manifest) + remove_surplus(output_dir, manifest, retention)


def write_manifest(
    output_dir: Path,
    records: list[dict[str, Any]],
    numbers: Mapping[str, int | float],
    manifest: Manifest,
    run_yaml: str,
) -> None:
    """Writes index, run file and manifest.

    records: as `write_parts` returns them, perhaps with `hosts`: the numbers of the hosts that have the file.
    """
    path = incomplete_of(output_dir, manifest.update)
    files: dict[str, dict[str, Any]] = {
        f"{TENSORS}/{record['file']}": {key: record[key] for key in ("bytes", "hosts") if key in record}
        for record in records
    }
    files[f"{TENSORS}/{INDEX}"] = write_text(path / TENSORS / INDEX, index_text(records, numbers))
    files[CONFIG] = write_text(path / CONFIG, run_yaml)
    write_text(path / MANIFEST, manifest_text(manifest, files))


def publish(output_dir: Path, manifest: Manifest) -> list[str]:
    """Gives a checkpoint with a manifest its name, and points `latest` to it.

    Nothing after the rename raises, except where the disk has lost the new name.
    """
    path, final = incomplete_of(output_dir, manifest.update), checkpoint_of(output_dir, manifest.update)
    notes = sync_directories(output_dir, path / TENSORS, path)
    replaced = output_dir / f".{final.name}.replaced"
    if final.exists():
        if _is_on(manifest.lineage, final) is False:
            notes.append(f"{final} of a branch that was left is replaced.")
        final.rename(replaced)
    path.rename(final)
    try:
        notes += sync_directories(output_dir, output_dir)
    except OSError as error:
        raise OSError(f"{final} is complete, but what follows it failed: {error}") from error
    if replaced.exists():
        notes += remove(replaced)
    return notes + set_link(output_dir / LATEST, final.name)


def _is_on(lineage: Lineage, path: Path) -> bool | None:
    """Whether the checkpoint at `path` is on `lineage`; None where its manifest cannot be read."""
    try:
        return read_node(path).is_on(lineage)
    except CheckpointError:
        return None


# Retained


def remove_surplus(output_dir: Path, manifest: Manifest, retention: Retention) -> list[str]:
    """Removes what `retention` does not keep, now that the checkpoint of `manifest` is there; points `best` to the best.

    Only checkpoints on the lineage of `manifest` count. Those of a branch that was left go as soon as this lineage has passed
    them, unreadable ones when all that is kept is newer. A refusal here does not end a save.
    """
    try:
        on = {path: _is_on(manifest.lineage, path) for path in complete_checkpoints(output_dir)}
        own = {update_of(path): path for path in on if on[path]}
        notes = link_best(output_dir, own.values(), manifest) if retention.best else []
        losses = _losses(own.values(), manifest) if retention.best else {}
        gone = surplus(list(own), manifest.update, losses, retention)
        for update in gone:
            notes += remove(own[update])
        if retention.newest is not None:
            oldest = min(own.keys() - set(gone), default=0)
            left = [p for p in on if on[p] is False and update_of(p) < manifest.update]
            unread = [p for p in on if on[p] is None and update_of(p) < oldest]
            for path in (*left, *unread):
                why = "belongs to a branch that was left" if path in left else "cannot be read"
                notes += remove(path) or [f"{path} is removed: the checkpoint {why} (checkpoint.save_total_limit)."]
        return notes + sync_directories(output_dir, output_dir)
    except OSError as error:
        return [f"Older checkpoints in {output_dir} were not looked through: {error}. The next save tries again."]


def surplus(updates: Sequence[int], newest: int, losses: Mapping[int, float], retention: Retention) -> list[int]:
    """The updates whose checkpoints go, after the checkpoint of update `newest` was written.

    Checkpoints ahead of `newest` (the run went back to an older one) neither count nor go.
    """
    done = sorted(update for update in updates if update <= newest)
    if retention.newest is None:
        return []
    kept = set(done[-retention.newest :])
    if retention.every:
        kept |= {update for update in done if update % retention.every == 0}
    if retention.best and (best := best_of(losses, newest)) is not None:
        kept.add(best)
    return [update for update in done if update not in kept]


def best_of(losses: Mapping[int, float], newest: int) -> int | None:
    """The update up to `newest` with the lowest loss, the earliest of equals; None where no checkpoint was evaluated."""
    known = {update: loss for update, loss in losses.items() if update <= newest}
    return min(known, key=lambda update: (known[update], update)) if known else None


def _losses(paths: Iterable[Path], manifest: Manifest) -> dict[int, float]:
    """Update -> evaluation loss of the good checkpoints that were evaluated on the same rows as `manifest`.

    Checkpoints of older versions do not say their rows and are trusted.
    """
    good = [read_manifest(path) for path in paths if not problems_of(path, whole=False)]
    return {m.update: m.eval_loss for m in good if m.eval_loss is not None and m.eval_data in ("", manifest.eval_data)}


def link_best(output_dir: Path, paths: Iterable[Path], manifest: Manifest) -> list[str]:
    """Points `best` to the checkpoint of `paths` with the lowest evaluation loss up to `manifest`, if there is one."""
    best = best_of(_losses(paths, manifest), manifest.update)
    return [] if best is None else set_link(output_dir / BEST, checkpoint_of(output_dir, best).name)


# Found


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Directories of `output_dir` that hold a complete checkpoint, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if is_checkpoint_name(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=update_of)


def skipped(output_dir: Path, whole: bool = True) -> list[tuple[Path, str]]:
    """(path, reason) of everything in `output_dir` that is not a good checkpoint by names and sizes.

    whole: see `problems_of`.
    """
    found = [(p, "it was not completed") for p in sorted(output_dir.glob(".checkpoint-*.incomplete"))]
    for p in sorted(output_dir.glob("checkpoint-*")):
        if is_checkpoint_name(p.name):
            reasons = problems_of(p, whole) if (p / MANIFEST).is_file() else [f"it has no {MANIFEST}"]
            found += [(p, reasons[0].rstrip("."))] if reasons else []
    return found


def lineage_nodes(output_dir: Path) -> list[LineageNode]:
    """The checkpoints of `output_dir` whose manifests can be read, oldest first."""
    found = []
    for path in complete_checkpoints(output_dir):
        try:
            found.append(read_node(path))
        except CheckpointError:
            continue  # `skipped` names it
    return found

"""Checkpoint directories: written aside, completed by their manifest, renamed into place, found again, pruned.

`output_dir/checkpoint-{update}/` holds the tensors (`torch.distributed.checkpoint`), the resolved run file and
`manifest.json`, written last. A directory without a manifest never counts. `latest` links to the newest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from shardwright.errors import CheckpointError, ConfigError, did_you_mean

MANIFEST, TENSORS, LATEST = "manifest.json", "tensors", "latest"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    update: updates done, so the number of the next one. target_tokens: trained so far. data_fingerprint: of data,
    tokenizer and settings. row_order: what else says which rows an update holds.
    world_size, layout: of the run that wrote it; it can be read by any other.
    """

    update: int
    target_tokens: int
    data_fingerprint: str
    row_order: str
    world_size: int
    layout: str
    torch_version: str
    format: int = FORMAT


def _agree(problem: str) -> None:
    """Raises `CheckpointError` on every rank when any rank has a problem; collective."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise CheckpointError(
            f"The checkpoint was not written: {'; '.join(found)}.", "Older checkpoints are untouched."
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(work: Callable[[], object]) -> str:
    """Runs `work`; the text of what went wrong, or nothing. DCP's own exception is no `Exception`."""
    try:
        work()
    except (OSError, RuntimeError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save(
    output_dir: Path, state: dict[str, Tensor], manifest: Manifest, run_yaml: str, keep: int | None
) -> Path:
    """Writes one checkpoint and returns its directory; collective.

    Raises `CheckpointError` on all ranks when one could not write; nothing older is touched before this one is complete.
    """
    final = output_dir / f"checkpoint-{manifest.update}"
    aside = output_dir / f".checkpoint-{manifest.update}.incomplete"
    first = dist.get_rank() == 0

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    _agree(_attempt(prepare) if first else "")
    _agree(_attempt(lambda: save_state(state, checkpoint_id=aside / TENSORS)))

    def complete() -> None:
        (aside / "config.yaml").write_text(run_yaml, encoding="utf-8")
        text = json.dumps(asdict(manifest), indent=1)
        (aside / MANIFEST).write_text(text + "\n", encoding="utf-8")
        for path in (
            *sorted((aside / TENSORS).iterdir()),
            aside / "config.yaml",
            aside / MANIFEST,
            aside / TENSORS,
            aside,
        ):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        link = output_dir / f".{LATEST}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(output_dir / LATEST)
        _sync(output_dir)
        # those that are ahead of this one (after a fall back to an older one) neither count nor go
        done = [p for p in complete_checkpoints(output_dir) if _update_of(p) <= manifest.update]
        for old in done[:-keep] if keep else []:
            shutil.rmtree(old)

    _agree(_attempt(complete) if first else "")
    return final


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Directories of `output_dir` that hold a complete checkpoint, oldest first."""
    found = [
        p
        for p in output_dir.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", p.name) and (p / MANIFEST).is_file()
    ]
    return sorted(found, key=_update_of)


def _update_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def find(output_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: `auto`, `never` or a directory.

    Raises `ConfigError` for `never` where an earlier run has left checkpoints: theirs and the new ones would be taken
    for one run's, by `auto` and by `save_total_limit`.
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
        return there[-1] if there else None
    path = Path(resume)
    if not (path / MANIFEST).is_file():
        others = [str(p) for p in complete_checkpoints(path.parent)]
        raise CheckpointError(
            f"{path} holds no complete checkpoint.", f"It has no {MANIFEST}.", did_you_mean(str(path), others)
        )
    return path


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`."""
    try:
        values: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: {error}.",
            "It says what the checkpoint holds.",
            "Name an older checkpoint with checkpoint.resume.",
        ) from None
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {values.get('format')}; this version reads {FORMAT}.")
    return Manifest(**values)


def stored_keys(path: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> dtype, shape and chunks of every tensor in the checkpoint."""
    stored = FileSystemReader(path / TENSORS).read_metadata().state_dict_metadata
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def load(path: Path, state: dict[str, Tensor]) -> None:
    """Fills the tensors of `state` in place, resharding as needed; collective.

    Names, shapes and dtypes must be the checkpoint's exactly: DCP itself would ignore what only the checkpoint has and
    cast silently. Raises `CheckpointError` listing the differences.
    """
    stored = stored_keys(path)
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(state))  # pipeline stages hold different names
    held = {name for names in everyone for name in names or ()}
    missing, extra = sorted(state.keys() - stored.keys()), sorted(stored.keys() - held)
    wrong = [
        f"{name}: stored {tuple(stored[name].size)} {stored[name].properties.dtype}, here {tuple(value.shape)} {value.dtype}"
        for name, value in state.items()
        if name in stored
        and (tuple(stored[name].size), stored[name].properties.dtype) != (tuple(value.shape), value.dtype)
    ]
    parts = [
        (missing, "not in the checkpoint"),
        (extra, "only in the checkpoint"),
        (wrong, "of another shape or dtype"),
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for names, what in parts
        if names
    ]
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, "; ".join(problems))
    if problem := next((text for text in found if text), ""):
        raise CheckpointError(
            f"{path} does not fit this model. {problem}.",
            "",
            "Use the run file it was saved with.",
        )
    if problem := _attempt(lambda: load_state(state, checkpoint_id=path / TENSORS)):
        raise CheckpointError(f"{path} cannot be read: {problem}.")


def torch_version() -> str:
    """The version of torch that writes."""
    return torch.__version__

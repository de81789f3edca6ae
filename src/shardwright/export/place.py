"""Where an export is put: what it may replace, and how."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shardwright.arch.model_files import (
    MODEL_FILES,
    OTHER_FILES,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    matching,
)
from shardwright.config.schema import Model


def refusal(target: Path, spec: Model, tokenizer: Path | None = None) -> str | None:
    """Why an export may not replace what is at `target`, or cannot be written there; None where it can."""
    place = target.resolve()
    for source in (Path(spec.model_name_or_path), tokenizer or Path(spec.tokenizer_name_or_path or "")):
        if target.exists() and source.exists() and source.resolve() == place:
            return "it is the directory that the model was read from"
        if target.exists() and source.resolve().is_relative_to(place):
            return f"it holds {source}, which the run reads"
    if target.is_symlink():
        return f"it is a link, to {target.readlink()}"
    if target.exists() and not target.is_dir():
        return "it is a file"
    if target.is_dir() and (foreign := _foreign(target)) is not None:
        return f"it holds files that are not of an earlier export: {foreign}"
    above = next(path for path in (target.parent, *target.parent.absolute().parents) if path.exists())
    if not above.is_dir():
        return f"{above} is a file"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} is not writable"
    return None


def _foreign(directory: Path) -> str | None:
    """A file of `directory` that no export writes; any file where the directory holds no weights."""
    known = {*matching(directory, (*WEIGHT_FILES, *MODEL_FILES, *TOKENIZER_FILES, *OTHER_FILES))}
    held = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())
    other = [name for name in held if name not in known]
    if other or not held:
        return other[0] if other else None
    return None if matching(directory, WEIGHT_FILES) else held[0]


def replace(partial: Path, target: Path) -> None:
    """Puts the finished directory in place; an older one is removed only when the new one is in place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)

"""The Hugging Face directory that a run leaves: refused or described before training, written at its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.notices import trained_ends
from shardwright.data.prepare import Prepared, prepare
from shardwright.export.huggingface import check_export, save_pretrained


def export_directory(run: RunFile) -> Path | None:
    """Where the trained model is written at the end; None: nowhere."""
    return Path(run.checkpoint.output_dir) / "model" if run.checkpoint.export_hf == "final" else None


def export_arguments(run: RunFile, train: Prepared | None = None) -> dict[str, Any]:
    """Arguments of `save_pretrained` that the run file and its data say; made before training, when the data is there."""
    train = train or prepare(run, "train")
    return {
        "tokenizer": train.tokenizer_path if train and run.model.tokenizer_name_or_path is not None else None,
        "chat_template": run.data.chat_template,
        "end_tokens": [*trained_ends(train.table.documents.meta)] if train else [],
    }


def export_lines(run: RunFile, model: nn.Module, train: Prepared) -> Iterable[str]:
    """What should be known of the export before the first update. Raises `ConfigError` where it could not be written."""
    directory = export_directory(run)
    return () if directory is None else check_export(model, run.model, directory, **export_arguments(run, train))


def export_model(run: RunFile, model: nn.Module, arguments: dict[str, Any]) -> Path | None:
    """Writes the trained model; every rank calls it. Returns its directory, or None where no export was asked for.

    arguments: of `export_arguments`, on rank 0.
    """
    directory = export_directory(run)
    return None if directory is None else save_pretrained(model, run.model, directory, **arguments)

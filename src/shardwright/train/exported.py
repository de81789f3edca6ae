"""The Hugging Face directory that a run leaves: refused or described before training, written at its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.end_tokens import end_tokens
from shardwright.data.prepare import Prepared, prepare
from shardwright.errors import ShardwrightError
from shardwright.export.huggingface import check_export, save_pretrained
from shardwright.models.materialise import weight_notices


def export_directory(run: RunFile) -> Path | None:
    """Where the trained model is written at the end; None: nowhere."""
    return Path(run.checkpoint.output_dir) / "model" if run.checkpoint.export_hf == "final" else None


def export_arguments(run: RunFile, train: Prepared | None = None) -> dict[str, Any]:
    """Arguments of `save_pretrained` that the run file and its data say; made before training, when the data is there."""
    train = train or prepare(run, "train")
    return {
        "tokenizer": train.tokenizer_path if train and run.model.tokenizer_name_or_path is not None else None,
        "chat_template": run.data.chat_template,
        "end_tokens": end_tokens(run, train) if train else [],
    }


def export_lines(run: RunFile, model: nn.Module, train: Prepared) -> Iterable[str]:
    """What should be known of the export before the first update. Raises `ConfigError` where it could not be written."""
    directory = export_directory(run)
    return (
        () if directory is None else check_export(model, run.model, directory, **export_arguments(run, train))
    )


def announce(run: RunFile, model: nn.Module, console: Console) -> None:
    """Rank 0 says what should be known of the model's files, those read and those to be written; every rank calls it.

    Raises on all ranks what `export_lines` raises on rank 0.
    """
    failure: list[ShardwrightError | None] = [None]
    if dist.get_rank() == 0:
        try:
            train = prepare(run, "train")
            lines = [] if train is None else export_lines(run, model, train)
            for line in (*weight_notices(model, run.model), *lines):
                console.print(line, highlight=False, soft_wrap=True)
        except ShardwrightError as error:
            failure = [error]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def export_model(run: RunFile, model: nn.Module, arguments: dict[str, Any]) -> Path | None:
    """Writes the trained model; every rank calls it. Gives its directory, or None where none was asked for.

    arguments: of `export_arguments`, on rank 0.
    """
    directory = export_directory(run)
    return None if directory is None else save_pretrained(model, run.model, directory, **arguments)

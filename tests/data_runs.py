"""Run files over data, with the tiny model and its tokenizer: a token is a byte of UTF-8, and one end token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.places import EXAMPLES

from shardwright.config import RunFile
from shardwright.data.prepare import Prepared, prepare

EOS = 256


def written(path: Path, *records: Mapping[str, Any]) -> Path:
    """A file of JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run_over(
    directory: Path, *, model: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None, **data: Any
) -> RunFile:
    """A run file over data.jsonl of `directory`; `data` goes into the section data."""
    return RunFile.model_validate(
        {
            "model": {"model_name_or_path": str(EXAMPLES / "tiny"), "init": "random", **(model or {})},
            "data": {"train": [str(directory / "data.jsonl")], "num_proc": 1, **data},
            "training": {"global_batch_size": 1, **(training or {"max_steps": 1})},
            "checkpoint": {"output_dir": str(directory / "runs" / "a")},
        }
    )


def ready(run: RunFile) -> Prepared:
    """The rows of data.train."""
    found = prepare(run)
    assert found is not None
    return found

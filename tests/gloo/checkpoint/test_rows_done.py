"""A run that goes on with another batch size and more epochs: rows are told from the targets of its updates. Row A50."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from tests.gloo.checkpoint.test_state_goes_on import Flag
from tests.gloo.engine import make_engine, run_file
from tests.gloo.ranks import run_ranks

from shardwright.errors import ConfigError
from shardwright.layout.legality import check_run
from shardwright.train.loop import Trainer
from shardwright.train.run_data import open_data

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
ROWS = 6


def _trained(directory: Path, **training: Any) -> list[str]:
    """Trains to the end; returns what was said. Row k of the data has 2^k targets."""
    values = {"max_steps": ..., "lr_scheduler_type": "constant", **training}
    loaded = run_file(
        data__train=[str(directory / "rows.jsonl")],
        data__max_length=2**ROWS,
        checkpoint__output_dir=str(directory / "run"),
        checkpoint__accept_changes=[f"training.{key}" for key in training],
        **{f"training__{key}": value for key, value in values.items()},
    )
    data = open_data(loaded.run, check_run(loaded, dist.get_world_size()), dist.get_rank())
    engine, screen = make_engine(loaded, data.updates), io.StringIO()
    trainer = Trainer(loaded, engine, data, Console(file=screen, width=1000))
    trainer.train(Flag(engine))  # type: ignore[arg-type]
    return screen.getvalue().splitlines()


def _all(directory: Path) -> dict[str, Any]:
    said = [
        _trained(directory, num_train_epochs=1.0, global_batch_size=4),
        _trained(directory, num_train_epochs=2.5, global_batch_size=3),
    ]
    try:
        _trained(directory, num_train_epochs=3.0, global_batch_size=3, warmup_steps=7, lr_scheduler_type="linear")
    except ConfigError as error:
        return {"said": said, "refused": str(error)}
    return {"said": said, "refused": ""}


def test_each_row_is_trained_once_an_epoch_whatever_has_changed(tmp_path: Path) -> None:
    """6 rows, 4 an update: 4 and 2. Then 2.5 epochs with 3 an update: 3 and 3, and 3. The schedule is held against the rest."""
    lines = [json.dumps({"input_ids": [5] * (2**k + 1)}) for k in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (facts,) = run_ranks(_all, 1, tmp_path)
    metrics = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    counts = [int(entry["data/target_tokens"]) for entry in metrics]
    rows = [[k for k in range(ROWS) if count >> k & 1] for count in counts]
    assert [len(update) for update in rows] == [4, 2, 3, 3, 3]
    assert sorted(rows[0] + rows[1]) == sorted(rows[2] + rows[3]) == list(range(ROWS))
    assert sum(counts[:4]) == 2 * (2**ROWS - 1)
    said = "\n".join(facts["said"][1])
    assert "6 rows are done, and update 2 begins with epoch 2." in said
    assert "The run now has 5 updates instead of 2." in said and "at update 2 of 5." in said
    manifest = json.loads((tmp_path / "run" / "checkpoint-5" / "manifest.json").read_text())
    assert manifest["cursor"]["rows"] == 15
    assert "warmup_steps 7, but the run has 6 updates (training.num_train_epochs 3)" in facts["refused"]

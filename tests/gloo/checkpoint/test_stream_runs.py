"""A run on a stream goes on exactly: at another world size, over several windows and passes. Rows A22, A23."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests import tolerance
from tests.gloo.train.test_train_verb import ROOT, losses, run
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
UPDATES = 8


def options(directory: Path, output: str, ranks: int) -> list[str]:
    """`train` of 8 updates of 8 rows; a window of 32 rows, so the third is read in the last updates."""
    return [
        "-m", "shardwright", "train", "examples/tiny.yaml", "--training.max_steps", str(UPDATES),
        "--data.train", f"[{directory / 'text.jsonl'}]", "--data.streaming", "true", "--data.stream_window", "20",
        "--data.cache_dir", str(directory / f"cache-{output}"), "--checkpoint.output_dir", str(directory / output),
        "--checkpoint.save_steps", "3", "--nproc-per-node", str(ranks), "--precision.param_dtype", "fp64",
        "--precision.reduce_dtype", "fp64", "--precision.master_dtype", "fp64",
    ]  # fmt: skip


def test_a_stream_goes_on_at_another_world_size(tmp_path: Path) -> None:
    """Checkpoints of 2 ranks, taken up by 1 with an empty cache: the same losses; refused where the stream has changed."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} " * (2 + n % 9)}) + "\n" for n in range(37)))
    done = run(options(tmp_path, "whole", 2))
    assert done.returncode == 0, done.stderr
    assert "while streaming" in done.stdout
    manifest = json.loads((tmp_path / "whole" / "checkpoint-6" / "manifest.json").read_text())
    assert manifest["cursor"]["position"] == 48 and manifest["cursor"]["window"] == 1
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "again" / "checkpoint-6")
    done = run(options(tmp_path, "again", 1))
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "examples/tiny"))
    rounding = tolerance.LATER * tolerance.of_model(dict(model.named_parameters()), 8 * 512)
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "whole")[6:], rel=rounding)
    text.write_text(text.read_text().replace("5", "6"))
    shutil.rmtree(tmp_path / "again")
    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "again" / "checkpoint-6")
    done = run(options(tmp_path, "again", 1))
    assert done.returncode != 0 and "the documents have changed" in done.stderr

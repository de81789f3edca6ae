"""Memory that runs out in a rank: what was alive, what was planned, the nearest change that fits, and how the run ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.gloo.engine import EXAMPLES
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import ExitCode

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def test_a_rank_that_runs_out_of_memory(tmp_path: Path) -> None:
    """Rank 1's address space is limited in update 1, and an allocation fails for real: both ranks end, and rank 1 says why."""
    tiny = EXAMPLES / "tiny"
    command = [
        *("train", str(EXAMPLES / "tiny.yaml"), "--nproc-per-node", "2"),
        *("--model.model_name_or_path", str(tiny), "--model.tokenizer_name_or_path", str(tiny)),
        *("--data.train", f"[{tiny / 'data.jsonl'}]", "--training.loss", "tests.own_losses:exhausting"),
        *("--training.per_device_train_batch_size", "2", "--parallelism.data_parallel", "ddp"),
        *("--checkpoint.output_dir", str(tmp_path), "--data.cache_dir", str(tmp_path / "cache")),
    ]
    result = CliRunner().invoke(app, command)
    text = result.output
    assert result.exit_code == ExitCode.CRASH, text
    assert "rank 1 of 2: Rank 1 ran out of memory in forward of update 1: RuntimeError" in text
    assert "you tried to allocate 1073741824 bytes" in text
    (held,) = re.findall(r"Alive then, (\S+ \S+): (.*)\.", text)
    assert all(name in held[1] for name in ("parameters", "optimizer states", "activations and all else"))
    assert re.search(r"Planned at the peak \(.+\), \S+ \S+: .*optimizer states \S+ [kKM]iB", text)
    assert re.search(r"The nearest change that fits, with a planned peak of \S+ \S+: --\w+\.\w+ \S+\.", text)
    assert "then rank 0: lost its peer" in text or "then rank 0: was killed" in text

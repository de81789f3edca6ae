"""`shardwright bench` from the command line: the objective first, then a table and bench.json; peers where installed.

Known-fault rows: A117 to A120, in bench's own figures.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tolerance
from tests.gloo.engine import EXAMPLES
from typer.testing import CliRunner, Result

from shardwright.cli import app
from shardwright.errors import ExitCode

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
SMALL = "{hidden_size: 32, intermediate_size: 40, num_hidden_layers: 2, head_dim: 8}"
ROUNDING = tolerance.positive(*[32, 32, 40] * 7 * 2, dtype=torch.float32)
"""Of a loss: 2 blocks of 7 matrices, each sums 32 to 40 terms in three ways; losses are means over targets."""
FLOPS_PER_TOKEN = 6 * (2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 40) + 257 * 32) + 12 * 2 * 32 * 32
PEAK = 1e11


def bench(output: Path, layouts: str, *more: str) -> Result:
    tiny = EXAMPLES / "tiny"
    command = [
        *("bench", str(EXAMPLES / "tiny.yaml"), "--layouts", layouts, "--updates", "4", "--warmup", "1"),
        *("--model.model_name_or_path", str(tiny), "--model.tokenizer_name_or_path", str(tiny)),
        *("--model.config_overrides", SMALL, "--data.train", f"[{tiny / 'data.jsonl'}]"),
        *("--data.max_length", "32", "--training.per_device_train_batch_size", "2"),
        *("--checkpoint.output_dir", str(output), "--data.cache_dir", str(output / "cache"), *more),
    ]
    return CliRunner().invoke(app, command)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    output = tmp_path_factory.mktemp("bench")
    hardware = output / "hardware.yaml"
    hardware.write_text(f"like: cpu\npeak_flops: {{fp32: {PEAK}}}\n")
    result = bench(
        output, "zero3,ddp+pp2", "--vs", "peers", "--trace", str(output / "traces"), "--device", str(hardware)
    )
    assert result.exit_code == 0, result.output
    return output, json.loads((output / "bench.json").read_text()), result.output


def test_what_is_written(whole: tuple[Path, dict[str, Any], str]) -> None:
    """Every figure that `report` draws; traffic as predicted on every rank; the same rows and losses for all."""
    output, found, text = whole
    entries = {entry["name"]: entry for entry in found["layouts"]}
    assert list(entries)[:3] == ["zero3", "ddp+pp2", "torch zero3"]
    for name, entry in entries.items():
        assert len(entry["step_seconds"]) == len(entry["targets_per_s"]) == 4
        assert entry["step_seconds_max"] == max(entry["step_seconds"])
        assert entry["loss_off"] <= ROUNDING, name
        assert entry["targets_per_s_per_device"] == pytest.approx(entry["targets_per_s_p50"] / 2)
        # A120: the same three counters for the same rows, whatever the layout
        rates = ("real_tokens_per_s", "slots_per_s", "padding_fraction")
        assert all(entry[key] > 0 for key in rates)
        assert entry["padding_fraction"] == entries["zero3"]["padding_fraction"]
        # A117 and A118: head in, lookup out, query heads in full attention; A119: the peak of both devices
        used = entry["real_tokens_per_s"] * FLOPS_PER_TOKEN / (2 * PEAK)
        assert entry["mfu"] == entry["hfu"] == pytest.approx(used), name
    for entry in (entries["zero3"], entries["ddp+pp2"]):
        assert entry["proven"] is True and entry["predicted"]["step_seconds"] > 0
        # tolerance: the plan of a peak is promised to a quarter on a CPU
        assert entry["predicted"]["peak_bytes"] == pytest.approx(entry["peak_bytes"], rel=0.25)
        assert all(row["equal"] for kinds in entry["traffic"].values() for row in kinds.values())
        assert entry["communication"]["exposed_seconds"] > 0
        assert sum(entry["memory"]["composition"].values()) == entry["peak_bytes"]
        assert set(entry["memory"]["by_phase"]) == {"forward", "backward", "update"}
    axis = {"zero3": "dp_shard", "ddp+pp2": "pp"}
    for name, expected in axis.items():
        assert set(entries[name]["communication"]["by_axis"]) == {expected}
        assert set(entries[name]["traffic"]) == {expected}
    assert entries["zero3"]["schedule"] == [] and len(entries["ddp+pp2"]["schedule"]) == 2
    assert found["run_file"].startswith("model:") and found["environment"]["torch"]
    history = [json.loads(line) for line in (output / "bench-results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in history] == list(entries)
    assert sorted(path.name for path in (output / "traces").iterdir()) == [
        f"{name}-rank{rank}.json" for name in ("ddp+pp2", "zero3") for rank in (0, 1)
    ]
    assert f"Peak 100.0 GFLOP/s a device: {output / 'hardware.yaml'}." in text
    assert "Measuring takes train" in text and text.count("What limits this run:") == 2
    for package in ("accelerate", "deepspeed"):
        if find_spec(package) is None:
            assert f"{package} is not installed" in text


def test_a_layout_that_fails_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed when check says that all differ, and the exit code is check's."""

    def failed(*_: object, **__: object) -> dict[str, int]:
        return {"ddp": ExitCode.CHECK_FAILED}

    monkeypatch.setattr("shardwright.tools.bench.verb.check_layouts", failed)
    result = bench(tmp_path, "ddp")
    assert getattr(result.exception, "exit_code", result.exit_code) == ExitCode.CHECK_FAILED
    assert "ddp is not timed: ddp does not train the same objective." in result.output
    assert not (tmp_path / "bench.json").exists()

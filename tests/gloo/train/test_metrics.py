"""What a run says of itself: three named counters, MFU over all devices, exposed communication, the time to a loss.

Known-fault rows: A119 (MFU over all devices), A120 (three counters).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tolerance
from tests.gloo.engine import EXAMPLES, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import ConfigError
from shardwright.layout.legality import check_run
from shardwright.train import utilisation
from shardwright.train.metrics import Metrics, Values

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
PEAK = 1e9


def _values(layouts: dict[str, dict[str, Any]]) -> dict[str, Values]:
    """The metrics of the second update, which is profiled. The CPU's peak is made known, so that there is an MFU."""
    utilisation.device_of = lambda *_: SimpleNamespace(name="", peak=lambda dtype: PEAK)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="", total_memory=0)  # type: ignore[assignment]
    found = {}
    for name, keys in layouts.items():
        engine = make_engine(run_file(data__max_length=16, **keys))
        kind = engine.device
        engine.device = torch.device("cuda")  # only for the figure of MFU
        metrics = Metrics(engine, lambda update: 0.0)
        engine.device = kind
        for update in range(2):
            batch = batches_for(engine, update, length=16)
            with metrics.profile() as window:
                engine.forward_backward(batch)
                result = engine.step()
            metrics.add(0.5, 0.1, batch, window[0])
        found[name] = metrics.begin(result, batch, 123).values()
        metrics.add(0.5, 0.1, batch)
        assert metrics.begin(result, batch, 123).values()["comm/exposed_seconds"] is None
        verdict = metrics.verdict()
        assert verdict is not None and verdict.share > 0
    return found


def test_counters_mfu_and_exposed_communication() -> None:
    """Two ranks under each layout: counts of the update once, whatever ranks share rows; the devices' peaks together."""
    layouts = {
        "ddp": {"parallelism__data_parallel": "ddp"},
        "tp2": {"parallelism__data_parallel": "ddp", "parallelism__tp_size": 2},
    }
    alone = run_ranks(_values, 1, {"one": layouts["ddp"]})[0]["one"]
    ranks = run_ranks(_values, 2, layouts)
    for values in (rank[name] for rank in ranks for name in layouts):
        for key in ("data/slots", "data/real_tokens", "data/target_tokens"):
            assert values[key] == alone[key], key
        assert values["data/slots"] == 8 * 16 > (values["data/target_tokens"] or 0)
        assert values["perf/target_tokens_per_s"] == (values["data/target_tokens"] or 0) / 0.5
        assert values["perf/target_tokens_per_s_per_device"] == (values["data/target_tokens"] or 0) / 0.5 / 2
        # A119: the same update in the same time on twice the devices uses half of what there is
        assert values["perf/mfu"] == pytest.approx((alone["perf/mfu"] or 0) / 2)
        assert (values["comm/exposed_seconds"] or 0) > 0
    assert ranks[0]["ddp"]["comm/exposed_seconds"] == ranks[1]["ddp"]["comm/exposed_seconds"]


def test_until_an_evaluation_loss_is_reached(tmp_path: Path) -> None:
    """The run ends after the first evaluation that is low enough, saves, and says how long training took."""
    tiny = EXAMPLES / "tiny"
    command = [
        *("train", str(EXAMPLES / "tiny.yaml"), "--nproc-per-node", "2", "--until-eval-loss", "5.1"),
        *("--model.model_name_or_path", str(tiny), "--model.tokenizer_name_or_path", str(tiny)),
        *("--data.train", f"[{tiny / 'data.jsonl'}]", "--data.validation", f"[{tiny / 'data.jsonl'}]"),
        *("--training.eval_steps", "2", "--logging.profile_steps", "100"),
        *("--checkpoint.output_dir", str(tmp_path), "--data.cache_dir", str(tmp_path / "cache")),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] <= 5.1 < min(losses[:-1])
    done = 2 * len(losses)
    assert done < 20 and (tmp_path / f"checkpoint-{done}").is_dir()
    steps = [line["perf/step_seconds"] for line in lines if "train/loss" in line]
    seconds = next(line["perf/training_seconds"] for line in reversed(lines) if "eval/loss" in line)
    assert 0.5 * sum(steps) <= seconds <= sum(steps) * (1 + tolerance.few(len(steps))), "steps are the slowest rank's"
    for key in ("forward", "backward", "update", "evaluate", "save"):
        (size,) = [line[f"mem/{key}_peak_bytes"] for line in lines if f"mem/{key}_peak_bytes" in line]
        # weights and two moments of 217,792 parameters in float32, half of them on a rank; evaluation comes first
        assert size > 217_792 / 2 * 4 * (1 if key == "evaluate" else 3), key
    exposed = [line["comm/exposed_seconds"] for line in lines if "train/loss" in line]
    assert [value is not None for value in exposed] == [number == 2 for number in range(done)]


def test_a_loss_that_nobody_evaluates_is_refused() -> None:
    with pytest.raises(ConfigError, match="until_eval_loss"):
        check_run(run_file(training__until_eval_loss=1.0), 1)

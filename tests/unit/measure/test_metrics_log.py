"""metrics.jsonl, and what of an earlier attempt stays in it."""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwright.errors import ConfigError
from shardwright.measure import metrics_log as module
from shardwright.measure.environment import device_facts
from shardwright.measure.metrics_log import MetricsLog, Progress, check_trackers


def read(directory: Path) -> list[dict[str, object]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_resumed_file_reads_like_one_run(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path / "run", [], 0)
    for update in range(5):
        first.log(update, {"train/loss": 1.0 / (update + 1)})
    first.log(4, {"eval/loss": 3.0})
    first.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('3\n{"update": 5, "train/lo')
    said: list[str] = []
    second = MetricsLog(tmp_path / "run", [], 3, said.append)
    for update in (3, 4):
        second.log(update, {"train/loss": 1.0 / (update + 1)})
    second.close()
    assert read(tmp_path / "run") == [{"update": u, "train/loss": 1.0 / (u + 1)} for u in range(5)]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert (
        len(said) == 1 and "metrics.jsonl: 5 entries of an earlier attempt, from update 4 on, are dropped." in said[0]
    )


def test_tensorboard_drops_what_is_trained_again(tmp_path: Path) -> None:
    """By its own reader: of two attempts at updates 3 and 4 the later one counts."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, loss in ((0, 1.0), (3, 2.0)):
        record = MetricsLog(tmp_path, ["tensorboard"], first)
        for update in range(first, 5):
            record.log(update, {"train/loss": loss})
        record.close()
    reader = events.EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_what_json_cannot_hold_is_null(tmp_path: Path) -> None:
    record = MetricsLog(tmp_path, [], 0)
    record.log(0, {"train/loss": float("nan"), "train/grad_norm": float("inf"), "mem/x": None, "train/lr": 0.1})
    record.close()
    assert read(tmp_path) == [
        {"update": 0, "train/loss": None, "train/grad_norm": None, "mem/x": None, "train/lr": 0.1}
    ]


def test_missing_packages_are_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers([])
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"report_to trackio: the package is not installed"):
        check_trackers(["trackio"])


def test_the_line_of_an_update() -> None:
    text = io.StringIO()
    progress = Progress(Console(file=text, width=20), 10)
    values = {
        "train/loss": 2.5,
        "train/grad_norm": 10.0,
        "train/lr": 1e-3,
        "perf/target_tokens_per_s": 1234.5,
        "perf/step_seconds": 0.5,
        "mem/peak_host_bytes": 2.5e9,
    }
    progress.show(8, values, 61.0)
    progress.close()
    expected = (
        "update  9/10  loss 2.5000  norm 10  lr 1.00e-03  1,234 target tokens/s  500 ms/update  "
        "peak 2.5 GB  1 min 01 s left\n"
    )
    assert text.getvalue() == expected


def test_the_processor_has_a_name() -> None:
    found = device_facts(torch.device("cpu"))
    assert list(found) == ["device_name"] and found["device_name"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on the size of files")
def test_entries_outlive_a_full_disk(tmp_path: Path) -> None:
    """What cannot be written is said once, kept, and written behind what was cut off when there is room again."""
    said: list[str] = []
    record = MetricsLog(tmp_path, [], 0, said.append)
    record.log(0, {"train/loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 7, limits[1]))
    try:
        record.log(1, {"train/loss": 2.0})
        record.log(2, {"train/loss": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record.log(3, {"train/loss": 4.0})
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"update": n, "train/loss": n + 1.0} for n in range(4)]
    assert said == [
        "metrics.jsonl cannot be written: [Errno 27] File too large. Its entries are kept until writing works again."
    ]

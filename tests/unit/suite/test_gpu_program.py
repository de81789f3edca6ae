"""`make gpu` without a GPU: its parts end in time whatever they do, and it names the wheels that a machine lacks."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import wheels


def test_the_limits_sum_to_ten_minutes(tmp_path: Path) -> None:
    for gpus in (1, 8):
        assert sum(part.limit for part in gpu.parts(gpus, tmp_path, False)) == 600


def part(code: str, limit: float = 30.0) -> gpu.Part:
    return gpu.Part("a part", limit, [sys.executable, "-c", code], lambda output, files: [])


def test_a_part_that_fails_or_hangs_is_reported(tmp_path: Path) -> None:
    """With its last error, and without processes that stay behind, though they ignore a polite request."""
    assert gpu.run(part("print('fine')"), 1, tmp_path).state == "ok"
    failed = gpu.run(part("print('before'); raise ValueError('too small')"), 1, tmp_path)
    assert failed.state == "failed" and "exit 1: ValueError: too small" in failed.why
    mark = tmp_path / "alive"
    child = (
        "import signal, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"while True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.1)"
    )
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    late = gpu.run(part(hangs, 5.0), 1, tmp_path)
    assert late.state == "out of time" and late.seconds >= 5
    time.sleep(1.0)
    mark.unlink(missing_ok=True)
    time.sleep(1.0)
    assert not mark.exists()


def test_figures_of_a_case(tmp_path: Path) -> None:
    """Medians with n and spread, memory beside the plan; a case that failed or was left out says why."""
    base = {"layers": 4, "rows": 2, "length": 64, "ranks": 1, "model": "1B"}
    timed: dict[str, Any] = {
        **base, "case": "ours", "save_at": None, "tokens_per_s": [9.0, 10.0, 11.0, 10.0], "mfu": None, "allocated": 2**30,
        "planned_allocated": 2**29, "reserved": 2**31, "planned_reserved": None, "first_loss": 2.0, "warmup_seconds": 3.0,
    }  # fmt: skip
    saved = {**base, "case": "saves", "save_at": 3, "seconds": [1.0, 1.0, 1.0, 1.5, 1.25, 1.0]}
    (tmp_path / "f").write_text(
        "\n".join(map(json.dumps, [timed, saved, {**base, "case": "no", "left_out": "not here"}]))
    )
    done = [gpu.Ran("training 1B", "ok", 1, 2, "", gpu.speeds("1B", tmp_path / "f"))]
    about = {"gpus": [["G", 2**30]], "torch": "t", "cuda": "c", "date": "d", "rehearsal": False}
    text = gpu.table(about, done)
    assert "tokens 10 tokens/s (n=4, ±7.5%); allocated 1 GiB (planned 0.5); reserved 2 GiB" in text
    assert "all updates together 0.75 s; longest update while it is written / usual 1.5" in text
    assert "left out: not here" in text


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a missing package would need: the record says that, and stays complete."""
    recorded = json.loads(wheels.RECORDED.read_text())
    assert {"pydantic-core", "xxhash", "multiprocess", "dill", "hypothesis", "sortedcontainers"} <= set(recorded)
    own = {wheels._key(wheels._packaging().Requirement(text).name) for text in wheels.roots()}
    assert own <= set(recorded), "run python benchmarks/wheels.py --record"
    assert wheels.missing()[0] == []
    there = importlib.metadata.distribution

    def gone(name: str) -> Any:
        if name in ("pydantic", "pydantic-core", "datasets", "dill", "multiprocess", "torch"):
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(wheels.metadata, "distribution", gone)
    assert wheels.missing()[0] == ["datasets", "dill", "multiprocess", "pydantic", "pydantic-core", "torch"]

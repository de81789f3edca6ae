"""The parts of `shardwright drill` with real processes, and that nothing is left of a run that was killed. Row A104."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.places import ROOT
from tests.started import LIMIT, environment

from shardwright.config import load_run_file
from shardwright.tools.drill.faults import RESTARTED, Trial
from shardwright.tools.drill.injection import KILL, NONE, at_phase, at_save_stage
from shardwright.tools.drill.target_run import TargetRun
from shardwright.tools.drill.trials import judge, run_trials
from shardwright.train.preflight import prepare_run

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
UPDATES = 16


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TargetRun, TargetRun]]:
    """(reference, run to be broken) of one rank each, with a temporary directory of their own."""
    from rich.console import Console

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    values = {
        "training.max_steps": UPDATES, "checkpoint.save_steps": 2, "checkpoint.output_dir": str(tmp_path / "x"),
        "data.cache_dir": str(tmp_path / "cache"), "hardware.device": "cpu", "hardware.timeout_seconds": int(LIMIT),
        "hardware.threads_per_rank": 1,
    }  # fmt: skip
    loaded = load_run_file("examples/tiny.yaml", values)
    prepare_run(loaded, Console(quiet=True))
    made = (TargetRun(loaded, 1, tmp_path / "reference"), TargetRun(loaded, 1, tmp_path / "broken"))
    yield made
    for target in made:
        target.close()


def test_kills_lose_nothing_and_leave_nothing(targets: tuple[TargetRun, TargetRun], tmp_path: Path) -> None:
    """A104: SIGKILL of the launcher, whose ranks end and leave no file; then of a rank between rename and link.

    Then a flaw in the one run is planted, which the comparison must find and blame on the fault before it. The reference runs
    beside the run that is broken.
    """
    reference, broken = targets
    temporary, shared, left = tmp_path / "tmp", set(os.listdir("/dev/shm")), []

    def kill_launcher(target: TargetRun, update: int) -> str | None:
        found = at_phase(target, 0, "forward_backward", update, NONE)
        assert target.launcher is not None
        family = psutil.Process(target.launcher.pid).children(recursive=True)
        target.kill_launcher()
        left.append((len(family), psutil.wait_procs(family, timeout=LIMIT)[1]))
        return found

    trials = [
        Trial("kill", "of the launcher", kill_launcher, (-signal.SIGKILL,)),
        Trial("save", "of a rank", lambda t, u: at_save_stage(t, 0, "before the link", u, KILL, tries=9), RESTARTED),
    ]
    reference.start(restarts=0)
    results = run_trials(broken, trials, UPDATES, random.Random(0), lambda text: None)
    assert reference.wait_for_end(0) == 0
    judge(results, broken, reference)
    assert [(result.problem, result.after) for result in results] == [("", "identical")] * 2
    assert (
        results[1].lost == 0 and results[1].injected_at == f"save of update {results[1].resumed_from}, before the link"
    )
    ((family, alive),) = left
    assert family >= 2 and not alive  # a rank and the guard, at least
    assert not list(temporary.iterdir()) and set(os.listdir("/dev/shm")) <= shared

    metrics = broken.output_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:-1], lines[-1].replace('"train/loss": 4', '"train/loss": 5')]) + "\n")
    judge(results, broken, reference)
    assert results[1].problem.startswith(f"train/loss of update {UPDATES - 1} is 5")

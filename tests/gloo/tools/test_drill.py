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
from shardwright.tools.drill.chain import judge, run_chain
from shardwright.tools.drill.faults import Fault
from shardwright.tools.drill.moments import Break, at_phase, at_stage
from shardwright.tools.drill.session import Session
from shardwright.train.preflight import prepare_run

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
UPDATES = 16


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, Session]]:
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
    made = (Session(loaded, 1, tmp_path / "reference"), Session(loaded, 1, tmp_path / "broken"))
    yield made
    for session in made:
        session.close()


def test_kills_lose_nothing_and_leave_nothing(sessions: tuple[Session, Session], tmp_path: Path) -> None:
    """A104: SIGKILL of the launcher, whose ranks end and leave no file; then of a rank between rename and link.

    Then a flaw in the one run is planted, which the comparison must find and blame on the fault before it. The reference runs
    beside the run that is broken.
    """
    reference, broken = sessions
    temporary, shared, left = tmp_path / "tmp", set(os.listdir("/dev/shm")), []

    def kill_launcher(session: Session, update: int) -> str | None:
        found = at_phase(session, 0, "forward_backward", update, Break(signal.SIGCONT))
        assert session.launcher is not None
        family = psutil.Process(session.launcher.pid).children(recursive=True)
        session.kill_launcher()
        left.append((len(family), psutil.wait_procs(family, timeout=LIMIT)[1]))
        return found

    kill = Break(signal.SIGKILL)
    faults = [
        Fault("kill", "of the launcher", kill_launcher, (-signal.SIGKILL,)),
        Fault("save", "of a rank", lambda s, u: at_stage(s, 0, "before the link", u, kill, tries=9), (None,)),
    ]
    reference.start(restarts=0)
    rows = run_chain(broken, faults, UPDATES, random.Random(0), lambda text: None)
    assert reference.wait_for_end(0) == 0
    judge(rows, broken, reference)
    assert [(row.problem, row.after) for row in rows] == [("", "identical")] * 2
    assert rows[1].lost == 0 and rows[1].found == f"save of update {rows[1].resumed_from}, before the link"
    ((family, alive),) = left
    assert family >= 2 and not alive  # a rank and the guard, at least
    assert not list(temporary.iterdir()) and set(os.listdir("/dev/shm")) <= shared

    metrics = broken.output_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:-1], lines[-1].replace('"train/loss": 4', '"train/loss": 5')]) + "\n")
    judge(rows, broken, reference)
    assert rows[1].problem.startswith(f"train/loss of update {UPDATES - 1} is 5")

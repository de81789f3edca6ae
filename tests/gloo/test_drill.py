"""The parts of `shardwright drill` with real processes, and that nothing is left of a run that was killed. Row A104."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwright.config import load_run_file
from shardwright.drill.chain import judge, run_chain, run_reference
from shardwright.drill.faults import Fault
from shardwright.drill.moments import Break, at_stage
from shardwright.drill.session import Session
from shardwright.train.start import prepare_run

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
UPDATES = 10


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, Session]]:
    """(reference, run to be broken) of one rank each, with a temporary directory of their own."""
    from rich.console import Console

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    values = {
        "training.max_steps": UPDATES, "checkpoint.save_steps": 2, "checkpoint.output_dir": str(tmp_path / "x"),
        "data.cache_dir": str(tmp_path / "cache"), "hardware.device": "cpu", "hardware.timeout_seconds": 60,
        "hardware.threads_per_rank": 1,
    }  # fmt: skip
    loaded = load_run_file("examples/tiny.yaml", values)
    prepare_run(loaded, Console(quiet=True))
    made = (Session(loaded, 1, tmp_path / "reference"), Session(loaded, 1, tmp_path / "broken"))
    yield made
    for session in made:
        session.close()


def test_a_kill_between_rename_and_link_loses_nothing(
    sessions: tuple[Session, Session], tmp_path: Path
) -> None:
    """Then a flaw in the one run is planted, which the comparison must find and blame on the fault before it."""

    reference, broken = sessions
    run_reference(reference)
    kill = Break(signal.SIGKILL)
    fault = Fault("save", "a kill", lambda s, u: at_stage(s, 0, "before the link", u, kill, tries=9), (None,))
    rows = run_chain(broken, [fault], UPDATES, random.Random(0), lambda text: None)
    judge(rows, broken, reference)
    (row,) = rows
    assert row.problem == "" and row.after == "identical" and row.lost == 0
    assert row.found == f"save of update {row.resumed_from}, before the link"
    assert not list((tmp_path / "tmp").iterdir())

    metrics = broken.output_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text(
        "\n".join([*lines[:-1], lines[-1].replace('"train/loss": 4', '"train/loss": 5')]) + "\n"
    )
    judge(rows, broken, reference)
    assert row.problem.startswith(f"train/loss of update {UPDATES - 1} is 5")


def test_a_killed_train_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    """A104: SIGKILL of the verb; its ranks end, the temporary directory and shared memory are as they were."""
    temporary, output = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    command = [
        sys.executable, "-m", "shardwright", "train", "examples/tiny.yaml", "--training.max_steps", "5000",
        "--data.cache_dir", str(tmp_path / "cache"), "--checkpoint.output_dir", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not list(temporary.iterdir()) and set(os.listdir("/dev/shm")) <= before

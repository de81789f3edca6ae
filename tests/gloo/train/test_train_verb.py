"""The verb `train` as a user calls it, with real processes. Rows A101, A102, A122, A136, A137."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.started import LIMIT, ROOT, environment

from shardwright.cli import main
from shardwright.launch import owned

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
UPDATES = 8


def command(output: Path, *options: str) -> list[str]:
    """`train` on the tiny example, 2 ranks where the launcher is ours."""
    return [
        "-m", "shardwright", "train", "examples/tiny.yaml", "--training.max_steps", str(UPDATES),
        "--data.cache_dir", str(output.parent / "cache"), "--checkpoint.output_dir", str(output), *options,
    ]  # fmt: skip


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def losses(output: Path) -> list[float]:
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [entry["train/loss"] for entry in entries if "train/loss" in entry]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nothing happens to."""
    output = tmp_path_factory.mktemp("whole") / "run"
    done = run(command(output, "--nproc-per-node", "2"))
    assert done.returncode == 0, done.stderr
    assert (output / "latest" / "manifest.json").is_file()
    assert "max_steps: 8" in (output / "config.yaml").read_text()
    found = losses(output)
    assert len(found) == UPDATES and found[-1] < found[0]
    return found


def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on(tmp_path: Path, uninterrupted: list[float]) -> None:
    """A102: SIGTERM reaches rank 1 only. Both save the same update and end with 75; the next start continues bit for bit."""
    output = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, *command(output, "--nproc-per-node", "2")],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT
    while not (output / "metrics.jsonl").exists() or len((output / "metrics.jsonl").read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
    ranks[0].send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, errors
    saved = int(json.loads((output / "latest" / "manifest.json").read_text())["update"])
    assert 2 <= saved < UPDATES and losses(output) == uninterrupted[:saved]
    assert run(command(output, "--nproc-per-node", "2")).returncode == 0
    assert losses(output) == uninterrupted


def test_torchrun_starts_the_same_run(tmp_path: Path, uninterrupted: list[float]) -> None:
    """A137: the same verb under torchrun trains the same and describes itself the same."""
    output = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    done = run([*launcher, *command(output)])
    assert done.returncode == 0, done.stderr
    assert losses(output) == uninterrupted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc-per-node", "3"], r"global_batch_size = 8 is not a multiple of 3"),
        (["--nproc-per-node", "4", "--parallelism.dp_replicate_size", "3"], r"dp_replicate_size 3 .* world size is 4"),
        (["--training.learning_rat", "1"], r"Did you mean `training.learning_rate`"),
        (["--parallelism.data_parallel", "no-shard"], r"'ddp', 'zero1', 'zero2' or 'zero3'"),
        (["--training.optimizer", "adamv"], r"Did you mean `adamw`"),
        (["--training.lr_scheduler_type", "cosin"], r"Did you mean `cosine`"),
        (["--model.model_name_or_path", "/nowhere"], r"no directory /nowhere"),
        (["--data.train", "[nowhere.jsonl]"], r"nowhere.jsonl"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_process_starts(
    tmp_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A122, A136: exit code 2, one message, no output directory, and not one process."""

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["shardwright", *command(tmp_path / "run", *options)[2:]])
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "posix_spawn", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(SystemExit) as end:
        main()
    _, errors = capfd.readouterr()
    assert end.value.code == 2, errors
    assert re.search(message, errors), errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_a_directory_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and who works there; what the first has is left alone. `--print-config` asks for nothing there."""

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with owned(tmp_path / "run", "train", print):
        for options, code in (([], 2), (["--print-config"], 0)):
            monkeypatch.setattr(sys, "argv", ["shardwright", *command(tmp_path / "run", *options)[2:]])
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == code
        _, errors = capfd.readouterr()
        assert f"run is in use by `train`, process {os.getpid()} on " in errors
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["train.lock"]


def test_bad_input_ends_the_command_with_2(tmp_path: Path) -> None:
    done = run(command(tmp_path / "run", "--nproc-per-node", "3"))
    assert done.returncode == 2 and "global_batch_size = 8 is not a multiple of 3" in done.stderr, done.stderr

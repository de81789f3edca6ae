"""The launcher with real processes. Covers A101, A102, A104, A134, A135 and A137."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.places import ROOT
from tests.started import LIMIT

from shardwright.launch.start import rank_environment

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FOREVER = str(2 * LIMIT)
"""Seconds: longer than a test waits for what must end."""
LAUNCHER = """
import json, signal, sys
from pathlib import Path
from shardwright.launch import run_workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored when the tests run in a shell's background
arguments, options = json.loads(sys.argv[1])
options["log_dir"] = Path(options["log_dir"])
sys.exit(run_workers("tests.gloo.launched", arguments, **options))
"""


def _environment() -> dict[str, str]:
    dropped = ("LOCAL_RANK", "SLURM_", "SHARDWRIGHT_", "TORCHELASTIC_", "OMP_", "MKL_", "MALLOC_", "RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


@dataclass
class Launchers:
    """Starts launchers, and ends what a failed test leaves."""

    directory: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, *arguments: str, ranks: int = 2, how: dict[str, Any] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """how: what the launcher itself is started with, where it differs."""
        options |= {"nproc_per_node": ranks, "log_dir": str(self.directory / "logs")}
        command = [sys.executable, "-c", LAUNCHER, json.dumps([arguments, options])]
        given = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
            "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
            **(how or {}),
        }
        self.started.append(subprocess.Popen(command, cwd=self.directory, env=_environment(), text=True, **given))
        return self.started[-1]

    def run(self, *arguments: str, ranks: int = 2, **options: Any) -> tuple[int, str]:
        launcher = self.start(*arguments, ranks=ranks, **options)
        errors = launcher.communicate(timeout=LIMIT)[1]
        return launcher.returncode, errors


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    launchers = Launchers(tmp_path)
    yield launchers
    for launcher in launchers.started:
        launcher.kill()  # its guard ends the ranks
        launcher.communicate()


def _wait(condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value


def _read(directory: Path, ranks: int = 2) -> dict[int, Any]:
    """What each rank has written, once all have."""

    def read() -> dict[int, Any] | None:
        try:
            return {rank: json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)}
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    return _wait(read)


def _alive(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("code", "comes_back"), [(0, 0), (2, 2), (3, 3), (75, 75), (1, 1), (7, 1)], ids=lambda code: str(code)
)
def test_exit_codes_are_kept(launchers: Launchers, code: int, comes_back: int) -> None:
    assert launchers.run("exit_with", str(code)) == (comes_back, "")


def test_the_code_of_one_rank_is_kept(launchers: Launchers) -> None:
    assert launchers.run("exit_with", "3", "1")[0] == 3


def test_the_rank_that_failed_first_is_shown_first(launchers: Launchers) -> None:
    """Rank 0 reports a lost peer before rank 1 has reported the cause; rank 2 hangs."""
    code, errors = launchers.run("raise_on_one", ranks=3)
    assert code == 1
    lines = errors.splitlines()
    assert lines[0] == "shardwright: rank 1 of 3: ValueError: the third sample is empty"
    assert lines[1].startswith("Traceback") and "in raise_on_one" in errors
    assert any(line.startswith("then rank 0: lost its peer at ") and line.endswith(" raise_on_one") for line in lines)
    assert "then rank 2: was killed" in lines
    assert "pair.cc" not in errors


def test_an_error_for_a_person_has_no_traceback(launchers: Launchers) -> None:
    code, errors = launchers.run("refuse")
    assert code == 2
    assert errors.splitlines()[0] == "shardwright: rank 1 of 2: tp_size = 3 is wrong. Set tp_size to 2."
    assert "Traceback" not in errors


def test_an_abort_after_the_end_is_tolerated(launchers: Launchers) -> None:
    assert launchers.run("abort_after_report")[0] == 0


def test_a_native_error_is_told_with_its_words_and_its_line(launchers: Launchers) -> None:
    """As gloo ends a rank that gets more than it asked for, in a thread of its own: no exception reaches Python."""
    lines = launchers.run("abort_with_words")[1].splitlines()
    assert lines[0].startswith("shardwright: rank 1 of 2 was ended by SIGABRT at ") and "launched.py:" in lines[0]
    assert lines[0].endswith(" abort_with_words: 24 vs 20. Received data size doesn't match expected size")


def test_restarts(launchers: Launchers, tmp_path: Path) -> None:
    code, errors = launchers.run("crash_once", str(tmp_path), max_restarts=1)
    assert code == 0 and "starting all ranks again (0 restarts left)" in errors
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["0", "1"]


def test_a_crash_that_would_come_again_is_not_restarted(launchers: Launchers, tmp_path: Path) -> None:
    code, errors = launchers.run("refuse_for_good", max_restarts=3)
    assert code == 1 and "The loss is not finite. Lower the learning rate." in errors
    assert "starting all ranks again" not in errors and len(list((tmp_path / "logs").iterdir())) == 1


def test_fewer_ranks_go_on_where_more_fail_at_their_start(launchers: Launchers, tmp_path: Path) -> None:
    """4 fail before their first update, 3 too, 2 do not. Ranks that failed later are not made fewer."""
    code, errors = launchers.run("needs_two", str(tmp_path), ranks=4, max_restarts=3, fewer=[3, 2])
    assert code == 0 and _read(tmp_path) == {0: ["2", "2"], 1: ["2", "2"]}
    said = "the ranks failed before their first update: the next start uses"
    assert f"{said} 3." in errors and f"{said} 2." in errors
    code, errors = launchers.run("crash_after_updates", ranks=3, max_restarts=1, fewer=[2])
    assert code == 1 and "the next start uses" not in errors and errors.count("ValueError: on 3 ranks\n") >= 2


@pytest.mark.parametrize(("how", "where"), [("asleep", "read_rows"), ("stopped", "stopped by a signal")])
def test_a_rank_that_hangs_is_named(launchers: Launchers, tmp_path: Path, how: str, where: str) -> None:
    """Rank 0 waits for it in a later phase; the stacks of both are kept, and both are ended."""
    code, errors = launchers.run("stuck", how, hang_seconds=2)
    assert code == 1
    lines = errors.splitlines()
    assert lines[0].startswith("shardwright: rank 1 of 2 is stuck in data of update 4 (")
    assert lines[1].startswith("  rank 0: reduce of update 4 for ")
    assert lines[2].startswith("  rank 1: data of update 4 for ") and where in lines[2]
    assert "in stuck" in (tmp_path / "logs/0/rank_0/stacks.txt").read_text()


def test_a_rank_for_which_a_collective_has_waited_too_long_is_named(launchers: Launchers) -> None:
    code, errors = launchers.run("stuck_in_save", hang_seconds=60)
    lines = errors.splitlines()
    assert code == 1 and lines[0].startswith("shardwright: rank 1 of 2 is stuck in save of update 4 (")
    assert "waited for others in a collective for too long" in lines[1] and "read_rows" in lines[2]


def test_the_rank_at_the_root_of_a_chain_is_named(launchers: Launchers) -> None:
    """By what each has begun: all are in one phase, and the ranks that wait stand in no code that tells of it alone."""
    code, errors = launchers.run("stuck_in_a_chain", ranks=3, hang_seconds=2)
    lines = errors.splitlines()
    assert code == 1, errors
    assert lines[0].startswith("shardwright: rank 2 of 3 is stuck in forward_backward of update 4 (")
    assert "launched.py:" in lines[0] and lines[0].endswith(" read_rows.")
    assert "    begun: all_reduce (3) of ranks 0, 1: rank 1 has not begun it" in lines
    assert "    begun: a message from rank 2: rank 2 has not begun it" in lines


def test_what_goes_forward_is_no_hang(launchers: Launchers) -> None:
    assert launchers.run("slow_but_alive", hang_seconds=3) == (0, "")


def test_a_signal_while_a_rank_loads_is_not_lost(launchers: Launchers, tmp_path: Path) -> None:
    """A102: SIGTERM, which would end a process that has not yet asked for it, is held back until it has."""
    launcher = launchers.start("stopped_while_loading", str(tmp_path), hold_signals=True)
    os.kill(_read(tmp_path)[0], signal.SIGTERM)
    launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 75
    assert json.loads((tmp_path / "logs/0/rank_0/outcome.json").read_text())["code"] == 75


def test_a_killed_rank_ends_all(launchers: Launchers, tmp_path: Path) -> None:
    """A104: ranks and their children that are deaf to SIGTERM are gone after rank 0 is killed."""
    launcher = launchers.start("hang_with_children", str(tmp_path))
    family = _read(tmp_path)
    os.kill(family[0][0], signal.SIGKILL)
    errors = launcher.communicate(timeout=LIMIT)[1]
    assert launcher.returncode == 1
    assert not [pid for pids in family.values() for pid in pids if _alive(pid)]
    said = "shardwright: rank 0 of 2 was ended by SIGKILL. The kernel sends this signal when memory runs out"
    assert said in errors.splitlines() and "  | waiting on 0" in errors.splitlines()
    assert "then rank 1: was killed" in errors


def test_a_killed_launcher_takes_all_with_it(launchers: Launchers, tmp_path: Path) -> None:
    """A104: nothing is left when the launcher itself is killed."""
    launcher = launchers.start("hang_with_children", str(tmp_path))
    pids = [pid for pids in _read(tmp_path).values() for pid in pids]
    launcher.kill()
    _wait(lambda: not any(_alive(pid) for pid in pids))


def _in_a_terminal(number: int) -> Callable[[], None]:
    """Makes the terminal `number` that of a new session, as a login does."""

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.setsid()
        fcntl.ioctl(number, termios.TIOCSCTTY, 0)

    return begin


def test_a_terminal_that_is_closed_is_a_request_to_stop(launchers: Launchers, tmp_path: Path) -> None:
    """Ranks and launcher print on both streams all the time; each print fails once the terminal is gone."""
    master, terminal = pty.openpty()
    how = {
        "start_new_session": False,
        "preexec_fn": _in_a_terminal(terminal),
        "stdout": terminal,
        "stderr": terminal,
    }
    launcher = launchers.start("tell", str(tmp_path), how=how, hold_signals=True)
    os.close(terminal)
    _wait(lambda: len(list(tmp_path.glob("*.ready"))) == 2 and b"a warning" in os.read(master, 4096))
    os.close(master)
    assert launcher.wait(timeout=LIMIT) == 75
    assert [(tmp_path / f"{rank}.saved").read_text() for rank in range(2)] == ["SIGHUP", "SIGHUP"]
    log = (tmp_path / "logs/0/rank_0/stderr.log").read_text()
    assert log.count("standard output cannot be written (Input/output error)") == 1 and "Saved." in log


def test_a_terminal_that_nohup_has_set_aside_stops_nothing(launchers: Launchers, tmp_path: Path) -> None:
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    launcher = launchers.start("stop_when_asked", str(tmp_path), "0", how=ignoring)
    _wait(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert [(tmp_path / f"{rank}.saved").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_request_to_stop_reaches_all_ranks(launchers: Launchers, tmp_path: Path, name: str) -> None:
    """A101: ranks that need a second to save get it, and the code says that they did."""
    launcher = launchers.start("stop_when_asked", str(tmp_path), "1", grace_seconds=LIMIT)
    _wait(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    launcher.send_signal(signal.Signals[name])
    launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 75
    assert [(tmp_path / f"{rank}.saved").read_text() for rank in range(2)] == [name, name]


def test_grace_ends(launchers: Launchers, tmp_path: Path) -> None:
    """A101: after the grace period slow ranks are killed, and the code does not say that they saved."""
    launcher = launchers.start("stop_when_asked", str(tmp_path), FOREVER, grace_seconds=1)
    _wait(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    start = time.monotonic()
    errors = launcher.communicate(timeout=LIMIT)[1]
    assert launcher.returncode == 1 and time.monotonic() - start >= 1
    assert "rank(s) 0, 1 had not saved 1 s after SIGTERM" in errors
    assert not list(tmp_path.glob("*.saved"))


def test_a_second_interrupt_ends_at_once(launchers: Launchers, tmp_path: Path) -> None:
    launcher = launchers.start("stop_when_asked", str(tmp_path), FOREVER)
    _wait(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    time.sleep(0.3)
    assert launcher.poll() is None
    os.killpg(launcher.pid, signal.SIGINT)
    errors = launcher.communicate(timeout=LIMIT)[1]
    assert launcher.returncode == 130 and "Press Ctrl-C again to end at once" in errors


def test_ten_starts_at_once(launchers: Launchers, tmp_path: Path) -> None:
    """A134: ten runs started together, with one log directory; each rank 1 finds the rank 0 of its own run."""
    started = [launchers.start("meet", f"token {number}") for number in range(10)]
    for launcher in started:
        assert launcher.communicate(timeout=LIMIT)[1] == ""
    assert [launcher.returncode for launcher in started] == [0] * 10
    assert len(list((tmp_path / "logs").iterdir())) == 10


def test_environment_of_ranks() -> None:
    """A135: threads are shared out unless the user set them; the user's malloc thresholds stay."""
    cores = len(os.sched_getaffinity(0))
    plain = rank_environment({"TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}, 2, "cpu", None)
    assert plain["OMP_NUM_THREADS"] == plain["MKL_NUM_THREADS"] == str(max(1, cores // 2))
    assert plain["HOME"] == "/h" and "TORCHELASTIC_RUN_ID" not in plain
    assert plain["MALLOC_MMAP_THRESHOLD_"] == "4294967296"
    assert plain["MALLOC_TRIM_THRESHOLD_"] == "17179869184"
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 2, "cpu", None)["OMP_NUM_THREADS"] == "7"
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 2, "cpu", 3)["MKL_NUM_THREADS"] == "3"
    asked = rank_environment({"MALLOC_MMAP_THRESHOLD_": "65536"}, 2, "cpu", None)
    assert asked["MALLOC_MMAP_THRESHOLD_"] == "65536" and "MALLOC_TRIM_THRESHOLD_" not in asked
    on_gpus = rank_environment({}, 2, "cuda", None)
    assert "MALLOC_MMAP_THRESHOLD_" not in on_gpus
    assert on_gpus["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the user's own setting stays, under either name
        own = rank_environment({name: "max_split_size_mb:64"}, 2, "cuda", None)
        assert {key: own[key] for key in own if "ALLOC_CONF" in key} == {name: "max_split_size_mb:64"}
        assert rank_environment({name: "x"}, 2, "cpu", None)["MALLOC_MMAP_THRESHOLD_"] == "4294967296"


# With torch


def _with_slurm(directory: Path, *mode: str) -> list[subprocess.Popen[str]]:
    """Two ranks as srun starts them."""
    shared = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gloo.launched", *mode],
            cwd=directory,
            env=_environment() | shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def _record_with_torchrun(directory: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "tests.gloo.launched", "record", str(directory)]
    subprocess.run(command, cwd=directory, env=_environment(), check=True, timeout=LIMIT, capture_output=True)


def test_every_way_to_start_gives_the_same_configuration(launchers: Launchers, tmp_path: Path) -> None:
    """A137: by shardwright, torchrun and Slurm's variables. A135: threads as torch reports them. A134: two at once."""
    other = tmp_path / "other"
    other.mkdir()
    for launcher in [launchers.start("record", str(directory)) for directory in (tmp_path, other)]:
        assert (launcher.communicate(timeout=LIMIT)[1], launcher.returncode) == ("", 0)
    _record_with_torchrun(tmp_path)
    slurm = _with_slurm(tmp_path, "record", str(tmp_path))
    assert [(rank.communicate(timeout=LIMIT)[1], rank.returncode) for rank in slurm] == [("", 0)] * 2
    ways = ("shardwright", "torchrun", "slurm")
    entries = [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for way in ways for rank in range(2)]
    entries += [json.loads((other / f"shardwright-{rank}.json").read_text()) for rank in range(2)]
    assert all(entry == entries[0] for entry in entries)
    cores = len(os.sched_getaffinity(0))
    assert entries[0]["threads"] == entries[0]["torch_threads"] == max(1, cores // 2)
    assert entries[0]["world_size"] == 2 and entries[0]["sum"] == 3.0 and entries[0]["keeps_freed_blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("works", ["long", "dies"])
def test_ranks_wait_longer_than_a_collective_for_one_that_prepares(tmp_path: Path, works: str) -> None:
    """Work of 15 s where a collective may take 10 s and the start 10 s. A rank that dies at it is noticed."""
    ranks = _with_slurm(tmp_path, "prepare_for_long", "10", works)
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    if works == "dies":
        assert codes == [9, 1] and "rank 1 has lost the other ranks" in errors[1], errors
        return
    assert codes == [0, 0] and errors[0] == ""
    assert re.fullmatch(r"(shardwright: rank 1 has waited \d+ s for rank 0, which prepares the run\.\n)+", errors[1])


def test_a_signal_to_one_rank_stops_all_after_the_same_update(launchers: Launchers, tmp_path: Path) -> None:
    """A102: SIGTERM to rank 1 of 2; both leave after the same update, and the run's code is 75."""
    launcher = launchers.start("train", str(tmp_path), "asked")
    os.kill(_read(tmp_path)[1][0], signal.SIGTERM)
    errors = launcher.communicate(timeout=LIMIT)[1]
    (_, last0, asked0, agreed0), (_, last1, asked1, agreed1) = _read(tmp_path).values()
    assert launcher.returncode == 75 and errors == ""
    assert last0 == last1 and agreed0 and agreed1
    assert asked1 and not asked0


def test_a_rank_that_raises_is_shown_before_its_peers_lose_it(launchers: Launchers, tmp_path: Path) -> None:
    """A104 with gloo: loaders hold copies of the rank's sockets, and its peer still notices."""
    launcher = launchers.start("train", str(tmp_path), "raise")
    _wait(lambda: _read(tmp_path)[0][1] > 2)
    errors = launcher.communicate(timeout=LIMIT)[1]
    assert launcher.returncode == 1
    lines = errors.splitlines()
    assert lines[0] == "shardwright: rank 1 of 2: ValueError: the third sample is empty"
    assert any(line.startswith("then rank 0: lost its peer at ") and "launched.py:" in line for line in lines)

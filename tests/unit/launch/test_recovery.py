"""Heartbeats, stacks, spikes, slow ranks, numbers of ranks, and what the drill sees from outside."""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.places import ROOT
from torch._C._distributed_c10d import HashStore

from shardwright.config import load_run_file
from shardwright.errors import ConfigError, SpikeError
from shardwright.launch.hang import Watchdog, main_stack
from shardwright.launch.heartbeat import LONG_FACTOR, Heartbeat, read_heartbeat
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE
from shardwright.tools.drill.compare import compare_metrics, first_difference
from shardwright.tools.drill.injection import save_stage
from shardwright.tools.drill.verb import parse_trials
from shardwright.train.anomaly import LEAST, SLOW_ENTRIES, SlowRanks, Spikes, slow_rank
from shardwright.train.start import possible_counts


def test_a_heartbeat_is_read_from_outside(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path) is None
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.begin(7)
    heartbeat.enter("reduce")
    beat = read_heartbeat(tmp_path)
    assert beat == heartbeat.last() and beat is not None
    assert (beat.process_id, beat.phase, beat.update, beat.first) == (os.getpid(), "reduce", 7, 7)
    assert struct.unpack_from("@q", (tmp_path / "heartbeat").read_bytes()) == (os.getpid(),)
    assert str(beat) == "reduce of update 7" and 0 <= clock.now() - beat.at < 1


def test_long_phases_may_last_longer() -> None:
    """Start, save, end and the first update, which compiles, have more time; evaluation beats with every batch."""
    heartbeat = Heartbeat()
    allowed = {}
    for phase in ("start", "data", "forward_backward", "evaluate", "save", "end"):
        heartbeat.enter(phase)
        allowed[phase] = heartbeat.last().allowed_seconds(10)
    assert allowed == {
        "start": 50, "data": 10, "forward_backward": 10, "evaluate": 10, "save": 50, "end": 50
    }  # fmt: skip
    heartbeat.begin(3)
    heartbeat.enter("forward_backward")
    assert heartbeat.last().allowed_seconds(10) == 10 * LONG_FACTOR
    heartbeat.update = 4
    heartbeat.beat()
    assert heartbeat.last().allowed_seconds(10) == 10


def test_a_beat_asks_nothing_of_the_kernel(tmp_path: Path) -> None:
    """It writes a few words of mapped memory: eight of them in an update cost microseconds, whatever the disk is."""
    heartbeat, asked = Heartbeat(tmp_path / "heartbeat"), []
    sys.setprofile(lambda frame, event, what: asked.append(what.__name__) if event == "c_call" else None)
    try:
        heartbeat.enter("data")
    finally:
        sys.setprofile(None)
    assert {*asked} <= {"index", "pack_into", "perf_counter", "setprofile"}


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 355 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/src/train/update.py", line 200 in _reduce_scalars
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_thread_is_found_among_stacks() -> None:
    assert main_stack(STACKS)[0] == "/lib/torch/distributed/distributed_c10d.py:3000 all_reduce"
    assert main_stack("") == ()


@dataclass
class Result:
    update: int
    loss: float
    grad_norm: float = 1.0
    skipped: bool = False


def noisy(updates: int) -> list[Result]:
    """Losses that fall from 5 with alternating noise of 0.05."""
    return [Result(u, 5 - 0.01 * u + 0.05 * (-1) ** u) for u in range(updates)]


def test_a_spike_is_seen_and_noise_is_not() -> None:
    """The median of the first 20 is 4.9 (between 4.86 and 4.94), so 10% above it, 5.39, is the limit here."""
    for policy in ("continue", "warn", "stop"):
        spikes = Spikes(policy)
        assert [text for result in noisy(20) if (text := spikes.look(result))] == []
    assert Spikes("warn").look(Result(0, 1e9)) == ""  # nothing to compare with
    warn = Spikes("warn")
    for result in noisy(20):
        warn.look(result)
    assert warn.look(Result(20, 5.3)) == ""
    assert "Update 21: the loss 9.0000 is a spike" in warn.look(Result(21, 9.0))
    assert "gradient norm 50 is 50 times" in warn.look(Result(22, 4.8, grad_norm=50.0))
    assert warn.look(Result(23, math.nan, skipped=True)) == ""
    quiet, stop = Spikes("continue"), Spikes("stop")
    for result in noisy(LEAST):
        quiet.look(result)
        stop.look(result)
    assert quiet.look(Result(LEAST, 9.0)) == ""
    with pytest.raises(SpikeError, match=f"Update {LEAST}: the loss 9"):
        stop.look(Result(LEAST, 9.0))


def test_a_slow_rank_is_named_within_its_stage() -> None:
    assert slow_rank([1.0, 1.1, 1.5, 0.9], [0, 0, 0, 0]) == (2, 1.5)  # the median of the others is 1.0
    assert slow_rank([1.0, 2.0], [0, 1]) == (0, 1.0)  # stages of a pipeline do different work
    assert slow_rank([1.0, math.nan], [0, 0]) == (0, 1.0)
    assert slow_rank([1.0], [0]) == (0, 1.0)
    watch = SlowRanks()
    said = [watch.look(1, 1.5) for _ in range(SLOW_ENTRIES + 3)]
    assert [bool(text) for text in said] == [n == SLOW_ENTRIES - 1 for n in range(SLOW_ENTRIES + 3)]
    assert said[SLOW_ENTRIES - 1].startswith("Rank 1 is slow: its own work of an update takes 1.50 times")
    assert not any(SlowRanks().look(rank % 2, 1.5) for rank in range(20))


def test_busy_leaves_waiting_out() -> None:
    before = clock.busy()
    if math.isnan(before):
        pytest.skip("this kernel has no schedstat")
    time.sleep(1.0)
    slept = clock.busy() - before
    total = 0
    start = time.thread_time()
    while time.thread_time() - start < 0.3:
        total += 1
    assert slept < 0.5 and clock.busy() - before - slept > 0.2


def test_numbers_of_ranks_on_which_the_objective_divides() -> None:
    """global_batch_size is 8: 4 and 2 ranks, not 3, whose reason is said."""
    loaded = load_run_file(ROOT / "examples" / "tiny.yaml")
    console = Console(record=True, width=300, quiet=False)
    with console.capture() as said:
        assert possible_counts(loaded, 4, 2, console) == [4, 2]
    assert "Not on 3 ranks: training.global_batch_size = 8 is not a multiple of 3" in said.get()
    with pytest.raises(ConfigError, match="not a multiple of 3"):
        possible_counts(loaded, 3, 3, console)


def test_stages_of_a_save_are_told_from_files(tmp_path: Path) -> None:
    assert save_stage(tmp_path) == ""
    aside = tmp_path / ".checkpoint-4.incomplete"
    (aside / "tensors").mkdir(parents=True)
    assert save_stage(tmp_path) == "before writing"
    (aside / "tensors" / "part").touch()
    assert save_stage(tmp_path) == "while writing"
    (aside / "manifest.json").touch()
    assert save_stage(tmp_path) == "before the rename"
    aside.rename(tmp_path / "checkpoint-4")
    assert save_stage(tmp_path) == "before the link"
    (tmp_path / "latest").symlink_to("checkpoint-4")
    assert save_stage(tmp_path) == ""


def test_any_difference_between_runs_is_found(tmp_path: Path) -> None:
    """A bit, a sign of zero, a name; an entry that is missing, doubled or of another loss."""
    state = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    assert first_difference(state, {name: value.clone() for name, value in state.items()}) == ""
    assert "a differs" in first_difference(state, {**state, "a": -torch.zeros(3)})
    assert "1 names differ: b" in first_difference(state, {"a": state["a"]})
    one, other = tmp_path / "one", tmp_path / "other"
    lines = ['{"update": 0, "train/loss": 3.0}', '{"update": 1, "train/loss": 2.5}']
    for directory, own in ((one, lines), (other, lines)):
        directory.mkdir()
        (directory / "metrics.jsonl").write_text("\n".join(own) + "\n")
    assert compare_metrics(one, other) == (None, "")
    for own, update in (
        (lines[:1], 1),
        ([lines[0], *lines], 1),
        ([lines[0], lines[1].replace("2.5", "2.6")], 1),
    ):
        (one / "metrics.jsonl").write_text("\n".join(own) + "\n")
        assert compare_metrics(one, other)[0] == update


def test_trials_are_known_by_name() -> None:
    assert "kill" in parse_trials("all") and parse_trials("kill, save") == ("kill", "save")
    with pytest.raises(ConfigError, match="Did you mean `kill`"):
        parse_trials("kil")


def test_ranks_without_a_launcher_name_the_one_that_is_stuck(capsys: Any, monkeypatch: Any) -> None:
    """Two ranks of torchrun: each leaves what it has issued in the store, and the first of them says who is to blame."""
    monkeypatch.delenv(STARTED_HERE, raising=False)
    monkeypatch.setattr("faulthandler.dump_traceback", lambda **given: None)  # of all that this process runs
    store = HashStore()
    done = {"ranks": [0, 1], "collectives": [[1, "all_reduce", [[[8]], [[8]]], True]]}
    left = {"ranks": [0, 1], "collectives": [*done["collectives"], [2, "all_reduce", [[[8]], [[8]]], False]]}
    watches = []
    for rank, group in enumerate((left, done)):
        heartbeat = Heartbeat()
        heartbeat.enter("reduce")
        issued = {"groups": {"dp": group}, "sent": [], "received": []}
        watches.append(Watchdog(heartbeat, rank, 2, 0.0, lambda: store, lambda issued=issued: issued))
    said = ""
    while "is stuck in" not in said:
        said += capsys.readouterr().err
    for watch in watches:
        watch.close()
        watch._thread.join()
    said += capsys.readouterr().err
    assert said.count("shardwright: rank 1 of 2 is stuck in reduce of update 0") == 1
    assert "begun: all_reduce (8) of ranks 0, 1: rank 1 has not begun it" in said

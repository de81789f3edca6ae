"""Heartbeats, stacks of ranks, and the report of ranks without a launcher."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from shardwright.launch.hang import Watchdog, main_stack
from shardwright.launch.heartbeat import LONG_FACTOR, Heartbeat, read_heartbeat
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import STARTED_HERE


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
        time.sleep(0.05)
        said += capsys.readouterr().err
    for watch in watches:
        watch.close()
        watch._thread.join()
    said += capsys.readouterr().err
    assert said.count("shardwright: rank 1 of 2 is stuck in reduce of update 0") == 1
    assert "begun: all_reduce (8) of ranks 0, 1: rank 1 has not begun it" in said

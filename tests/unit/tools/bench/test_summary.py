"""What a bench makes of measured updates, from figures written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from shardwright.layout.axes import Axes
from shardwright.planner.problem import Layout
from shardwright.tools.bench.summary import entry, schedule_of
from shardwright.tools.bench.table import lines_below, show
from shardwright.tools.bench.timing import Spread, ratio, slowest


def test_spread_and_ratio() -> None:
    """The load of one moment meets neighbours alike, so a ratio is taken within each turn."""
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (spread.p50, spread.most, spread.n, spread.p95) == (3.0, 10.0, 5, None)
    assert spread.half_width == pytest.approx((7.0 - 1.5) / 2 / 3.0)
    assert Spread.of([float(n) for n in range(1, 101)]).p95 == pytest.approx(95.95)
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    assert ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 2.0


def loop(seconds: list[list[float]], **more: Any) -> dict[str, Any]:
    """Two ranks that send 100 and 200 bytes; half of a window of 2 s is exposed on axis tp."""
    ranks = []
    for rank, own in enumerate(seconds):
        turns = [{"seconds": s, "waited": 0.01, "collected": 0.0, "busy": 0.5 * s} for s in own]
        sent = {"recorded_calls": 1.0, "predicted_calls": 1.0, "predicted_bytes": 100.0 * (rank + 1)}
        row = {"axis": "tp", "collective": "all-gather", "recorded_bytes": 100.0 * (rank + 1), "equal": True}
        one = {"axis": "tp", "collective": "all-gather", "seconds": 1.2, "exposed_seconds": 1.0}
        window = {"seconds": 2.0, "compute_seconds": 0.8, "products_seconds": 0.6, "exposed_seconds": 1.0}
        memory = {"bytes": 1000 * (rank + 1), "composition": {"parameters": 1000}, "by_phase": {}}
        ranks.append(
            {
                "turns": turns,
                "traffic": [{**row, **sent}],
                "memory": memory,
                "flops": [(100.0, 50.0)] * len(own),
                "traced": {**window, "idle_seconds": 0.2, "by_axis": [one], "exposed_axes": {"tp": 1.0}},
            }
        )
    count = len(seconds[0])
    counted = {"targets": [60] * count, "real": [75] * count, "slots": [100] * count}
    planned = {
        "peak_bytes": 1900.0,
        "composition": {},
        "moment": "",
        "seconds": 0.5,
        "parts": {},
        "idle": 0.0,
    }
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    return {
        "kind": "layout", "counted": counted, "first_seconds": [3.0], "loss": 2.0, "ranks": ranks,
        "peak": {"flops": 1000.0, "source": "a file"}, "axes": axes, "build_seconds": 1.0, "planned": planned, **more,
    }  # fmt: skip


def test_an_entry() -> None:
    """An update takes what its slowest rank takes; seconds of the trace are scaled to the update as timed."""
    first = loop([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    made = entry("tp2", loop([[0.5, 0.4, 0.5], [0.4, 0.5, 0.5]]), True, first)
    assert made["step_seconds"] == [0.5, 0.5, 0.5]
    assert made["targets_per_s_p50"] == 120 and made["targets_per_s_per_device"] == 60
    assert made["real_tokens_per_s"] == 150 and made["slots_per_s"] == 200
    assert made["padding_fraction"] == 0.25 and made["speed"] == 2.0 and made["loss_off"] == 0
    assert made["mfu"] == pytest.approx(200 / 0.5 / 2000) and made["hfu"] == pytest.approx(300 / 0.5 / 2000)
    assert made["peak_bytes"] == 2000 and made["predicted"]["peak_bytes"] == 1900
    assert made["traffic"]["tp"]["all-gather"]["recorded_bytes"] == 200
    assert made["traffic"]["tp"]["all-gather"]["equal"] is True
    communication = made["communication"]
    assert communication["exposed_seconds"] == pytest.approx(0.25)
    assert communication["by_axis"]["tp"]["all-gather"]["seconds"] == pytest.approx(0.3)
    assert made["verdict"]["limit"] == "communication of tp" and made["verdict"]["share"] == pytest.approx(0.5)


def test_one_rank_that_sends_otherwise_is_seen() -> None:
    other = loop([[1.0, 1.0], [1.0, 1.0]])
    other["ranks"][1]["traffic"][0]["equal"] = False
    made = entry("tp2", other, True, other)
    assert made["traffic"]["tp"]["all-gather"]["equal"] is False


def test_the_table() -> None:
    """Columns of plain text where there is no terminal; what is not known is n/a."""
    found = loop([[0.5, 0.4, 0.5], [0.4, 0.5, 0.5]])
    peer = {**loop([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), "kind": "peer", "planned": None, "peak": None}
    entries = [entry("tp2", found, True, found), entry("torch ddp", peer, None, found)]
    console = Console(record=True, width=400, force_terminal=False, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        show(console, entries)
    header, own, others = captured.get().splitlines()
    assert own.split()[:2] == ["tp2", "120"] and "500 ms (+0%)" in own and "1.9 kB (-5%)" in own
    assert "equal" in own and others.count("n/a") >= 8 and "20.0%  30.0%" in own
    lines = list(lines_below(entries, [0.003, 0.004, 0.005, 0.004], {"flops": 1e11, "source": "a file"}))
    assert "Measuring takes train 4 ms ±19% an update (n=4), 0.80% of the shortest step." in lines
    assert (
        lines[-1].startswith("MFU counts the FLOPs of the model")
        and "Peak 100.0 GFLOP/s a device: a file." in lines[-1]
    )
    assert "not known" in list(lines_below(entries, [0.004], None))[-1]
    assert any("all-gather over tp 300 ms an update, 250 ms exposed" in line for line in lines)
    assert header.startswith("layout")


def test_a_pipeline_schedule() -> None:
    assert schedule_of(Layout(Axes(dp_shard=2)), 4) == []
    found = schedule_of(Layout(Axes(pp=2), schedule="1f1b"), 2)
    assert len(found) == 2
    assert found[1] == [[1, "F", 0], [1, "B", 0], [1, "F", 1], [1, "B", 1]]

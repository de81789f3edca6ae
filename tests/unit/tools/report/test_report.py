"""The report's page: every figure or its reason, numbers as they were recorded, nothing from outside. Known-fault row A120."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests import places

from shardwright.config.load import load_run_file
from shardwright.errors import ConfigError
from shardwright.layout.pipeline_schedules import actions
from shardwright.planner.pipeline_simulator import Span, StageSeconds, play
from shardwright.tools.report.page import sections, settings, summary
from shardwright.tools.report.predict import Forecast, forecast
from shardwright.tools.report.read import percentiles, read_directory
from shardwright.tools.report.training import other_objective, token_section
from shardwright.tools.report.verb import run_report

TINY = str(places.TINY)
FIGURES = (
    "loss",
    "gradient-norm",
    "layouts-speed",
    "step-time-0",
    "utilisation-mfu",
    "utilisation-exposed",
    "memory-0",
    "memory-phases",
    "pipeline-0",
    "traffic-0",
    "tokens-0",
    "predicted-0",
)
"""What a page of one run has."""
VOID = ("meta", "link", "br", "img", "input", "hr")


def write_run(path: Path, updates: int = 12, world_size: int = 2, **overrides: Any) -> Path:
    """A run's directory as the trainer leaves it, with figures that are easily told apart."""
    path.mkdir(parents=True)
    values = {"model.model_name_or_path": TINY, "model.init": "random", "data.train": ["-"], "data.max_length": 96,
              "training.max_steps": updates, "training.global_batch_size": 8, "checkpoint.export_hf": "none"}  # fmt: skip
    loaded = load_run_file(None, values | {key.replace("__", "."): value for key, value in overrides.items()})
    (path / "config.yaml").write_text(loaded.to_yaml(origins=True))
    entries = [
        {
            "update": update, "train/loss": 5 - update / 4, "train/grad_norm": 2 + update % 3,
            "perf/step_seconds": 9.0 if update < 2 else 1 + update / 100, "perf/target_tokens_per_s": 100.0 + update,
            "mem/peak_allocated_bytes": None, "mem/peak_host_bytes": 400_000_000,
            "data/slots": 16, "data/real_tokens": 12, "data/target_tokens": 3, "perf/mfu": 0.3, "perf/hfu": 0.4,
        }
        for update in range(updates)
    ]  # fmt: skip
    if updates > 4:
        entries[3] |= {"comm/exposed_seconds/dp_shard": 0.206, "comm/exposed_seconds/all_ranks": 0.0103}
        entries[4] |= {"mem/forward_peak_bytes": 60_000_000, "mem/backward_peak_bytes": 70_000_000}
    entries.append({"update": updates - 1, "mem/save_peak_bytes": 80_000_000})
    (path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    environment = {"world_size": world_size, "device": "cpu", "torch": "2.13.0"}
    (path / "environment.json").write_text(json.dumps(environment))
    return path


def write_bench(path: Path) -> Path:
    """A directory as bench leaves it: a layout, one with a pipeline, a peer."""
    path.mkdir(parents=True)
    sent = {
        "predicted_calls": 6.0,
        "recorded_calls": 6.0,
        "predicted_bytes": 40e6,
        "recorded_bytes": 50e6,
        "equal": False,
    }
    by_axis = {
        "dp_shard": {
            "all-gather": {"seconds": 0.4, "exposed_seconds": 0.2},
            "reduce-scatter": {"seconds": 0.3, "exposed_seconds": 0.02},
        },
        "all ranks": {"all-reduce": {"seconds": 0.01, "exposed_seconds": 0.01}},
    }
    alive = {"parameters": 30e6, "activations": 60e6}
    memory = {"composition": alive, "by_phase": {"forward": 80e6, "backward": 90e6}}
    layout = {
        "mfu": 0.31, "hfu": 0.4, "communication": {"by_axis": by_axis, "exposed_axes": {"dp_shard": 0.2, "all ranks": 0.01}},
        "name": "zero1", "kind": "layout", "proven": True, "step_seconds": [1.0, 1.1, 1.2], "targets_per_s": [300, 310, 320],
        "padding_fraction": 0.25, "peak_bytes": 90e6, "memory": memory,
        "predicted": {"peak_bytes": 100e6, "composition": {"parameters": 30e6, "activations": 70e6}, "step_seconds": 1.0},
        "traffic": {"dp_shard": {"all-gather": sent}},
        "verdict": {"limit": "padding", "share": 0.25, "evidence": "a quarter", "helps": "packing", "helps_not": ""},
    }  # fmt: skip
    lists = [[list(action) for action in own] for own in actions("1f1b", 2, 1, 4)]
    pipeline = {**layout, "name": "pp2", "predicted": None, "traffic": {}, "schedule": lists, "hfu": 0.31}
    peer = {
        "name": "a peer",
        "kind": "peer",
        "proven": None,
        "step_seconds": [2.0, 2.0, 2.0],
        "targets_per_s": [150, 150, 150],
    }
    whole = {
        "layouts": [layout, pipeline, peer],
        "run_file": "model:\n  init: random    # run.yaml:2\n",
        "environment": {"torch": "x"},
    }
    (path / "bench.json").write_text(json.dumps(whole))
    return path


class Tags(HTMLParser):
    """Refuses tags that do not match, ids that stand twice, and references to what is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.addresses: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        for key in ("aria-labelledby", "aria-describedby"):
            self.named += (given.get(key) or "").split()
        self.addresses += [value for key in ("href", "src", "action") if (value := given.get(key))]
        self.svgs += tag == "svg" and given.get("role") == "img"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(*paths: Path, output: Path, device: str | None = None) -> str:
    said: list[str] = []
    assert run_report(paths, output, device, said.append) == 0
    assert said[-1].startswith(f"Wrote {output} (")
    return output.read_text()


def check_html(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert not tags.open and len(tags.ids) == len(set(tags.ids))
    assert set(tags.named) <= set(tags.ids)
    for address in tags.addresses:
        assert address == "data:," or (address.startswith("#") and address[1:] in tags.ids)
    assert "url(" not in page and "@import" not in page and "://" not in page
    figures = "".join(re.findall(r"<figure.*?</figure>", page, re.S))
    assert not re.search(r"\b(nan|NaN|inf|None)\b", figures)
    return tags


def figure(page: str, identity: str) -> str:
    return page.split(f'<figure id="figure-{identity}"')[1].split("</figure>")[0]


def test_a_page_of_one_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a", parallelism__pp_size=2), output=tmp_path / "page.html")
    tags = check_html(page)
    assert all(f"figure-{name}" in tags.ids for name in FIGURES)
    assert tags.svgs == 2 * 10  # all but layouts-speed and predicted-0, wide and narrow
    assert "5 at first, 2.25 at last" in figure(page, "loss")
    steps = figure(page, "step-time-0")
    assert "p50 1.06 s" in steps and "max 1.11 s over 10 updates" in steps and "first 2 of 12" in steps
    assert "n/a</b>one layout alone" in figure(page, "layouts-speed")
    assert "MFU 30.0%." in figure(page, "utilisation-mfu") and "HFU adds the FLOPs" in figure(page, "utilisation-mfu")
    exposed = figure(page, "utilisation-exposed")
    # a fifth of the profiled update of 1.03 s, as seconds of the usual 1.065 s
    assert "224 ms (21%)" in exposed and "dp_shard 213 ms" in exposed and "all ranks 11 ms" in exposed
    assert "The most is 80 MB (a, save)." in figure(page, "memory-phases")
    assert "the device&#39;s speed is not known" in figure(page, "predicted-0")


def test_three_counters_of_tokens(tmp_path: Path) -> None:
    """A120: 16 positions, 12 tokens, 3 targets stay three numbers, over 4 updates."""
    (section,) = token_section([read_directory(write_run(tmp_path / "a", updates=4))]).figures
    assert section.table is not None
    assert [row[1] for row in section.table.rows] == ["12", "36", "16", "64"]
    assert section.caption == "Of 64 positions 18.8% are in the loss and 25.0% are padding."


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    for name in ("metrics.jsonl", "environment.json"):
        (path / name).unlink()
    page = page_of(path, output=tmp_path / "page.html")
    tags = check_html(page)
    assert tags.svgs == 0
    for name in FIGURES:
        assert "n/a</b>" in figure(page, name)
    assert "there is no metrics.jsonl." in figure(page, "loss")
    assert "environment.json does not say the number of ranks." in figure(page, "memory-0")


def test_a_gap_and_a_line_cut_off(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", updates=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "train/loss": null, "perf/step_seconds": 1.0}\n{"update": 4, "train/l')
    directory = read_directory(path)
    assert directory.column("train/loss") == [5, 4.75, 4.5, None] and directory.numbers == [1, 2, 3, 4]
    assert directory.notices == ("Lines of metrics.jsonl that cannot be read and are left out: 1.",)
    page = page_of(path, output=tmp_path / "page.html")
    check_html(page)
    assert "1 not finite" in figure(page, "loss")
    assert "a: Lines of metrics.jsonl that cannot be read and are left out: 1." in page


def test_names_are_not_markup(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / name / "run", parallelism__data_parallel=kind)
        for name, kind in (("<i>", "ddp"), ("b", "zero3"))
    ]
    page = page_of(*paths, output=tmp_path / "page.html")
    check_html(page)
    assert "<i>" not in page and "&lt;i&gt;/run" in page
    assert "Largest difference of the loss at the same update: 0." in figure(page, "loss")


def test_runs_side_by_side(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", parallelism__data_parallel="ddp"), write_run(tmp_path / "b")]
    subjects = [(one, forecast(one, None)) for one in map(read_directory, paths)]
    assert [row[1] for row in summary(subjects).rows] == ["ddp", "zero3"]  # zero3 is the default
    by_name = {s.identity: s for s in sections(subjects)}
    speed = by_name["layouts"].figures[0]
    assert speed.table is not None
    assert speed.table.rows[0] == (
        "a",
        "106",
        "102",
        "111",
        "10",
    )  # updates 2 to 11: 102 to 111, median 106.5 to even
    page = page_of(*paths, output=tmp_path / "page.html")
    check_html(page)
    assert "parallelism.data_parallel" in page.split("What differs")[1].split("</table>")[0]


def test_another_objective_is_named(tmp_path: Path) -> None:
    same = {"parallelism__data_parallel": "ddp", "training__per_device_train_batch_size": 2}
    paths = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", **same),
        write_run(tmp_path / "c", training__seed=7),
    ]
    a, b, c = map(read_directory, paths)
    assert other_objective([a, b]) == [] and other_objective([a, b, c]) == ["training.seed"]
    assert "same objective: training.seed differ." in page_of(*paths, output=tmp_path / "page.html")


def test_what_bench_wrote(tmp_path: Path) -> None:
    page = page_of(write_bench(tmp_path / "b"), output=tmp_path / "page.html")
    check_html(page)
    predicted = figure(page, "predicted-0")
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", predicted)
    ratios = {
        (name, re.findall(r">([^<]+)</td>", cells)[0]): re.findall(r">([^<]+)</td>", cells)[3] for name, cells in rows
    }
    assert ratios[("zero1", "memory")] == "0.900" and ratios[("zero1", "traffic")] == "1.250"
    assert ratios[("zero1", "time")] == "1.100" and ratios[("pp2", "time")] == "n/a"
    assert not any(name == "a peer" for name, _ in ratios)
    assert "0 sent exactly" in figure(page, "traffic-0")
    assert "MFU 31.0%." in figure(page, "utilisation-mfu")
    assert "dp_shard 200 ms" in figure(page, "utilisation-exposed") and "210 ms (19%)" in figure(
        page, "utilisation-exposed"
    )
    assert "The most is 90 MB (zero1, backward)." in figure(page, "memory-phases")
    assert "padding: a quarter. Would help: packing." in figure(page, "layouts-verdict")
    # 1F1B on 2 ranks and 4 microbatches waits 1 of 5 turns
    assert "The ranks wait 20.0% of the time" in figure(page, "pipeline-0")
    assert "n/a</b>" in figure(page, "loss") and "n/a</b>" in figure(page, "tokens-0")


def test_the_forecast_is_the_planners(tmp_path: Path) -> None:
    """Peak of a layout by hand: 4 ranks of zero1 keep whole fp32 parameters, and a quarter of two fp32 moments each."""
    directory = read_directory(write_run(tmp_path / "a", world_size=4, parallelism__data_parallel="zero1"))
    found = forecast(directory, None)
    assert isinstance(found, Forecast)
    start = dict(zip(("parameters", "optimizer"), found.moments[0].alive))
    assert start["optimizer"] == pytest.approx(2 * start["parameters"])
    assert found.peak_bytes == max(moment.total for moment in found.moments)
    assert found.schedule is None and found.time is None
    unknown = replace(directory, environment={})
    assert forecast(unknown, None) == "environment.json does not say the number of ranks"


def test_ddp_is_no_hsdp(tmp_path: Path) -> None:
    """ddp's ranks are all replicas; only zero kinds are hybrids. A layout is named as --layouts takes it."""
    for given, name in (
        ({"parallelism__data_parallel": "ddp"}, "ddp"),
        ({"parallelism__dp_replicate_size": 2}, "zero3+hsdp2"),
        ({"parallelism__tp_size": 2}, "zero3+tp2"),
    ):
        found = forecast(read_directory(write_run(tmp_path / name, world_size=4, **given)), None)
        assert isinstance(found, Forecast) and found.layout == name


def test_settings_keep_their_origin(tmp_path: Path) -> None:
    found = {one.key: one for one in settings(read_directory(write_run(tmp_path / "a")))}
    assert found["training.global_batch_size"].value == "8"
    assert found["training.weight_decay"].origin == "default" and found["data.max_length"].origin != "default"


def test_percentiles_are_those_of_the_training_loop() -> None:
    assert percentiles([float(value) for value in range(1, 101)]) == (50.5, pytest.approx(95.95), 100)
    assert percentiles([2.0]) == (2, 2, 2)
    assert percentiles([1.0, 2.0]) == (1.5, 2, 2)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "none", "is no directory"), (tmp_path / "empty", "holds neither")):
        with pytest.raises(ConfigError, match=words):
            read_directory(path)
    run = write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="given more than once"):
        run_report([run, run], None, None, lambda text: None)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "zbv"])
def test_spans_are_what_was_played(schedule: Any) -> None:
    chunks = 2 if schedule == "zbv" else 1
    times = [StageSeconds(1.0, 1.5, 0.5)] * (3 * chunks)
    owner = [*range(3), *reversed(range(3))]
    seen: list[Span] = []
    played = play(actions(schedule, 3, chunks, 6), owner.__getitem__, times, seen=seen)
    assert max(span.end for span in seen) == played.total
    for rank in range(3):
        own = [span for span in seen if span.rank == rank]
        assert sum(span.end - span.start for span in own) == pytest.approx(played.busy[rank])
        assert all(first.end <= second.start for first, second in itertools.pairwise(own))
    done = {span.action: span for span in seen}
    for (stage, kind, index), span in done.items():
        if kind == "F" and stage:
            assert span.start >= next(s.end for a, s in done.items() if a == (stage - 1, "F", index))

"""`shardwright bench`: the objective is checked, then layouts and peers are timed in turn; a table, verdicts and bench.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.config.output_paths import check_writable_directory, check_writable_file
from shardwright.console import say
from shardwright.errors import CheckFailed, ConfigError, ExitCode, ShardwrightError
from shardwright.launch import refuse_launcher, run_workers
from shardwright.layout.legality import check_run
from shardwright.layout.names import with_layout
from shardwright.measure import clock
from shardwright.measure.bottleneck import Bottleneck
from shardwright.mesh.process_group import device_kind
from shardwright.planner.hardware import find_device
from shardwright.planner.problem import layout_of, problem_of
from shardwright.tools.bench.peers import check_peers, kind_of_peer, possible_peers
from shardwright.tools.bench.rank import Spec
from shardwright.tools.bench.summary import entry, schedule_of
from shardwright.tools.bench.table import lines_below, show
from shardwright.tools.check.verb import check_layouts, possible_layouts
from shardwright.train.planned import plan_of, shape_of
from shardwright.train.preflight import prepare_run
from shardwright.units import format_bytes, format_seconds

RESULT, HISTORY = "bench.json", "bench-results.jsonl"
WARMUP, UPDATES = 3, 12
ROOM = 0.8
"""Share of the free memory that loops which run together may take."""


@dataclass(frozen=True)
class Request:
    """The arguments of a bench."""

    ranks: int
    layouts: str
    versus: str = ""
    """`peers` or empty."""
    updates: int = UPDATES
    warmup: int = WARMUP
    device: str | None = None
    """Device or hardware file that predicts step times."""
    trace: Path | None = None
    """Directory for the traces."""


def run_bench(loaded: Loaded, request: Request) -> int:
    """Prints the measurements and writes them below `checkpoint.output_dir`; the exit code.

    0; 3 where a layout does not train the same objective and so is not timed; 1 where ranks fail.
    """
    console = Console(highlight=False)
    refuse_launcher("bench")
    output = Path(loaded.run.checkpoint.output_dir)
    runs, peers = _refused_or_prepared(loaded, request, output, console)
    codes = check_layouts(loaded, ",".join(runs), request.ranks, console)
    for name in (name for name, code in codes.items() if code):
        say(console, f"{name} is not timed: {name} does not train the same objective.")
    runs = {name: run for name, run in runs.items() if codes[name] == ExitCode.DONE}
    if not runs:
        raise CheckFailed("No layout trains the same objective.", "", "See what `check` found above.")
    peers = [peer for peer in peers if kind_of_peer(peer) in runs]
    output.mkdir(parents=True, exist_ok=True)
    device = device_kind(loaded.run.hardware.device, request.ranks)
    entries, about = _measured(runs, peers, request, device, output, console)
    return _finished(_timed(loaded, request), entries, about, output, console, codes)


def _refused_or_prepared(
    loaded: Loaded, request: Request, output: Path, console: Console
) -> tuple[dict[str, Loaded], list[str]]:
    """(the timed run of each layout, peers). Refuses what can be refused without a rank, and tokenises rows."""
    if request.versus not in ("", "peers"):
        raise ConfigError(f"--vs {request.versus} is not known.", "", "Valid: peers.")
    if request.device is not None:
        find_device(request.device)
    for name in (RESULT, HISTORY):
        check_writable_file(output / name, "checkpoint.output_dir")
    if request.trace is not None:
        check_writable_directory(request.trace, "--trace")
    device = device_kind(loaded.run.hardware.device, request.ranks)
    if request.versus:
        check_peers(loaded.run)
    names, *_ = possible_layouts(loaded, request.layouts, request.ranks, device, console)
    if not names:
        raise ConfigError("No layout can run.", "The reasons stand above.", "Change --layouts or --nproc-per-node.")
    runs = {name: with_layout(_timed(loaded, request), name) for name in names}
    for chosen in runs.values():
        check_run(chosen, request.ranks)
    peers, lines = possible_peers(list(names)) if request.versus else ([], [])
    for line in lines:
        say(console, line)
    rows = prepare_run(next(iter(runs.values())), console)
    if peers and rows.table.weighted:
        raise ConfigError(
            "--vs peers cannot be run with targets that have weights.",
            "Other programs are given labels and cannot be given weights.",
            "Leave --vs out, or use data without weights.",
        )
    return runs, peers


def _timed(loaded: Loaded, request: Request) -> Loaded:
    """The run as it is timed: a constant learning rate, enough updates, no checkpoints."""
    updates = request.updates + request.warmup + 20
    changed: dict[str, Any] = {
        "training.max_steps": updates,
        "training.num_train_epochs": None,
        "training.lr_scheduler_type": "constant",
        "training.warmup_steps": 0,
        "training.lr_scheduler_kwargs": {},
        "checkpoint.resume": "never",
        "checkpoint.partial": [],
        "checkpoint.accept_changes": [],
        "data.drop_last": False,
    }
    return loaded.replaced(changed, "default")


def _measured(
    runs: dict[str, Loaded], peers: list[str], request: Request, device: str, output: Path, console: Console
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(entries of all loops, the other measurements), in as few starts of ranks as memory allows."""
    entries: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    groups = list(_groups(runs, peers, request.ranks, device))
    if len(groups) > 1:
        say(
            console,
            f"Memory does not hold all loops at once: {len(groups)} starts of ranks, each with the first layout.",
        )
    if request.trace is not None:
        request.trace.mkdir(parents=True, exist_ok=True)
    for names, others in groups:
        started, everyone = clock.now(), ", ".join((*names, *others))
        found = _ranks_started({name: runs[name] for name in names}, others, request, device, output)
        first = found["loops"][names[0]]
        for name, loop in found["loops"].items():
            if name not in {one["name"] for one in entries}:
                made = entry(name, loop, True if name in runs else None, first)
                if name in runs:
                    made["schedule"] = _schedule(runs[name], request.ranks)
                entries.append(made)
        about = {key: value for key, value in found.items() if key != "loops"}
        say(console, f"{everyone}: {format_seconds(clock.now() - started)}.")
    return entries, about


def _ranks_started(
    runs: dict[str, Loaded], peers: list[str], request: Request, device: str, output: Path
) -> dict[str, Any]:
    """Starts ranks once and returns their measurements."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=output) as scratch:
        result, path = Path(scratch) / "result.json", Path(scratch) / "spec.json"
        texts = {name: run.to_json() for name, run in runs.items()}
        trace = str(request.trace.absolute()) if request.trace else ""
        spec = Spec(texts, tuple(peers), request.warmup, request.updates, request.device, trace, str(result))
        spec.write(path)
        code = run_workers(
            "shardwright.tools.bench.rank",
            [str(path)],
            nproc_per_node=request.ranks,
            log_dir=output / "logs",
            device=device,
            threads=next(iter(runs.values())).run.hardware.threads_per_rank,
        )
        if code:
            raise ShardwrightError(
                f"The ranks that timed {', '.join((*runs, *peers))} ended with {code}.",
                "They left no measurements.",
                f"Their output is in {output / 'logs'}.",
            )
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _groups(
    runs: dict[str, Loaded], peers: list[str], ranks: int, device: str
) -> Iterator[tuple[list[str], list[str]]]:
    """(layouts, peers) that fit into memory together; the first layout is in every group, to compare with."""
    names = list(runs)
    room = ROOM * psutil.virtual_memory().available if device == "cpu" else None
    sizes = {name: _bytes(runs[name], ranks) for name in names}
    if room is None or any(size is None for size in sizes.values()):
        yield names, peers
        return
    largest = max(size or 0.0 for size in sizes.values())
    group, others, taken = [names[0]], list[str](), sizes[names[0]] or 0.0
    for name in (*names[1:], *peers):
        size = sizes.get(name) or largest
        if taken + size > room and (len(group) > 1 or others):
            yield group, others
            group, others, taken = [names[0]], [], sizes[names[0]] or 0.0
        (group if name in runs else others).append(name)
        taken += size
    yield group, others


def _bytes(loaded: Loaded, ranks: int) -> float | None:
    """Planned bytes of all ranks of this machine together."""
    shape = shape_of(loaded.run)
    if shape is None:
        return None
    return ranks * plan_of(loaded.run, check_run(loaded, ranks), shape, False, None).peak_bytes


def _schedule(loaded: Loaded, ranks: int) -> list[list[list[Any]]]:
    shape = shape_of(loaded.run)
    if shape is None:
        return []
    layout = layout_of(loaded.run, check_run(loaded, ranks))
    return schedule_of(layout, layout.microbatches(problem_of(loaded.run, shape)))


def _finished(
    loaded: Loaded,
    entries: list[dict[str, Any]],
    about: dict[str, Any],
    output: Path,
    console: Console,
    codes: dict[str, int],
) -> int:
    show(console, entries)
    for line in lines_below(entries, about["measuring_seconds"], about["peak"]):
        say(console, line)
    for one in entries:
        if one["kind"] == "layout":
            say(console, f"{one['name']}: {Bottleneck(**one['verdict'])}")
    say(console, f"Host memory of a rank: {format_bytes(max(about['host_bytes']))} at most, all loops together.")
    environment = {"date": clock.date(), **about["environment"]}
    refused = [name for name, code in codes.items() if code]
    whole = {
        "layouts": entries,
        "not_timed": refused,
        "run_file": loaded.to_yaml(origins=True),
        "environment": environment,
        **{key: about[key] for key in ("host_bytes", "device_bytes", "measuring_seconds", "peak")},
    }
    (output / RESULT).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    with (output / HISTORY).open("a", encoding="utf-8") as history:
        for one in entries:
            kept = {key: value for key, value in one.items() if isinstance(value, (str, int, float, type(None)))}
            history.write(json.dumps({"date": environment["date"], **kept}) + "\n")
    say(console, f"Wrote {output / RESULT}; added {len(entries)} lines to {output / HISTORY}.")
    return ExitCode.CHECK_FAILED if refused else ExitCode.DONE

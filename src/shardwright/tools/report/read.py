"""Reads the directory of a run or of a bench, and notes which files are missing and why."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from shardwright.config.load import load_run_file
from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError
from shardwright.layout.pipeline_schedules import Action
from shardwright.measure import metric_names as names

WARMUP_UPDATES = 2
"""Updates at the start of a run whose times do not count, as in the training loop."""
METRICS, RUN_FILE, ENVIRONMENT, BENCH = "metrics.jsonl", "config.yaml", "environment.json", "bench.json"

CollectiveTime = tuple[str, str, float, float]
"""(axis, collective, its seconds in an update, its seconds that no compute covers)."""


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends over one axis with one collective in an update, predicted and recorded."""

    axis: str
    collective: str
    predicted_bytes: float
    recorded_bytes: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one layout, one peer, or one run."""

    name: str
    proven: bool | None
    """Whether `check` found the objective equal; None where nobody asked."""
    step_seconds: tuple[float, ...]
    """Of each update after the warm-up, as the rates."""
    targets_per_s: tuple[float, ...]
    peak_bytes: float | None
    """Allocated bytes of the fullest rank."""
    padding: float | None = None
    composition: Mapping[str, float] = field(default_factory=dict)
    """Bytes at the peak, by category."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """The planner's prediction at the time of the measurement."""
    traffic: tuple[Sent, ...] = ()
    schedule: tuple[tuple[Action, ...], ...] = ()
    """Action lists of the pipeline's ranks."""
    verdict: str = ""
    """The bottleneck, as a sentence."""
    peer: bool = False
    mfu: float | None = None
    hfu: float | None = None
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an update by process group."""
    communication: tuple[CollectiveTime, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    """Peak bytes by phase."""

    @property
    def by_axis(self) -> dict[str, float]:
        """Recorded bytes by axis."""
        sums: dict[str, float] = {}
        for one in self.traffic:
            sums[one.axis] = sums.get(one.axis, 0.0) + one.recorded_bytes
        return sums


@dataclass(frozen=True)
class RunDirectory:
    """One directory of the report."""

    path: Path
    name: str
    run: RunFile | None
    run_file: str
    updates: tuple[Mapping[str, Any], ...]
    """Entries of metrics.jsonl for an update, in order."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Entries with an evaluation loss."""
    others: tuple[Mapping[str, Any], ...]
    """Entries that are not for an update."""
    environment: Mapping[str, Any]
    benched: tuple[Measured, ...]
    checkpoints: tuple[tuple[int, str], ...]
    missing: Mapping[str, str]
    """Name of a file -> why it is missing."""
    notices: tuple[str, ...]
    """Lines about what was left out."""

    def column(self, key: str) -> list[float | None]:
        """One value of each update; None where the value is missing or not finite."""
        return [_number(entry.get(key)) for entry in self.updates]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the updates, from 1."""
        return [int(entry["update"]) + 1 for entry in self.updates]

    @property
    def steady(self) -> Sequence[Mapping[str, Any]]:
        """The updates after the warm-up, or all updates where there are no more."""
        return self.updates[WARMUP_UPDATES:] or self.updates

    def largest(self, key: str) -> float | None:
        """The largest value of a metric over all updates."""
        return max((value for value in self.column(key) if value is not None), default=None)

    @property
    def padding(self) -> float | None:
        """The fraction of the positions of all logged updates that is padding."""
        pairs = zip(self.column(names.SLOTS), self.column(names.REAL_TOKENS))
        counted = [(slots, real) for slots, real in pairs if slots is not None and real is not None]
        slots = sum(slots for slots, _ in counted)
        return 1 - sum(real for _, real in counted) / slots if slots else None

    def measured(self) -> Measured | None:
        """The run itself as one measured layout; None where no update was timed."""
        timed = [entry for entry in self.steady if _number(entry.get(names.STEP_SECONDS))]
        if not timed:
            return None
        return Measured(
            self.name,
            None,
            tuple(float(entry[names.STEP_SECONDS]) for entry in timed),
            tuple(rate for entry in timed if (rate := _number(entry.get(names.TARGETS_PER_SECOND))) is not None),
            self.largest(names.PEAK_ALLOCATED),
            self.padding,
            mfu=self._middle(names.MFU),
            hfu=self._middle(names.HFU),
            exposed=self._exposed([float(entry[names.STEP_SECONDS]) for entry in timed]),
            phases=self._phases(),
        )

    @property
    def all_measured(self) -> list[Measured]:
        """The benched layouts and peers, and the run itself where an update was timed."""
        own = self.measured()
        return [*self.benched, *([own] if own else [])]

    def _middle(self, key: str) -> float | None:
        """The median of a metric over the updates whose times count."""
        found = [value for entry in self.steady if (value := _number(entry.get(key))) is not None]
        return median(found) if found else None

    def _exposed(self, seconds: Sequence[float]) -> dict[str, float]:
        """By process group, the median over profiled updates, each scaled to the median update: a profiler slows an update."""
        found: dict[str, list[float]] = {}
        for entry in self.updates:
            for group, key in names.EXPOSED_OF.items():
                if key in entry:
                    share = float(entry[key]) / float(entry[names.STEP_SECONDS])
                    found.setdefault(group, []).append(share * median(seconds))
        return {group: median(values) for group, values in found.items()}

    def _phases(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for entry in (*self.updates, *self.others):
            for phase, key in names.PHASE_PEAK.items():
                if key in entry:
                    found[phase] = max(found.get(phase, 0.0), _number(entry[key]) or 0.0)
        return found


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(p50, p95, max), p95 as the training loop takes it."""
    p95 = quantiles(values, n=20)[18] if len(values) > 1 else values[0]
    return median(values), min(p95, max(values)), max(values)  # of few values the 95th lies outside of them


def read_directory(path: Path) -> RunDirectory:
    """The contents of `path`. Raises `ConfigError` where there is no such directory, or no file of a run or a bench in it."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no directory.", "report reads what a run or a bench has left.", "Give its output_dir."
        )
    if not any((path / name).is_file() for name in (METRICS, RUN_FILE, BENCH)):
        raise ConfigError(
            f"{path} holds neither {METRICS}, {RUN_FILE} nor {BENCH}.",
            "There is nothing to report.",
            "Give the output_dir of a run, or the directory that bench wrote.",
        )
    missing: dict[str, str] = {}
    bench = _json(path / BENCH, missing)
    entries, notices = _metrics(path / METRICS, missing)
    run, text = _run_file(path / RUN_FILE, bench, missing)
    environment = _json(path / ENVIRONMENT, missing) or dict(bench.get("environment") or {})
    if environment:
        missing.pop(ENVIRONMENT, None)
    return RunDirectory(
        path,
        path.resolve().name,
        run,
        text,
        tuple(entry for entry in entries if names.LOSS in entry),
        tuple(entry for entry in entries if names.EVAL_LOSS in entry),
        tuple(entry for entry in entries if names.LOSS not in entry),
        environment,
        tuple(_measured(layout) for layout in bench.get("layouts", ())),
        _checkpoints(path),
        missing,
        tuple(notices),
    )


def _number(value: Any) -> float | None:
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else None


def _json(path: Path, missing: dict[str, str]) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing[path.name] = f"there is no {path.name}"
        return {}
    except ValueError as error:
        missing[path.name] = f"{path.name} is not JSON: {error}"
        return {}
    return values if isinstance(values, dict) else {}


def _metrics(path: Path, missing: dict[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The entries of metrics.jsonl, and a notice of lines that a crash cut off."""
    if not path.is_file():
        missing[METRICS] = f"there is no {METRICS}"
        return [], []
    entries, bad = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append({"update": int((entry := json.loads(line))["update"]), **entry})
        except (ValueError, KeyError, TypeError):
            bad += 1
    if not any(names.LOSS in entry for entry in entries):
        missing[METRICS] = f"{METRICS} holds no update"
    return entries, [f"Lines of {METRICS} that cannot be read and are left out: {bad}."] if bad else []


def _run_file(path: Path, bench: Mapping[str, Any], missing: dict[str, str]) -> tuple[RunFile | None, str]:
    if not path.is_file():
        text = bench.get("run_file")
        missing[RUN_FILE] = f"there is no {RUN_FILE}"
        return None, text if isinstance(text, str) else ""
    text = path.read_text(encoding="utf-8")
    try:
        return load_run_file(path, {}).run, text
    except ConfigError as error:
        missing[RUN_FILE] = f"this version refuses {RUN_FILE}: {error}"
        return None, text


def _measured(layout: Mapping[str, Any]) -> Measured:
    """An entry of bench.json."""
    sent = [
        Sent(axis, collective, float(row["predicted_bytes"]), float(row["recorded_bytes"]))
        for axis, collectives in (layout.get("traffic") or {}).items()
        for collective, row in collectives.items()
    ]
    verdict, communication = layout.get("verdict"), layout.get("communication") or {}
    return Measured(
        str(layout["name"]),
        layout.get("proven"),
        tuple(map(float, layout.get("step_seconds") or ())),
        tuple(map(float, layout.get("targets_per_s") or ())),
        _number(layout.get("peak_bytes")),
        _number(layout.get("padding_fraction")),
        (layout.get("memory") or {}).get("composition") or {},
        layout.get("predicted") or {},
        tuple(sent),
        tuple(tuple(Action(*action) for action in own) for own in layout.get("schedule") or ()),
        f"{verdict['limit']}: {verdict['evidence']}. Would help: {verdict['helps']}." if verdict else "",
        layout.get("kind") == "peer",
        _number(layout.get("mfu")),
        _number(layout.get("hfu")),
        communication.get("exposed_axes") or {},
        tuple(
            (axis, kind, float(one["seconds"]), float(one["exposed_seconds"]))
            for axis, kinds in (communication.get("by_axis") or {}).items()
            for kind, one in kinds.items()
        ),
        (layout.get("memory") or {}).get("by_phase") or {},
    )


def _checkpoints(path: Path) -> tuple[tuple[int, str], ...]:
    """(update, state) of every checkpoint directory, oldest first."""
    found = []
    for directory in path.glob("checkpoint-*"):
        number = directory.name.removeprefix("checkpoint-")
        if number.isdecimal():
            complete = (directory / "manifest.json").is_file()
            found.append((int(number), "complete" if complete else "incomplete: no manifest"))
    return tuple(sorted(found))

"""The figures of a run's metrics: loss, gradient norm, step time, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardwright.measure import metric_names as names
from shardwright.tools.report.charts import Series, histogram, lines, stacked, strips
from shardwright.tools.report.figure import Figure, Section, Table, absent, duration, known, short_duration
from shardwright.tools.report.read import METRICS, RunDirectory, percentiles

COLOURS = 6
TOKENS = (("targets", "in the loss"), ("given", "read, not in the loss"), ("padding", "padding"))


def style(index: int) -> str:
    """The style of run `index`: a colour, and a dash pattern for readers without colour."""
    return f"c{index % COLOURS} d{index % 4}"


def loss_section(directories: Sequence[RunDirectory]) -> Section:
    """Loss and gradient norm of all runs, one under the other, on the same axis of updates."""
    figures = [
        _over_updates(directories, "loss", "Loss", names.LOSS, lambda v: f"{v:.4g}"),
        _over_updates(
            directories, "gradient-norm", "Gradient norm before clipping", names.GRAD_NORM, lambda v: f"{v:.3g}"
        ),
    ]
    if any(directory.evaluations for directory in directories):
        figures.insert(1, _evaluation(directories))
    lead = "Mean over the target tokens of each update; the gradient's norm is of the whole model, over all ranks."
    return Section("loss", "Loss", lead, tuple(figures))


def _over_updates(
    directories: Sequence[RunDirectory], identity: str, title: str, key: str, label: Callable[[float], str]
) -> Figure:
    shown = [d for d in directories if any(value is not None for value in d.column(key))]
    if not shown:
        return absent(identity, title, _no_updates(directories))
    series = [Series(d.name, style(i), d.column(key)) for i, d in enumerate(directories) if d in shown]
    parts = []
    for one in series:
        known_values = [value for value in one.values if value is not None]
        gaps = len(one.values) - len(known_values)
        lost = f", {gaps} not finite" if gaps else ""
        prefix = f"{one.name}: " if len(series) > 1 else ""
        first, last, low, high = known_values[0], known_values[-1], min(known_values), max(known_values)
        extremes = f", lowest {label(low)}" if low < min(first, last) else ""
        extremes += f", highest {label(high)}" if high > max(first, last) else ""
        parts.append(f"{prefix}{label(first)} at first, {label(last)} at last{extremes}{lost}")
    note = _difference(shown, key) if key == names.LOSS else ""
    positions = [d.numbers for d in shown]
    return Figure(
        identity,
        title,
        ". ".join(parts) + ".",
        partial(lines, x=positions, series=series, label=label, title="update"),
        legend=tuple((one.style, one.name) for one in series) if len(series) > 1 else (),
        table=_table(shown, key, label),
        note=note,
    )


def _no_updates(directories: Sequence[RunDirectory]) -> str:
    return "; ".join(f"{d.name}: {d.missing.get(METRICS, 'every value is not finite')}" for d in directories) + "."


def _difference(directories: Sequence[RunDirectory], key: str) -> str:
    """The largest difference of the runs' losses; small only where the runs train the same objective."""
    if len(directories) < 2:
        return ""
    first = dict(zip(directories[0].numbers, directories[0].column(key)))
    gaps = [
        abs(value - base)
        for other in directories[1:]
        for update, value in zip(other.numbers, other.column(key))
        if value is not None and (base := first.get(update)) is not None
    ]
    apart = f"Largest difference of the loss at the same update: {max(gaps, default=0.0):.2g}."
    keys = other_objective(directories)
    return f"{apart} The runs do not train the same objective: {', '.join(keys)} differ." if keys else apart


def other_objective(directories: Sequence[RunDirectory]) -> list[str]:
    """The keys that belong to the objective, not to the layout, in which the runs' run files differ."""
    found: list[str] = []
    runs = [directory.run for directory in directories if directory.run is not None]
    for section in ("model", "data", "training", "precision"):
        values = [getattr(run, section).model_dump() for run in runs]
        for key in values[0] if values else ():
            if not key.startswith("per_device_") and any(one[key] != values[0][key] for one in values):
                found.append(f"{section}.{key}")
    return found


def _table(directories: Sequence[RunDirectory], key: str, label: Callable[[float], str], most: int = 12) -> Table:
    """At most `most` updates, evenly spread, with the last update."""
    numbers = sorted({number for d in directories for number in d.numbers})
    picked = sorted({numbers[round(i * (len(numbers) - 1) / max(1, most - 1))] for i in range(most)})
    columns = [dict(zip(d.numbers, d.column(key))) for d in directories]
    rows = tuple((f"{update:,}", *(known(column.get(update), label) for column in columns)) for update in picked)
    return Table(("update", *(d.name for d in directories)), rows)


def _evaluation(directories: Sequence[RunDirectory]) -> Figure:
    shown = [d for d in directories if any(entry.get(names.EVAL_LOSS) is not None for entry in d.evaluations)]
    if not shown:
        return absent("evaluation", "Evaluation loss", "no evaluation gave a finite loss.")
    series, positions = [], []
    for i, d in enumerate(directories):
        if d in shown:
            series.append(Series(d.name, style(i), [entry.get(names.EVAL_LOSS) for entry in d.evaluations]))
            positions.append([int(entry["update"]) + 1 for entry in d.evaluations])
    last = [next(v for v in reversed(one.values) if v is not None) for one in series]
    rows = tuple(
        (f"{at:,}", one.name, known(value, lambda v: f"{v:.4f}"))
        for one, own in zip(series, positions)
        for at, value in zip(own, one.values)
    )
    return Figure(
        "evaluation",
        "Evaluation loss",
        ". ".join(f"{one.name}: {value:.4f} at last" for one, value in zip(series, last)) + ".",
        partial(lines, x=positions, series=series, label=lambda v: f"{v:.4g}", title="update"),
        legend=tuple((one.style, one.name) for one in series) if len(series) > 1 else (),
        table=Table(("update", "run", "loss"), rows),
    )


# Step time


Timed = tuple[str, Sequence[float], str, int]
"""(name, seconds of each timed update, the reason where there is none, updates in all)."""


def step_section(runs: Sequence[Timed], benched: Sequence[Timed]) -> Section:
    """The distribution of the step times of each run, and of all benched layouts on one axis."""
    figures = [_steps(i, *one) for i, one in enumerate(runs)]
    timed = [(name, seconds, duration(percentiles(seconds)[0])) for name, seconds, _, _ in benched if seconds]
    if timed:
        figures.append(_strips(timed))
    elif benched:
        figures.append(absent("step-time-benched", "Every update", benched[0][2]))
    lead = "Seconds from one update to the next, data to optimizer step; the slowest rank's where ranks differ."
    return Section("step-time", "Step time", lead, tuple(figures))


def _strips(timed: Sequence[tuple[str, Sequence[float], str]]) -> Figure:
    rows = tuple(
        (name, *(duration(value) for value in (min(seconds), *percentiles(seconds))), f"{len(seconds):,}")
        for name, seconds, _ in timed
    )
    fast, slow = (choose(timed, key=lambda one: percentiles(one[1])[0]) for choose in (min, max))
    return Figure(
        "step-time-benched",
        "Every update",
        f"A dot for each update, a stroke at p50: from {fast[2]} ({fast[0]}) to {slow[2]} ({slow[0]}).",
        partial(strips, rows=timed, label=short_duration, title="time of an update"),
        table=Table(("layout", "least", "p50", "p95", "max", "updates"), rows),
    )


def _steps(index: int, name: str, seconds: Sequence[float], reason: str, updates: int) -> Figure:
    identity = f"step-time-{index}"
    if not seconds:
        return absent(identity, "Distribution", reason, name)
    p50, p95, longest = percentiles(seconds)
    shown = (("p50", p50), ("p95", p95), ("max", longest))
    warm = updates - len(seconds)
    left_out = f" The first {warm} of {updates:,} are left out as warm-up." if warm > 0 else ""
    return Figure(
        identity,
        "Distribution",
        f"p50 {duration(p50)}, p95 {duration(p95)}, max {duration(longest)} over {len(seconds):,} updates.",
        partial(
            histogram, values=seconds, marked=[(f"{name} {duration(at)}", at) for name, at in shown],
            label=short_duration, title="time of an update",
        ),
        of=name,
        table=Table(
            ("", "time of an update"),
            (("least", duration(min(seconds))), *((name, duration(at)) for name, at in shown)),
        ),
        note=left_out.strip(),
    )  # fmt: skip


def run_steps(directory: RunDirectory) -> Timed:
    """The argument of `step_section` for a run."""
    measured = directory.measured()
    reason = directory.missing.get(METRICS, "no update was timed") + "."
    return directory.name, measured.step_seconds if measured else (), reason, len(directory.updates)


# Tokens


def token_section(directories: Sequence[RunDirectory]) -> Section:
    """Of the positions of each update: in the loss, read only, padding. Counted once over the data ranks."""
    lead = (
        "Positions that an update computes: targets of the loss, tokens that are only read, and padding, which "
        "costs as much and trains nothing. Ranks that share rows count once."
    )
    return Section("tokens", "Targets and padding", lead, tuple(_tokens(i, d) for i, d in enumerate(directories)))


def _tokens(index: int, directory: RunDirectory) -> Figure:
    title, identity = "Positions of each update", f"tokens-{index}"
    slots, real, targets = (directory.column(key) for key in (names.SLOTS, names.REAL_TOKENS, names.TARGET_TOKENS))
    counted = [
        (update, s, r, t)
        for update, s, r, t in zip(directory.numbers, slots, real, targets)
        if s is not None and r is not None and t is not None
    ]
    if not counted:
        reason = directory.missing.get(METRICS, f"{METRICS} does not count them") + "."
        return absent(identity, title, reason, directory.name)
    values = ([t for *_, t in counted], [r - t for _, _, r, t in counted], [s - r for _, s, r, _ in counted])
    sums = [sum(column) for column in values]
    total = sum(sums)
    series = [Series(name, key, column) for (key, name), column in zip(TOKENS, values)]
    rows = tuple((name, f"{count:,.0f}", f"{count / total:.1%}") for (_, name), count in zip(TOKENS, sums))
    return Figure(
        identity,
        title,
        f"Of {total:,.0f} positions {sums[0] / total:.1%} are in the loss and {sums[2] / total:.1%} are padding.",
        partial(
            stacked, series=series, label=lambda v: f"{v:,.0f}", title="update",
            across_label=lambda v: f"{v:,.0f}", positions=[update for update, *_ in counted],
        ),
        of=directory.name,
        legend=tuple(reversed(TOKENS)),
        table=Table(("positions", "count", "share"), (*rows, ("all", f"{total:,.0f}", "100.0%"))),
    )  # fmt: skip

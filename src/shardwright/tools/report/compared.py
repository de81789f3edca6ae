"""The figures that compare: predicted with measured, and layouts with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

from shardwright.measure import metric_names as names
from shardwright.planner.traffic import sent_by_axis
from shardwright.tools.report.charts import Bar, bars, ratios
from shardwright.tools.report.figure import NA, Figure, Section, Table, duration, known, short_duration, size
from shardwright.tools.report.planned import HOST_ONLY, Subject
from shardwright.tools.report.predict import Forecast
from shardwright.tools.report.read import Measured

NEAR = 0.1
"""The shaded band of the ratios: within a tenth."""

Pair = tuple[str, str, float | None, float | None, Callable[[float], str], str]
"""(name, quantity, predicted, measured, text of a value, why one is not known)."""

QUANTITIES = {"memory": "q0", "traffic": "q1", "time": "q2"}


def predicted_section(subjects: Sequence[Subject]) -> Section:
    """Predicted against measured: memory, traffic, time of every run and benched layout."""
    pairs: list[Pair] = []
    for directory, found in subjects:
        for layout in directory.benched:
            pairs += [] if layout.peer else _benched(layout)
        if directory.updates:
            host = not directory.largest(names.PEAK_ALLOCATED)
            pairs += _run(directory.name, found, directory.measured(), host)
    both = [
        (f"{name}, {quantity}", QUANTITIES[quantity], measured / predicted)
        for name, quantity, predicted, measured, _, _ in pairs
        if predicted and measured is not None
    ]
    rows = tuple(_row(pair) for pair in pairs)
    table = Table(("of", "quantity", "predicted", "measured", "measured ÷ predicted", "why n/a"), rows)
    lead = "What the planner says beside what was measured. 1 is exact; the band is 10% to either side."
    if not both:
        why = "nothing has both a prediction and a measurement; the table says why."
        figure = Figure("predicted-0", "Measured ÷ predicted", "", missing=why, table=table)
    else:
        close = sum(abs(ratio - 1) <= NEAR for *_, ratio in both)
        figure = Figure(
            "predicted-0",
            "Measured ÷ predicted",
            f"{close} of {len(both)} within {NEAR:.0%}.",
            partial(ratios, rows=both, limit=NEAR),
            legend=tuple((kind, name) for name, kind in QUANTITIES.items() if any(kind == k for _, k, _ in both)),
            table=table,
        )
    return Section("predicted", "Predicted against measured", lead, (figure,))


def _run(name: str, found: Forecast | str, measured: Measured | None, host: bool) -> list[Pair]:
    seconds = median(measured.step_seconds) if measured else None
    allocated = measured.peak_bytes if measured else None
    if isinstance(found, str):
        return [
            (name, "memory", None, allocated, size, found),
            (name, "traffic", None, None, size, found),
            (name, "time", None, seconds, duration, found),
        ]
    time = found.time.total if found.time else None
    return [
        (name, "memory", found.peak_bytes, allocated, size, HOST_ONLY if host else ""),
        (
            name,
            "traffic",
            sum(sent_by_axis(found.traffic).values()),
            None,
            size,
            "a training run does not record it",
        ),
        (name, "time", time, seconds, duration, found.no_time),
    ]


def _benched(layout: Measured) -> list[Pair]:
    said: Mapping[str, Any] = layout.predicted
    sent, recorded = None, None
    if layout.traffic:
        sent = sum(one.predicted_bytes for one in layout.traffic)
        recorded = sum(one.recorded_bytes for one in layout.traffic)
    seconds = median(layout.step_seconds) if layout.step_seconds else None
    why = "bench.json does not say"
    return [
        (layout.name, "memory", said.get("peak_bytes"), layout.peak_bytes, size, why),
        (layout.name, "traffic", sent, recorded, size, why),
        (layout.name, "time", said.get("step_seconds"), seconds, duration, why),
    ]


def _row(pair: Pair) -> tuple[str, ...]:
    name, quantity, predicted, measured, shown, why = pair
    ratio = f"{measured / predicted:.3f}" if predicted and measured is not None else NA
    reason = why if predicted is None or measured is None else ""
    return name, quantity, known(predicted, shown), known(measured, shown), ratio, reason


# Layouts side by side


def side_by_side(subjects: Sequence[Subject]) -> Section:
    """Every run and every benched layout beside the others: speed with its spread, and memory."""
    layouts: list[Measured] = []
    for directory, _ in subjects:
        layouts += directory.all_measured
    lead = "Bars are medians, whiskers hold the middle half of the updates. Only layouts that train the same objective compare."
    title = "Layouts side by side"
    if len(layouts) < 2:
        why = "one layout alone: give several directories, or one that bench wrote."
        return Section("layouts", title, lead, (Figure("layouts-speed", "Target tokens per second", "", missing=why),))
    figures = (
        _speed(
            "layouts-speed",
            "Target tokens per second",
            layouts,
            lambda m: m.targets_per_s,
            _rate,
            "target tokens/s",
        ),
        _speed(
            "layouts-time",
            "Time of an update",
            layouts,
            lambda m: m.step_seconds,
            duration,
            "time of an update",
        ),
        _peak(layouts),
    )
    return Section("layouts", title, lead, (*figures, *_verdicts(layouts)))


def _verdicts(layouts: Sequence[Measured]) -> list[Figure]:
    """What limits each layout, where bench says it."""
    said = tuple((layout.name, layout.verdict) for layout in layouts if layout.verdict)
    if not said:
        return []
    return [Figure("layouts-verdict", "What limits each", "", table=Table(("layout", "what limits it"), said))]


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _bar(layout: Measured) -> str:
    return "peer" if layout.peer else "c0"


def _name(layout: Measured) -> str:
    marks = {True: ", checked", False: ", objective differs", None: ""}
    return layout.name + marks[layout.proven]


def _speed(
    identity: str,
    title: str,
    layouts: Sequence[Measured],
    values: Callable[[Measured], Sequence[float]],
    shown: Callable[[float], str],
    unit: str,
) -> Figure:
    timed = [(layout, values(layout)) for layout in layouts if values(layout)]
    if not timed:
        return Figure(identity, title, "", missing="no layout was timed.")
    rows = [
        Bar(_name(layout), [(_bar(layout), median(own), unit)], shown(median(own)), _middle(own))
        for layout, own in timed
    ]
    table = Table(
        ("layout", "median", "least", "greatest", "updates"),
        tuple(
            (_name(layout), shown(median(own)), shown(min(own)), shown(max(own)), f"{len(own):,}")
            for layout, own in timed
        ),
    )
    caption = _ends(rows)
    ticks = short_duration if shown is duration else shown
    return Figure(identity, title, caption, partial(bars, rows=rows, label=ticks, title=unit), table=table)


def _ends(rows: Sequence[Bar]) -> str:
    low, high = min(rows, key=lambda row: row.length), max(rows, key=lambda row: row.length)
    return f"From {low.value} ({low.name}) to {high.value} ({high.name})."


def _middle(values: Sequence[float]) -> tuple[float, float] | None:
    """The quartiles, between which half of the values lie; None for one value."""
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _peak(layouts: Sequence[Measured]) -> Figure:
    found = [(layout, layout.peak_bytes) for layout in layouts if layout.peak_bytes]
    if not found:
        return Figure(
            "layouts-memory",
            "Peak memory",
            "",
            missing=f"no layout has a measured peak: {HOST_ONLY} while training.",
        )
    rows = [Bar(_name(layout), [(_bar(layout), peak, "peak")], size(peak)) for layout, peak in found]
    return Figure(
        "layouts-memory",
        "Peak memory",
        _ends(rows),
        partial(bars, rows=rows, label=size, title="bytes allocated on the fullest rank"),
        table=Table(("layout", "peak"), tuple((row.name, row.value) for row in rows)),
    )

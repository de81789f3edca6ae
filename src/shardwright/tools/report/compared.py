"""The figures that compare: predicted with measured, and layouts with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

from shardwright.measure import metric_names as names
from shardwright.planner.traffic import sent_by_axis
from shardwright.tools.report.charts import Bar, ratios
from shardwright.tools.report.figure import (
    Figure,
    Section,
    Table,
    absent,
    bar_figure,
    duration,
    known,
    short_duration,
    size,
)
from shardwright.tools.report.planned import HOST_ONLY, Subject
from shardwright.tools.report.predict import Forecast
from shardwright.tools.report.read import Measured

NEAR = 0.1
"""Half the width of the shaded band around a ratio of 1."""
QUANTITIES = {"memory": ("q0", size), "traffic": ("q1", size), "time": ("q2", duration)}
"""Quantity -> (style, text of a value)."""


class Pair(NamedTuple):
    """A prediction beside a measurement; `why` says what is missing where prediction or measurement is unknown."""

    name: str
    quantity: str
    predicted: float | None
    measured: float | None
    why: str

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


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
        (f"{pair.name}, {pair.quantity}", QUANTITIES[pair.quantity][0], ratio)
        for pair in pairs
        if (ratio := pair.ratio) is not None
    ]
    headers = ("of", "quantity", "predicted", "measured", "measured ÷ predicted", "why n/a")
    table, title = Table(headers, tuple(map(_row, pairs))), "Measured ÷ predicted"
    if both:
        close = sum(abs(ratio - 1) <= NEAR for *_, ratio in both)
        figure = Figure(
            "predicted-0",
            title,
            f"{close} of {len(both)} within {NEAR:.0%}.",
            partial(ratios, rows=both, limit=NEAR),
            legend=tuple((s, name) for name, (s, _) in QUANTITIES.items() if any(s == style for _, style, _ in both)),
            table=table,
        )
    else:
        why = "nothing has both a prediction and a measurement; the table says why."
        figure = Figure("predicted-0", title, "", missing=why, table=table)
    lead = "The planner's predictions beside the measurements. 1 is exact; the band is 10% to either side."
    return Section("predicted", "Predicted against measured", lead, (figure,))


def _run(name: str, found: Forecast | str, measured: Measured | None, host: bool) -> list[Pair]:
    seconds = median(measured.step_seconds) if measured else None
    peak = measured.peak_bytes if measured else None
    if isinstance(found, str):
        values = {"memory": peak, "traffic": None, "time": seconds}
        return [Pair(name, quantity, None, value, found) for quantity, value in values.items()]
    sent = sum(sent_by_axis(found.traffic).values())
    return [
        Pair(name, "memory", found.peak_bytes, peak, HOST_ONLY if host else ""),
        Pair(name, "traffic", sent, None, "a training run does not record traffic"),
        Pair(name, "time", found.time.total if found.time else None, seconds, found.no_time),
    ]


def _benched(layout: Measured) -> list[Pair]:
    name, said, why = layout.name, layout.predicted, "bench.json does not say"
    sent = sum(one.predicted_bytes for one in layout.traffic) if layout.traffic else None
    recorded = sum(one.recorded_bytes for one in layout.traffic) if layout.traffic else None
    seconds = median(layout.step_seconds) if layout.step_seconds else None
    return [
        Pair(name, "memory", said.get("peak_bytes"), layout.peak_bytes, why),
        Pair(name, "traffic", sent, recorded, why),
        Pair(name, "time", said.get("step_seconds"), seconds, why),
    ]


def _row(pair: Pair) -> tuple[str, ...]:
    shown = QUANTITIES[pair.quantity][1]
    reason = pair.why if pair.predicted is None or pair.measured is None else ""
    values = (known(pair.predicted, shown), known(pair.measured, shown), known(pair.ratio, "{:.3f}".format))
    return pair.name, pair.quantity, *values, reason


# Layouts side by side


def side_by_side(subjects: Sequence[Subject]) -> Section:
    """Every run and every benched layout beside the others: speed with its spread, and memory."""
    layouts = [layout for directory, _ in subjects for layout in directory.all_measured]
    if len(layouts) < 2:
        why = "one layout alone: give several directories, or a directory that bench wrote."
        figures = [absent("layouts-speed", "Target tokens per second", why)]
    else:
        rates = [(one, one.targets_per_s) for one in layouts]
        times = [(one, one.step_seconds) for one in layouts]
        figures = [
            _speed("layouts-speed", "Target tokens per second", rates, "{:,.0f}".format, "target tokens/s"),
            _speed("layouts-time", "Time of an update", times, duration, "time of an update"),
            _peak(layouts),
        ]
        if said := tuple((layout.name, layout.verdict) for layout in layouts if layout.verdict):
            table = Table(("layout", "what limits the layout"), said)
            figures.append(Figure("layouts-verdict", "What limits each", "", table=table))
    lead = "Bars are medians, whiskers hold the middle half of the updates. Only layouts that train the same objective compare."
    return Section("layouts", "Layouts side by side", lead, tuple(figures))


def _name(layout: Measured) -> str:
    return layout.name + {True: ", checked", False: ", objective differs", None: ""}[layout.proven]


def _bar(layout: Measured, value: float, what: str, shown: str, spread: tuple[float, float] | None = None) -> Bar:
    return Bar(_name(layout), [("peer" if layout.peer else "c0", value, what)], shown, spread)


def _speed(
    identity: str,
    title: str,
    layouts: Sequence[tuple[Measured, Sequence[float]]],
    shown: Callable[[float], str],
    unit: str,
) -> Figure:
    timed = [(layout, own) for layout, own in layouts if own]
    if not timed:
        return absent(identity, title, "no layout was timed.")
    rows = [_bar(layout, median(own), unit, shown(median(own)), _middle_half(own)) for layout, own in timed]
    cells = tuple(
        (_name(layout), shown(median(own)), shown(min(own)), shown(max(own)), f"{len(own):,}") for layout, own in timed
    )
    table = Table(("layout", "median", "least", "greatest", "updates"), cells)
    ticks = short_duration if shown is duration else shown
    return bar_figure(identity, title, _extremes(rows), rows, ticks, unit, table)


def _extremes(rows: Sequence[Bar]) -> str:
    low, high = min(rows, key=lambda row: row.length), max(rows, key=lambda row: row.length)
    return f"From {low.value} ({low.name}) to {high.value} ({high.name})."


def _middle_half(values: Sequence[float]) -> tuple[float, float] | None:
    """The quartiles, between which half of the values lie; None for one value."""
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _peak(layouts: Sequence[Measured]) -> Figure:
    identity, title = "layouts-memory", "Peak memory"
    rows = [_bar(one, one.peak_bytes, "peak", size(one.peak_bytes)) for one in layouts if one.peak_bytes]
    if not rows:
        return absent(identity, title, f"no layout has a measured peak: {HOST_ONLY} while training.")
    table = Table(("layout", "peak"), tuple((row.name, row.value) for row in rows))
    return bar_figure(identity, title, _extremes(rows), rows, size, "bytes allocated on the fullest rank", table)

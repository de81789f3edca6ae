"""The kinds of figures, each a pure function from numbers and a width to the content of one drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from shardwright.planner.pipeline_simulator import Span
from shardwright.tools.report.svg import (
    CHARACTER,
    LINE,
    Frame,
    Named,
    bins,
    element,
    margin,
    marks,
    number,
    polyline,
    rect,
    stack,
    steps,
    svg,
    text,
    thin,
    ticks,
    tip,
    whole_ticks,
    x_axis,
    y_axis,
)

Label = Callable[[float], str]
NARROW = 480
BOLD = 7.8
"""Width of a character of a note."""


@dataclass(frozen=True)
class Series:
    """One named line or band. style: CSS class. values: None where a value is missing."""

    name: str
    style: str
    values: Sequence[float | None]


def lines(
    named: Named, width: float, x: Sequence[Sequence[float]], series: Sequence[Series], label: Label, title: str
) -> str:
    """Lines over counts such as updates; `x[i]` are the positions of `series[i]`."""
    known = [value for one in series for value in one.values if value is not None]
    heights = marks(min(known), max(known))
    frame = Frame(width, 226, margin(map(label, heights)))
    first, last = min(map(min, x)), max(map(max, x))
    across, up = frame.x(first, last), frame.y(heights[0], heights[-1])
    shown = whole_ticks(int(first), int(last), 4 if width < NARROW else 8)
    content = y_axis(frame, up, heights, label) + x_axis(frame, across, shown, lambda v: f"{v:,.0f}", title)
    for positions, one in zip(x, series):
        path = polyline((across(at), None if value is None else up(value)) for at, value in zip(positions, one.values))
        content += element("path", tip(one.name), d=path, class_=f"line {one.style}")
    return svg(frame, named, content)


def histogram(
    named: Named, width: float, values: Sequence[float], marked: Sequence[tuple[str, float]], label: Label, title: str
) -> str:
    """How many of `values` fall where; `marked` positions carry a line with their name above, from the top down."""
    found = bins(values, 12 if width < NARROW else 24)
    places = marks(found[0][0], found[-1][1], 4 if width < NARROW else 8)
    most = max(count for *_, count in found)
    heights = [mark for mark in marks(0, most, 4) if mark == int(mark)]
    frame = Frame(width, 236, margin(f"{mark:.0f}" for mark in heights), top=16 + LINE * len(marked))
    across, up = frame.x(places[0], places[-1]), frame.y(0, heights[-1])
    content = y_axis(frame, up, heights, lambda v: f"{v:.0f}") + x_axis(frame, across, places, label, title)
    for start, end, count in found:
        left, right = (across(start), across(end)) if end > start else (across(start) - 8, across(start) + 8)
        note = tip(f"{label(start)} to {label(end)}: {count}")
        content += rect(left + 0.5, up(count), max(right - left - 1, 1), up(0) - up(count), "bar c0", note)
    bottom, names = frame.inner[3], ""
    for row, (name, value) in enumerate(marked):
        x, y = across(value), 12 + LINE * row
        content += element("line", x1=x, x2=x, y1=y - 8, y2=bottom, class_="mark")
        ends = x + 6 + len(name) * BOLD > width
        names += text(x - 5 if ends else x + 5, y + 2, name, "note halo", "end" if ends else "start")
    return svg(frame, named, content + names)


def stacked(
    named: Named,
    width: float,
    series: Sequence[Series],
    label: Label,
    title: str,
    *,
    moments: Sequence[str] = (),
    peak: str = "",
    line: tuple[str, float] | None = None,
    across_label: Label | None = None,
    positions: Sequence[float] = (),
) -> str:
    """Stacked bands over consecutive positions; the highest position is marked where `peak` names the mark.

    line: a named height that is compared. moments: what each position is, shown when the pointer rests on it.
    """
    columns = [[value or 0.0 for value in one.values] for one in series]
    totals = [sum(column) for column in zip(*columns)]
    kept = thin(totals, int(width // (2 if width < NARROW else 2.5)))
    piled = stack([[column[i] for i in kept] for column in columns])
    heights = marks(0, max([*totals, *([line[1]] if line else [])]) or 1.0)
    frame = Frame(width, 286, margin(map(label, heights)), top=12 + LINE * bool(peak))
    count = len(kept)
    across, up = frame.x(0, count), frame.y(0, heights[-1])
    edges = [across(i) for i in range(count + 1)]
    content = y_axis(frame, up, heights, label)
    for one, band in zip(series, piled):
        path = steps(edges, [(up(bottom), up(top)) for bottom, top in band])
        content += element("path", tip(one.name), d=path, class_=f"band {one.style}")
    if across_label is None:
        content += x_axis(frame, across, [], label, title)
    else:
        shown = dict(enumerate(kept))
        chosen = [float(i) for i in range(0, count, max(1, count // (3 if width < NARROW else 7)))]
        content += x_axis(
            frame, frame.x(-0.5, count - 0.5), chosen, lambda i: across_label(positions[shown[int(i)]]), title
        )
    if line:
        y = up(line[1])
        content += element("line", x1=frame.left, x2=width - frame.right, y1=y, y2=y, class_="mark")
        content += text(width - frame.right, y - 5, f"{line[0]} {label(line[1])}", "note halo", "end")
    if peak:
        at = max(range(count), key=lambda i: totals[kept[i]])
        x, y = (edges[at] + edges[at + 1]) / 2, up(totals[kept[at]])
        content += element("circle", tip(moments[kept[at]] if moments else peak), cx=x, cy=y, r=4, class_="dot")
        anchor = "start" if x < width / 3 else "end" if x > width * 2 / 3 else "middle"
        content += text(x, y - 9, peak, "note halo", anchor)
    return svg(frame, named, content)


def strips(
    named: Named, width: float, rows: Sequence[tuple[str, Sequence[float], str]], label: Label, title: str
) -> str:
    """Every value of each (name, values, median as text) as a dot on its own line, the median as a stroke."""
    pitch = 38.0
    places = marks(
        min(min(values) for _, values, _ in rows), max(max(values) for _, values, _ in rows), 3 if width < NARROW else 6
    )
    room = max(len(shown) for *_, shown in rows) * CHARACTER + 16
    frame = Frame(width, pitch * len(rows) + 58, 8, right=room, top=4, bottom=50)
    across = frame.x(places[0], places[-1])
    content = x_axis(frame, across, places, label, title, grid=True)
    for i, (name, values, shown) in enumerate(rows):
        y = frame.top + i * pitch + 25
        content += text(frame.left + 4, y - 10, name, "label halo")
        content += "".join(element("circle", cx=across(value), cy=y, r=3.5, class_="dust c0") for value in values)
        middle = across(median(values))
        content += element("line", tip(f"{name}: {shown}"), x1=middle, x2=middle, y1=y - 8, y2=y + 8, class_="median")
        content += text(width, y + 4, shown, "value", "end")
    return svg(frame, named, content)


@dataclass(frozen=True)
class Bar:
    """One bar. parts: (style, length, description). spread: the range of most values. value: as text."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    value: str
    spread: tuple[float, float] | None = None

    @property
    def length(self) -> float:
        return sum(length for _, length, _ in self.parts)


def bars(named: Named, width: float, rows: Sequence[Bar], label: Label, title: str) -> str:
    """Horizontal bars from zero; values in a column on the right; names above the bars, so that long names fit."""
    pitch = 42.0
    room = max(len(row.value) for row in rows) * CHARACTER + 16
    frame = Frame(width, pitch * len(rows) + 58, 1, right=room, top=4, bottom=50)
    most = max([row.length for row in rows] + [row.spread[1] for row in rows if row.spread])
    places = marks(0, most or 1.0, 3 if width < NARROW else 6)
    across = frame.x(0, places[-1])
    content = x_axis(frame, across, places, label, title, grid=True)
    for i, row in enumerate(rows):
        top = frame.top + i * pitch + 18
        content += text(across(0) + 5, top - 4, row.name, "label halo")
        start = 0.0
        for style, length, what in row.parts:
            x, end = across(start), across(start + length)
            content += rect(x, top, max(end - x, 0.5), 16, f"bar {style}", tip(f"{row.name}: {what}"))
            start += length
        if row.spread and row.spread[1] > row.spread[0]:
            low, far = across(row.spread[0]), across(row.spread[1])
            path = f"M{number(low)} {number(top + 4)}v8m0 -4H{number(far)}m0 -4v8"
            content += element("path", tip("the middle half of the updates"), d=path, class_="whisker")
        content += text(width, top + 12.5, row.value, "value", "end")
    return svg(frame, named, content)


STYLES = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}


def gantt(named: Named, width: float, spans: Sequence[Span], ranks: int, label: Label, title: str) -> str:
    """A row of actions over time for each pipeline rank; the rank waits in the gaps."""
    total = max(span.end for span in spans)
    left = margin([f"rank {ranks - 1}"]) if width >= NARROW else margin([str(ranks - 1)]) + 4
    row = max(18.0, min(34.0, 260 / ranks))
    frame = Frame(width, row * ranks + 58, left, top=4, bottom=50)
    across = frame.x(0, total)
    content = rect(frame.left, frame.top, across(total) - frame.left, row * ranks, "idle", tip("idle"))
    for rank in range(ranks):
        y = frame.top + rank * row
        name = f"rank {rank}" if width >= NARROW else f"{rank}"
        content += text(frame.left - 8, y + row / 2 + 4, name, "tick", "end")
    for span in spans:
        x, end = across(span.start), across(span.end)
        y = frame.top + span.rank * row + 2
        stage, kind, microbatch = span.action
        note = tip(f"stage {stage}, {STYLES[kind]}, microbatch {microbatch}: {label(span.start)} to {label(span.end)}")
        content += rect(x, y, max(end - x - 0.6, 0.4), row - 4, f"act {STYLES[kind]}", note)
        if end - x > len(str(microbatch)) * CHARACTER + 4:
            content += text((x + end) / 2, y + row / 2 + 2, str(microbatch), f"in {STYLES[kind]}-in", "middle")
    content += x_axis(frame, across, ticks(0, total, 4 if width < NARROW else 8), label, title)
    return svg(frame, named, content)


def ratios(named: Named, width: float, rows: Sequence[tuple[str, str, float]], limit: float) -> str:
    """Measured ÷ predicted of each (name, style, ratio) on one axis with 1 in it; `limit` around 1 is shaded."""
    values = [ratio for *_, ratio in rows]
    places = marks(min([*values, 1 - limit]), max([*values, 1 + limit]), 4 if width < NARROW else 8)
    above = width < NARROW  # names: above the marks on a phone, else on the left
    pitch = 40.0 if above else 26.0
    left = 12 if above else margin(name for name, *_ in rows)
    frame = Frame(width, pitch * len(rows) + 62, left, right=44, top=8, bottom=50)
    across = frame.x(places[0], places[-1])
    _, top, _, bottom = frame.inner
    content = rect(
        across(1 - limit), top, across(1 + limit) - across(1 - limit), bottom - top, "near", tip(f"within {limit:.0%}")
    )
    content += x_axis(frame, across, places, lambda v: f"{v:.3g}", "measured ÷ predicted", grid=True)
    content += element("line", x1=across(1), x2=across(1), y1=top, y2=bottom, class_="one")
    for i, (name, style, ratio) in enumerate(rows):
        y = top + i * pitch + (27 if above else 13)
        content += text(4, y - 12, name, "label halo") if above else text(left - 8, y + 4, name, "label", "end")
        content += element("line", x1=across(1), x2=across(ratio), y1=y, y2=y, class_=f"stem {style}")
        content += element("circle", tip(f"{name}: {ratio:.3f}"), cx=across(ratio), cy=y, r=5, class_=f"point {style}")
        content += text(width, y + 4, f"{ratio:.2f}", "value", "end")
    return svg(frame, named, content)


def idle_seconds(spans: Sequence[Span], ranks: int) -> list[float]:
    """For each rank, the time without an action between the first and the last action of the pipeline."""
    total = max(span.end for span in spans)
    busy = [sum(span.end - span.start for span in spans if span.rank == rank) for rank in range(ranks)]
    return [total - own for own in busy]

"""Geometry and marks of the figures as pure functions: scales, ticks, stacks, paths, axes. Everything returns numbers or text.

Lengths are CSS pixels at the width that a figure is drawn for; y grows downwards. Colours are classes of the page's style
sheet (`c0`, `parameters`), so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

CHARACTER = 7.0
"""Width of a character of a label, at most on average."""
LINE = 16.0
"""Height of a line of labels."""


@dataclass(frozen=True)
class Named:
    """The names of a drawing: `identity` is unique on the page, `description` says what can be seen."""

    identity: str
    title: str
    description: str


@dataclass(frozen=True)
class Scale:
    """A linear map of [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_step(low: float, high: float, most: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten of which at most `most` multiples lie from `low` to `high` > `low`."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        if math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) < most:
            break
    return step


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` round values from `low` to `high`."""
    if not high > low:
        return [low]
    step = round_step(low, high, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def whole_ticks(low: int, high: int, most: int = 5) -> list[float]:
    """`ticks` of counts: whole numbers only."""
    return [value for value in ticks(low, high, most) if value == int(value)]


def marks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values as far apart as those of `ticks`, from at or below `low` to at or above `high`: an axis ends in a mark."""
    if low == high:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    step = round_step(low, high, most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def bins(values: Sequence[float], most: int = 24) -> list[tuple[float, float, int]]:
    """(from, to, how many) of equally wide bins with round edges that cover all `values`; `to` is outside, but for the last."""
    low, high = min(values), max(values)
    if low == high:
        return [(low, high, len(values))]
    edges = marks(low, high, most)
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(bisect_right(edges, value), len(counts)) - 1] += 1
    return [(start, end, count) for start, end, count in zip(edges, edges[1:], counts)]


def stack(series: Sequence[Sequence[float]]) -> list[list[tuple[float, float]]]:
    """(bottom, top) of every value of every series when they are piled up, the first one lowest."""
    sums = [[0.0, *accumulate(column)] for column in zip(*series)]
    return [[(own[i], own[i + 1]) for own in sums] for i in range(len(series))]


def thin(totals: Sequence[float], most: int) -> list[int]:
    """The indices of at most `most` of `totals`: the largest of each group of neighbours, so that no peak is lost."""
    if len(totals) <= most:
        return list(range(len(totals)))
    edges = [len(totals) * i // most for i in range(most + 1)]
    return [max(range(low, high), key=totals.__getitem__) for low, high in pairwise(edges)]


# Text


def number(value: float) -> str:
    """A coordinate with as many digits as a screen shows."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, content: str = "", **attributes: str | float | None) -> str:
    """One element; `content` is markup. `class_` is `class`, `_` in names is `-`, an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(number(value) if isinstance(value, int | float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, label: str, class_: str = "tick", anchor: str = "start") -> str:
    """A label whose baseline begins, is centred (`middle`) or ends at (x, y)."""
    return element("text", escape(label), x=x, y=y, class_=class_, text_anchor=None if anchor == "start" else anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, content: str = "") -> str:
    """A rectangle."""
    return element("rect", content, x=x, y=y, width=width, height=height, class_=class_)


def tip(label: str) -> str:
    """A tooltip, to be put into the element that it describes."""
    return element("title", escape(label))


def polyline(points: Iterable[tuple[float, float | None]]) -> str:
    """The `d` of a path through the points; a gap where y is None. A point alone between gaps becomes a dot."""
    parts, drawing = [], False
    for x, y in points:
        if y is None:
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{number(x)} {number(y)}")
        if not drawing:
            parts.append("h0")  # with round caps a dot
        drawing = True
    return "".join(parts)


def steps(edges: Sequence[float], heights: Sequence[tuple[float, float]]) -> str:
    """The `d` of a closed band with one flat piece (y of bottom, y of top) between each two `edges`."""
    top = [f"{'M' if i == 0 else 'L'}{number(edges[i])} {number(high)}H{number(edges[i + 1])}" for i, (_, high) in
           enumerate(heights)]  # fmt: skip
    bottom = [
        f"L{number(edges[i + 1])} {number(heights[i][0])}H{number(edges[i])}" for i in reversed(range(len(heights)))
    ]
    return "".join((*top, *bottom, "Z"))


# Figures


@dataclass(frozen=True)
class Frame:
    """The drawing area of a figure `width` wide: what is inside the margins is for the marks."""

    width: float
    height: float
    left: float
    right: float = 12
    top: float = 12
    bottom: float = 46

    @property
    def inner(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the area for the marks."""
        return self.left, self.top, self.width - self.right, self.height - self.bottom

    def x(self, low: float, high: float) -> Scale:
        return Scale(low, high, self.left, self.width - self.right)

    def y(self, low: float, high: float) -> Scale:
        """Upwards: `low` stands at the bottom."""
        return Scale(low, high, self.height - self.bottom, self.top)


def margin(labels: Iterable[str]) -> float:
    """The left margin that the longest of the labels of a y axis needs."""
    return max((len(label) for label in labels), default=0) * CHARACTER + 14


def y_axis(frame: Frame, scale: Scale, at: Sequence[float], label: Callable[[float], str]) -> str:
    """Horizontal grid lines with their labels on the left."""
    left, _, right, _ = frame.inner
    return "".join(
        element("line", x1=left, x2=right, y1=scale(mark), y2=scale(mark), class_="grid")
        + text(left - 8, scale(mark) + 4, label(mark), anchor="end")
        for mark in at
    )


def x_axis(
    frame: Frame, scale: Scale, at: Sequence[float], label: Callable[[float], str], title: str, grid: bool = False
) -> str:
    """Labels under the marks of the axis, and its title at the right end below; with `grid`, vertical lines."""
    left, top, right, bottom = frame.inner
    parts = [] if grid else [element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]
    for mark in at:
        x, shown = scale(mark), label(mark)
        if grid:
            parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom, class_="axis" if mark == 0 else "grid"))
        half = len(shown) * CHARACTER / 2
        parts.append(text(max(half, min(x, frame.width - half)), bottom + LINE + 4, shown, anchor="middle"))
    parts.append(text(right, bottom + 2 * LINE + 6, title, "name", "end"))
    return "".join(parts)


def svg(frame: Frame, named: Named, content: str) -> str:
    """The whole drawing; title and description stand in for the drawing in a screen reader."""
    title, desc = f"{named.identity}-title", f"{named.identity}-desc"
    head = element("title", escape(named.title), id=title) + element("desc", escape(named.description), id=desc)
    box = f"0 0 {number(frame.width)} {number(frame.height)}"
    return element("svg", head + content, viewBox=box, role="img", aria_labelledby=f"{title} {desc}")

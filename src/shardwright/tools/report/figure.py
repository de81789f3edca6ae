"""A figure with its numbers, or the reason why there is none; texts for values with their units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.tools.report.charts import Named
from shardwright.units import format_bytes, format_seconds

WIDE, NARROW = 760.0, 320.0
"""The widths that every figure is drawn for, in CSS pixels; the style sheet shows one of the two."""

NA = "n/a"


@dataclass(frozen=True)
class Table:
    """Numbers of a figure as text; the first column names the rows."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Of each column: it holds numbers, which are aligned at their ends, and not words. The first one names the rows."""
        columns = zip(*self.rows) if self.rows else [()] * len(self.headers)
        return tuple(
            i > 0 and all(cell == NA or cell[:1].isdecimal() or cell[:1] == "-" for cell in column)
            for i, column in enumerate(columns)
        )


@dataclass(frozen=True)
class Figure:
    """One figure. draw: the drawing for a width; None where `missing` says why there is nothing to draw.

    of: the run or layout that it is about, empty when of all. caption: what can be seen, in words and numbers; it also tells
    the figure to those who do not see it. legend: (style, name) of what is drawn. note: a line about how it was made.
    """

    identity: str
    title: str
    caption: str
    draw: Callable[[Named, float], str] | None = None
    of: str = ""
    missing: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    note: str = ""

    def drawings(self) -> tuple[tuple[str, str], ...]:
        """(`wide` or `narrow`, drawing) for large screens and paper, and for phones."""
        if self.draw is None:
            return ()
        title = f"{self.title}, {self.of}" if self.of else self.title
        return tuple(
            (kind, self.draw(Named(f"{self.identity}-{kind}", title, self.caption), width))
            for kind, width in (("wide", WIDE), ("narrow", NARROW))
        )


@dataclass(frozen=True)
class Section:
    """Figures under one heading; `lead` says what they answer."""

    identity: str
    title: str
    lead: str
    figures: tuple[Figure, ...]


def size(value: float) -> str:
    """`4.8 MB`, and `5 MB` for a round one."""
    return "0" if value == 0 else format_bytes(value).replace(".0 ", " ")


def duration(value: float) -> str:
    """`1.20 s`, `450 ms`, `0`."""
    return "0" if value == 0 else format_seconds(value).replace("us", "µs")


def short_duration(value: float) -> str:
    """`duration` for an axis: without zeros at the end."""
    return f"{value:.3g} s" if 1 <= value < 60 else duration(value)


def known(value: float | None, shown: Callable[[float], str]) -> str:
    return NA if value is None else shown(value)

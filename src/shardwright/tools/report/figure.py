"""A figure with its numbers, or the reason why there is none; texts for values with their units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.tools.report.charts import Bar, bars
from shardwright.tools.report.svg import Named
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
        """For each column, whether its cells are numbers, which are aligned at the right; the first column names the rows."""
        columns = zip(*self.rows) if self.rows else [()] * len(self.headers)
        return tuple(
            i > 0 and all(cell == NA or cell[:1].isdecimal() or cell[:1] == "-" for cell in column)
            for i, column in enumerate(columns)
        )


@dataclass(frozen=True)
class Figure:
    """One figure."""

    identity: str
    title: str
    caption: str
    """What can be seen, in words and numbers; a screen reader reads the caption in place of the drawing."""
    draw: Callable[[Named, float], str] | None = None
    """The drawing for a width."""
    of: str = ""
    """The run or layout of the figure, empty where the figure shows all."""
    missing: str = ""
    """Why there is nothing to draw."""
    legend: tuple[tuple[str, str], ...] = ()
    """(style, name) of what is drawn."""
    table: Table | None = None
    note: str = ""
    """How the figure was made."""

    def drawings(self) -> tuple[tuple[str, str], ...]:
        """(`wide` or `narrow`, drawing) for large screens and paper, and for phones."""
        if self.draw is None:
            return ()
        title = f"{self.title}, {self.of}" if self.of else self.title
        return tuple(
            (kind, self.draw(Named(f"{self.identity}-{kind}", title, self.caption), width))
            for kind, width in (("wide", WIDE), ("narrow", NARROW))
        )


def absent(identity: str, title: str, why: str, of: str = "") -> Figure:
    """A figure with nothing to draw."""
    return Figure(identity, title, "", of=of, missing=why)


def bar_figure(
    identity: str,
    title: str,
    caption: str,
    rows: Sequence[Bar],
    label: Callable[[float], str],
    axis: str,
    table: Table,
    *,
    of: str = "",
    legend: tuple[tuple[str, str], ...] = (),
    note: str = "",
) -> Figure:
    """A figure of horizontal bars. label: text of a value of the axis. axis: its title."""
    draw = partial(bars, rows=rows, label=label, title=axis)
    return Figure(identity, title, caption, draw, of, legend=legend, table=table, note=note)


@dataclass(frozen=True)
class Section:
    """Figures under one heading; `lead` introduces the figures."""

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

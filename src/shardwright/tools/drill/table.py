"""The tables of a drill."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.tools.drill.chain import Row
from shardwright.tools.drill.reshard import Read


def show_rows(rows: list[Row], say: Callable[[str], None]) -> None:
    """One line for each fault; then, for each that failed, why."""
    names = ("fault", "struck in", "seen after", "resumed from", "lost", "trains after", "then")
    lines = [
        (
            row.fault,
            row.found,
            _seconds(row.detected_seconds),
            _count(row.resumed_from),
            _count(row.lost),
            _seconds(row.begun_seconds),
            "FAILED" if row.problem else row.after,
        )
        for row in rows
    ]
    _show(names, lines, say)
    for row in rows:
        if row.problem:
            say(f"{row.fault}: {row.problem}.")


def show_reads(reads: list[Read], say: Callable[[str], None]) -> None:
    """One line for each number of ranks and layout."""
    names = ("read by", "tensors", "rows", "loss off by", "allowed", "updates")
    lines = [
        (
            f"{read.ranks} rank{'s' if read.ranks > 1 else ''}, {read.layout}",
            *(("FAILED", "FAILED") if read.problem else ("identical", "the same")),
            f"{read.difference:.1e}",
            f"{read.allowed:.1e}",
            str(read.updates),
        )
        for read in reads
    ]
    _show(names, lines, say)
    for read in reads:
        if read.problem:
            say(f"{read.ranks} ranks, {read.layout}: {read.problem}.")


def _show(names: Sequence[str], lines: Sequence[Sequence[str]], say: Callable[[str], None]) -> None:
    widths = [max(map(len, column)) for column in zip(names, *lines)]
    for line in (names, *lines):
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)

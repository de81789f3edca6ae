"""The tables of a drill."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwright.drill.chain import Row
from shardwright.drill.reshard import Read


def show_rows(console: Console, rows: list[Row]) -> None:
    """One line for each fault; then, for each that failed, why."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name, right in (("fault", False), ("where it struck", False), ("seen after", True), ("resumed from", True),
                        ("lost updates", True), ("trains again after", True), ("then", False)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for row in rows:
        table.add_row(
            row.fault,
            row.found,
            _seconds(row.detected_seconds),
            "-" if row.resumed_from is None else str(row.resumed_from),
            "-" if row.lost is None else str(row.lost),
            _seconds(row.begun_seconds),
            "FAILED" if row.problem else row.after,
        )
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(f"{row.fault}: {row.problem}.", soft_wrap=True, markup=False)


def show_reads(console: Console, reads: list[Read]) -> None:
    """One line for each number of ranks and layout."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("read by", "tensors", "rows", "losses differ by", "allowed", "updates"):
        table.add_column(name)
    for read in reads:
        table.add_row(
            f"{read.ranks} rank{'s' if read.ranks > 1 else ''}, {read.layout}",
            *(("FAILED", "") if read.problem else ("identical", "the same")),
            f"{read.difference:.1e}",
            f"{read.allowed:.1e}",
            str(read.updates),
        )
    console.print(table)
    for read in reads:
        if read.problem:
            console.print(f"{read.ranks} ranks, {read.layout}: {read.problem}.", soft_wrap=True, markup=False)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"

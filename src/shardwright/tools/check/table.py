"""The table of a check: a rich one on a terminal, aligned plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from shardwright.console import say
from shardwright.tools.check.compare import Comparison, TensorNumbers

COLUMNS = (
    "layout",
    "targets",
    "loss",
    "grad norm",
    "worst gradient",
    "worst parameter",
    "worst moment",
    "verdict",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """One layout's line."""

    cells: tuple[str, ...]
    passed: bool


def result_row(layout: str, comparison: Comparison, seconds: float | None) -> Row:
    """The line of a layout that ran: relative differences of the worst update, and the part of the allowance used."""
    last = comparison.updates[-1]
    counts = [u.candidate.target_tokens for u in comparison.updates]
    equal = all(not u.scalars["target_tokens"].differs for u in comparison.updates)
    passed = comparison.passed
    cells = (
        layout,
        f"{sum(counts):,} {'equal' if equal else 'DIFFER'}",
        f"{comparison.worst_scalar('loss').relative:.1e}",
        f"{comparison.worst_scalar('grad_norm').relative:.1e}",
        _tensor(comparison.worst(lambda kind: kind == "grad")),
        _tensor(comparison.worst(lambda kind: kind == "param")),
        _tensor(comparison.worst(lambda kind: kind not in ("grad", "param", "step"))),
        f"equal, {last.update} updates" if passed else "DIFFERS",
        "n/a" if seconds is None else f"{seconds:.1f}",
    )
    return Row(cells, passed)


def crashed_row(layout: str, code: int) -> Row:
    """The line of a layout whose ranks ended without a result."""
    return Row((layout, *("n/a" for _ in COLUMNS[1:-2]), f"FAILED, exit {code}", "n/a"), False)


def _tensor(numbers: TensorNumbers | None) -> str:
    if numbers is None:
        return "n/a"
    used = f"{numbers.used:.0%}" if numbers.used < 10 else f"{numbers.used:.0e} x"
    return f"{numbers.relative:.1e} ({used}) {numbers.name}"


def show(console: Console, rows: Sequence[Row]) -> None:
    """Prints the rows: as a table on a terminal, as columns of plain text elsewhere."""
    if not console.is_terminal:
        lines = [COLUMNS, *(row.cells for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        for line in lines:
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            say(console, text)
        return
    table = Table(show_edge=False, pad_edge=False)
    for column in COLUMNS:
        table.add_column(
            column, overflow="fold", justify="right" if column in ("loss", "grad norm", "seconds") else "left"
        )
    for row in rows:
        style = "green" if row.passed else "bold red"
        cells = [cell.replace(") ", ")\n", 1) if 4 <= i <= 6 else cell for i, cell in enumerate(row.cells)]
        cells[7] = f"[{style}]{row.cells[7]}[/]"
        table.add_row(*cells)
    console.print(table)

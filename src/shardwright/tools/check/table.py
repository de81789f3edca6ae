"""The table of a check: a row for each layout."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwright.console import show_table
from shardwright.tools.check.compare import Comparison, TensorNumbers

TENSORS = ("worst gradient", "worst parameter", "worst moment")
COLUMNS = ("layout", "targets", "loss", "grad norm", *TENSORS, "verdict", "seconds")

Row = dict[str, str]
"""The cells of a layout by column; a column that is left out is not known."""


def result_row(layout: str, comparison: Comparison, seconds: float | None) -> Row:
    """The row of a layout that ran: relative differences of the worst update, and the part of the allowance that is used."""
    targets = sum(u.candidate.target_tokens for u in comparison.updates)
    equal = all(not u.scalars["target_tokens"].differs for u in comparison.updates)
    worst = (
        comparison.worst(lambda kind: kind == "grad"),
        comparison.worst(lambda kind: kind == "param"),
        comparison.worst(lambda kind: kind not in ("grad", "param", "step")),
    )
    row = {
        "layout": layout,
        "targets": f"{targets:,} {'equal' if equal else 'DIFFER'}",
        "loss": f"{comparison.worst_scalar('loss').relative:.1e}",
        "grad norm": f"{comparison.worst_scalar('grad_norm').relative:.1e}",
        **{column: _tensor(numbers) for column, numbers in zip(TENSORS, worst) if numbers},
        "verdict": f"equal, {comparison.updates[-1].update} updates" if comparison.passed else "DIFFERS",
    }
    return row if seconds is None else row | {"seconds": f"{seconds:.1f}"}


def crashed_row(layout: str, code: int) -> Row:
    """The row of a layout whose ranks ended without a result."""
    return {"layout": layout, "verdict": f"FAILED, exit {code}"}


def _tensor(numbers: TensorNumbers) -> str:
    used = f"{numbers.used:.0%}" if numbers.used < 10 else f"{numbers.used:.0e} x"
    return f"{numbers.relative:.1e} ({used}) {numbers.name}"


def show(console: Console, rows: list[Row]) -> None:
    """Prints the rows."""
    lines = []
    for row in rows:
        cells: list[str | Text] = [row.get(column, "n/a") for column in COLUMNS]
        if console.is_terminal:
            cells = [str(cell).replace(") ", ")\n", 1) for cell in cells]
            style = "green" if row["verdict"].startswith("equal") else "bold red"
            cells[COLUMNS.index("verdict")] = Text(row["verdict"], style=style)
        lines.append(cells)
    show_table(console, COLUMNS, lines, right=("loss", "grad norm", "seconds"))

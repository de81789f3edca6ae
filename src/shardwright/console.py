"""Lines and tables on a console."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def say(console: Console, text: str) -> None:
    """Prints `text` whole: brackets in a name are no markup, numbers get no colour, a long line is not broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_table(
    console: Console, headers: Sequence[str], rows: Sequence[Sequence[str | Text]], right: Container[str] = ()
) -> None:
    """Prints rows as a table on a terminal, as aligned columns of plain text elsewhere. right: headers aligned at the right."""
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(headers, *rows)]
        for line in (headers, *rows):
            say(console, "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths)).rstrip())
        return
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold", justify="right" if header in right else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)

"""Lines on a console, printed as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints `text` whole: brackets in a name are no markup, numbers get no colour, a long line is not broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)

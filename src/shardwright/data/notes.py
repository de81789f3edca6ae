"""Facts about records that are seen while these are tokenised: counted, with the first line, for the lines before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """`count` records (or turns) of `file`, the first at `line`, to which `kind` applies. subject: of the kind, as text."""

    kind: str
    subject: str
    file: int
    count: int
    line: int


class Notes:
    """Counts by kind, subject and file."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], tuple[int, int]] = {}

    def add(self, kind: str, subject: str, file: int, line: int, count: int = 1) -> None:
        """Counts `count` more; the line that was given first stays."""
        before, first = self._found.get((kind, subject, file), (0, line))
        self._found[kind, subject, file] = (before + count, first)

    def update(self, other: Notes) -> None:
        """Adds those of later records."""
        for note in other:
            self.add(note.kind, note.subject, note.file, note.line, note.count)

    def __iter__(self) -> Iterator[Note]:
        return (Note(*key, *value) for key, value in self._found.items())

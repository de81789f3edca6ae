"""Who descends from whom: the branches of a run that went back to an older checkpoint, and which of them is followed.

A branch begins where a run goes on from another checkpoint than the newest of the branch before. Each checkpoint
says the branches that lead to it, so the order of descent survives whatever is removed. Which branch was chosen last stands in
`lineage.json` beside the checkpoints, from the moment that training begins on it: a run that is killed before its first
save goes on from the checkpoint that was chosen.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.files import write_text

LINEAGE = "lineage.json"


@dataclass(frozen=True)
class Branch:
    """A branch begins when `begin` updates are done. number: counted in one directory, so the highest was chosen last."""

    number: int
    id: str
    begin: int


Lineage = tuple[Branch, ...]
"""The branches that lead to a checkpoint, the first one first. Empty in checkpoints that say nothing of it."""


@dataclass(frozen=True)
class Member:
    """A checkpoint of a directory as its manifest describes it."""

    path: Path
    update: int
    lineage: Lineage


@dataclass(frozen=True)
class Choice:
    """The branch that was chosen last. job: who chose it; the same job does not choose again when its ranks are started again.

    origin: the checkpoint from which the branch began. It is named by its name where it lies in `output_dir`, which may be
    moved or copied, otherwise by its path; None where the branch began from nothing.
    """

    lineage: Lineage
    origin: str | None
    job: str


def origin_text(output_dir: Path, path: Path | None) -> str | None:
    """`Choice.origin` of the checkpoint at `path`."""
    if path is None:
        return None
    return path.name if path.resolve().parent == output_dir.resolve() else os.fspath(path.absolute())


def parse_lineage(found: Iterable[Mapping[str, Any]]) -> Lineage:
    """The lineage in the JSON of a manifest. Raises `KeyError`, `TypeError` or `ValueError` for any other JSON."""
    return tuple(Branch(int(b["number"]), str(b["id"]), int(b["begin"])) for b in found)


def follows(line: Lineage, member: Member) -> bool:
    """Whether a run on the branches `line` has gone through `member`."""
    depth = len(member.lineage)
    return line[:depth] == member.lineage and (depth == len(line) or member.update <= line[depth].begin)


def number_of(line: Lineage) -> int:
    return line[-1].number if line else 0


def line_of(choice: Choice | None, members: Iterable[Member]) -> Lineage:
    """The line that is followed: the line that was chosen last, as far as the choice or the checkpoints tell."""
    if choice is not None:
        return choice.lineage
    found = [member.lineage for member in members]
    return max(found, key=number_of, default=())


def continued(line: Lineage, chosen: Member | None, members: Iterable[Member]) -> bool:
    """Whether a run that goes on from `chosen` stays on `line`: nothing newer of it is left behind."""
    if chosen is None or not chosen.lineage or not follows(line, chosen) or chosen.update < line[-1].begin:
        return False
    return not any(follows(line, other) and other.update > chosen.update for other in members)


def branched(chosen: Member | None, number: int, name: str) -> Lineage:
    """The line of a new branch from `chosen`, or from nothing."""
    before, begin = (chosen.lineage, chosen.update) if chosen else ((), 0)
    return (*before, Branch(number, name, begin))


def read_choice(output_dir: Path) -> Choice | None:
    """The last choice that `output_dir` records; None where it records none, or one that cannot be read."""
    try:
        found = json.loads((output_dir / LINEAGE).read_bytes())
        origin = found["origin"]
        return Choice(parse_lineage(found["lineage"]), str(origin) if origin else None, str(found["job"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_choice(output_dir: Path, choice: Choice) -> None:
    """Notes what was chosen."""
    aside = output_dir / f".{LINEAGE}.new"
    write_text(aside, json.dumps(asdict(choice), indent=1) + "\n")
    shutil.move(aside, output_dir / LINEAGE)  # copies where a share cannot rename over a file

"""Which rank the others wait for, from what each has given to its process groups and where its main thread stands.

Pure functions. A rank waits for the ranks that have not issued its collective, that have issued another in its place, or that
have not sent the message that it receives. The rank that others wait for, and that waits for nobody, is to blame. Work that a
rank has begun without waiting looks like waiting too; where ranks so seem to wait in a circle, the place of the main thread
decides.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

STOPPED, OWN_CODE, BACKWARD, WAITING = range(4)
"""Where a main thread stands, from the least to the most innocent."""

_WAITS = re.compile(r"\b(wait|synchronize|item|tolist|cpu|numpy)\(")
"""Calls that wait for work given to a device or to other ranks. A wait for a thread ends in threading.py instead."""
_TORCH_WAITS = ("torch/distributed/", "torch/_ops.py")
"""Python code around torch's collectives, and around the operators that some of them are."""
_EQUAL_SIZES = ("allreduce", "allgather", "reducescatter")
"""Collectives in which every rank gives tensors of the same size."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[1])

_Key = tuple[str, tuple[int, ...], int]
"""Name of a group, its ranks, the number of a collective in it."""


def place_of(stack: Sequence[str]) -> str:
    """The first line of a stack that is of the user's or our code, and the innermost one where a library is behind it."""
    if not stack:
        return ""
    own = next((frame for frame in stack if _is_own(_split(frame)[0])), stack[0])
    return own if own == stack[0] else f"{own} (in {stack[0]})"


@dataclass(frozen=True)
class Sight:
    """One rank of a run that hangs.

    doing: its phase, which `position` sorts. stack: frames of the main thread, innermost first: `file:line function`. issued:
    as `measure.outstanding.issued` has it; None when the rank did not answer. note: the error that the rank handles.
    """

    rank: int
    world_size: int
    doing: str
    position: Sequence[int]
    seconds: float
    stack: tuple[str, ...] = ()
    issued: Mapping[str, Any] | None = None
    stopped: bool = False
    ended: bool = False
    note: str = ""

    @cached_property
    def standing(self) -> int:
        """One of `STOPPED`, `OWN_CODE`, `BACKWARD` and `WAITING`."""
        if self.ended:
            return WAITING
        if not self.stack:
            return STOPPED
        file, line, _ = _split(self.stack[0])
        if any(part in file for part in _TORCH_WAITS) or _WAITS.search(linecache.getline(file, line)):
            return WAITING
        return BACKWARD if self.stack[0].endswith("_engine_run_backward") else OWN_CODE

    @property
    def place(self) -> str:
        """The line where the rank stands; empty where it is not known."""
        return "" if self.ended else place_of(self.stack)

    @cached_property
    def collectives(self) -> dict[_Key, tuple[str, Any, bool]]:
        """What the rank has issued: (operation, sizes, whether it is done)."""
        groups = (self.issued or {}).get("groups", {})
        return {
            (name, tuple(group["ranks"]), number): (operation, sizes, done)
            for name, group in groups.items()
            for number, operation, sizes, done in group["collectives"]
        }

    @cached_property
    def newest(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """The number of the last collective that the rank has issued in each of its groups."""
        return {(name, ranks): number for name, ranks, number in sorted(self.collectives, key=lambda k: k[2])}


@dataclass
class Wait:
    """What one rank waits for: `what`, the ranks that have `not_begun` this, and what `others` do in its place."""

    what: str
    not_begun: list[int] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{_ranks(self.not_begun)} {_has(self.not_begun)} not begun it"] if self.not_begun else []
        parts += [f"rank {rank} is in {other} in its place" for rank, other in self.others.items()]
        return f"{self.what}: {', '.join(parts)}"


def waits_of(sights: Sequence[Sight]) -> dict[int, list[Wait]]:
    """Rank -> what it has begun that cannot end before other ranks come."""
    by_rank = {sight.rank: sight for sight in sights if not sight.ended}
    return {rank: [*_collectives(sight, by_rank), *_transfers(sight, by_rank)] for rank, sight in by_rank.items()}


def _collectives(sight: Sight, by_rank: Mapping[int, Sight]) -> Iterable[Wait]:
    for key, (operation, sizes, done) in sight.collectives.items():
        name, ranks, number = key
        wait = Wait(f"{_text(operation, sizes)} of {_ranks(ranks)}")
        for other in (by_rank[rank] for rank in ranks if rank in by_rank and rank != sight.rank and not done):
            if found := other.collectives.get(key):
                if not _same(operation, sizes, *found[:2]):
                    wait.others[other.rank] = _text(*found[:2])
            elif other.newest.get((name, ranks), -1) < number:
                wait.not_begun.append(other.rank)
        if wait.not_begun or wait.others:
            yield wait


def _transfers(sight: Sight, by_rank: Mapping[int, Sight]) -> Iterable[Wait]:
    for mine, theirs, text in (("received", "sent", "a message from"), ("sent", "received", "a message to")):
        behind: dict[int, None] = {}
        for other, group, tag, count in (sight.issued or {}).get(mine, ()):
            if other in by_rank and other != sight.rank:
                answers = (by_rank[other].issued or {}).get(theirs, ())
                done = sum(n for rank, g, t, n in answers if (rank, g, t) == (sight.rank, group, tag))
                if done < count:
                    behind[other] = None
        yield from (Wait(f"{text} rank {other}", [other]) for other in behind)


def to_blame(sights: Sequence[Sight]) -> list[Sight]:
    """The ranks that the others wait for; the first by `standing` and position where no rank waits for another."""
    waits = waits_of(sights)
    edges = {rank: {r for wait in found for r in (*wait.not_begun, *wait.others)} for rank, found in waits.items()}
    awaited = [sight for sight in sights if any(sight.rank in targets for targets in edges.values())]
    if not awaited:
        first = min(sights, key=_innocence)
        return [sight for sight in sights if _innocence(sight) == _innocence(first)]
    roots = [sight for sight in awaited if not edges.get(sight.rank)]
    # a rank too busy to answer seems to wait for nobody
    roots = [s for s in roots if s.issued is not None or s.standing < WAITING] or roots
    roots = roots or [sight for sight in awaited if sight.standing in (STOPPED, OWN_CODE)]
    return roots or _odd_ones(awaited, waits) or awaited


def _odd_ones(awaited: Sequence[Sight], waits: Mapping[int, list[Wait]]) -> list[Sight]:
    """Of ranks in different collectives: those in another than most, that handle an error, or that are in the user's code."""
    seen = Counter({rank: sum(len(wait.others) for wait in found) for rank, found in waits.items()})
    most = max(seen.values(), default=0)
    odd = [sight for sight in awaited if most and seen[sight.rank] == most]
    if len(odd) < len(awaited):
        return odd
    noted = [sight for sight in awaited if sight.note]
    return noted or [sight for sight in awaited if sight.place and not sight.place.startswith(_PACKAGE)]


def _innocence(sight: Sight) -> tuple[int, Sequence[int]]:
    return sight.standing, sight.position


def describe(sights: Sequence[Sight]) -> list[str]:
    """The lines of a report: who is stuck and where, then every rank with what it waits for."""
    blamed, waits = to_blame(sights), waits_of(sights)
    first, numbers = blamed[0], [sight.rank for sight in blamed]
    alone = len(blamed) == 1
    lines = [
        f"shardwright: {_ranks(numbers)} of {first.world_size} {'is' if alone else 'are'} stuck in {first.doing} "
        f"({first.seconds:.0f} s without progress){f', at {first.place}' if alone and first.place else ''}."
    ]
    for sight in sorted(sights, key=lambda sight: sight.rank):
        lines += _lines(sight, waits.get(sight.rank, []), sight in blamed)
    if first.stack:
        lines += [f"Stack of rank {first.rank}, innermost first:", *(f"  | {f}" for f in first.stack[:12])]
    return lines


def _lines(sight: Sight, waits: Sequence[Wait], blamed: bool) -> list[str]:
    text = f"  rank {sight.rank}: {sight.doing} for {sight.seconds:.1f} s, "
    if sight.ended:
        return [f"{text}waited for others in a collective for too long"]
    if sight.standing == STOPPED:
        return [text + ("stopped by a signal" if sight.stopped else "not answering signals")]
    standing = WAITING if waits and not blamed else sight.standing
    doing = {OWN_CODE: "in", BACKWARD: "in backward at", WAITING: "waiting for others in"}[standing]
    note = f", {sight.note}" if sight.note else ""
    return [f"{text}{doing} {sight.place}{note}", *(f"    begun: {wait}" for wait in waits[:3])]


def _same(operation: str, sizes: Any, other_operation: str, other_sizes: Any) -> bool:
    plain = operation.replace("_", "")
    return operation == other_operation and (sizes == other_sizes or not any(name in plain for name in _EQUAL_SIZES))


def _text(operation: str, sizes: Any) -> str:
    given = ", ".join("×".join(map(str, size)) or "1" for size in sizes[0][:3])
    more = f" and {len(sizes[0]) - 3} more" if len(sizes[0]) > 3 else ""
    return f"{operation} ({given}{more})" if given else operation


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _has(numbers: Sequence[int]) -> str:
    return "has" if len(numbers) == 1 else "have"


def _split(frame: str) -> tuple[str, int, str]:
    place, _, function = frame.rpartition(" ")
    file, _, line = place.rpartition(":")
    return file, int(line), function


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) or not (
        file.startswith((*_LIBRARIES, "<")) or "site-packages" in file or "dist-packages" in file
    )

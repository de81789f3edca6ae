"""Which rank the others wait for, from the collectives that each rank has issued and from the stack of its main thread.

A rank waits for ranks that have not issued its collective, that have issued another in its place, or that have not sent the
message that it receives. The culprit is the rank that others wait for and that waits for nobody. Work that a rank has begun
without waiting looks like waiting too; where ranks so seem to wait in a circle, the stack of the main thread decides.
"""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

STOPPED, OWN_CODE, BACKWARD, WAITING = range(4)
"""What a main thread does, the most suspicious first."""

_WAITS = re.compile(r"\bwait\(")
"""A call that waits for other ranks. A wait for a thread ends in threading.py instead."""
_DEVICE_WAITS = re.compile(r"\.(synchronize|item|tolist|cpu|numpy|nonzero|is_nonzero|equal|allclose)\(")
"""Calls that wait until a GPU has done all that it was given, such as a collective that another rank has not begun."""
_TORCH_WAITS = ("torch/distributed/", "torch/_ops.py")
"""Python code around torch's collectives, and around the operators that some of them are."""
_EQUAL_SIZES = ("allreduce", "allgather", "reducescatter")
"""Collectives in which every rank gives tensors of the same size."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[1])

_Key = tuple[str, tuple[int, ...], int]
"""Name of a group, its ranks, the number of a collective in it."""


def own_frame(stack: Sequence[str]) -> str:
    """The innermost frame of the user's or our code, with the innermost frame of all where that is in a library."""
    if not stack:
        return ""
    own = next((frame for frame in stack if _is_own(_split(frame)[0])), stack[0])
    return own if own == stack[0] else f"{own} (in {stack[0]})"


@dataclass(frozen=True)
class RankSnapshot:
    """One rank of a run that hangs."""

    rank: int
    world_size: int
    doing: str
    """Its phase and update."""
    position: Sequence[int]
    """Sorts ranks by progress."""
    seconds: float
    """Since its last beat."""
    stack: tuple[str, ...] = ()
    """Frames of the main thread, innermost first: `file:line function`."""
    issued: Mapping[str, Any] | None = None
    """From `measure.outactivity.issued`; None when the rank did not answer."""
    stopped: bool = False
    """By a signal."""
    ended: bool = False
    note: str = ""
    """The error that the rank handles."""

    @cached_property
    def activity(self) -> int:
        """One of `STOPPED`, `OWN_CODE`, `BACKWARD` and `WAITING`."""
        if self.ended:
            return WAITING
        if not self.stack:
            return STOPPED
        file, line, _ = _split(self.stack[0])
        if any(part in file for part in _TORCH_WAITS) or self.device_wait or _WAITS.search(_statement(file, line)):
            return WAITING
        return BACKWARD if self.stack[0].endswith("_engine_run_backward") else OWN_CODE

    @cached_property
    def device_wait(self) -> str:
        """The call in which the main thread waits for its device, such as `.tolist()`; empty where it does not."""
        file, line, _ = _split(self.stack[0]) if self.stack else ("", 0, "")
        found = _DEVICE_WAITS.search(_statement(file, line))
        return f".{found[1]}()" if found else ""

    @property
    def frame(self) -> str:
        """Where the main thread is; empty where that is not known."""
        return "" if self.ended else own_frame(self.stack)

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
    """One collective or message that a rank waits for: its description, ranks that have not begun it, ranks in another one."""

    what: str
    not_begun: list[int] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{_ranks(self.not_begun)} {_has(self.not_begun)} not begun it"] if self.not_begun else []
        parts += [f"rank {rank} is in {other} in its place" for rank, other in self.others.items()]
        return f"{self.what}: {', '.join(parts)}"


def waits_of(snapshots: Sequence[RankSnapshot]) -> dict[int, list[Wait]]:
    """Rank -> its collectives and messages that cannot end before other ranks begin them."""
    by_rank = {snapshot.rank: snapshot for snapshot in snapshots if not snapshot.ended}
    return {
        rank: [*_collectives(snapshot, by_rank), *_transfers(snapshot, by_rank)] for rank, snapshot in by_rank.items()
    }


def _collectives(snapshot: RankSnapshot, by_rank: Mapping[int, RankSnapshot]) -> Iterable[Wait]:
    for key, (operation, sizes, done) in snapshot.collectives.items():
        name, ranks, number = key
        wait = Wait(f"{_text(operation, sizes)} of {_ranks(ranks)}")
        for other in (by_rank[rank] for rank in ranks if rank in by_rank and rank != snapshot.rank and not done):
            if found := other.collectives.get(key):
                if not _same(operation, sizes, *found[:2]):
                    wait.others[other.rank] = _text(*found[:2])
            elif other.newest.get((name, ranks), -1) < number:
                wait.not_begun.append(other.rank)
        if wait.not_begun or wait.others:
            yield wait


def _transfers(snapshot: RankSnapshot, by_rank: Mapping[int, RankSnapshot]) -> Iterable[Wait]:
    for mine, theirs, text in (("received", "sent", "a message from"), ("sent", "received", "a message to")):
        behind: dict[int, None] = {}
        for other, group, tag, count in (snapshot.issued or {}).get(mine, ()):
            if other in by_rank and other != snapshot.rank:
                answers = (by_rank[other].issued or {}).get(theirs, ())
                done = sum(n for rank, g, t, n in answers if (rank, g, t) == (snapshot.rank, group, tag))
                if done < count:
                    behind[other] = None
        yield from (Wait(f"{text} rank {other}", [other]) for other in behind)


def find_culprits(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """The ranks that the others wait for; the most suspicious by `activity` and position where no rank waits for another."""
    waits = waits_of(snapshots)
    edges = {rank: {r for wait in found for r in (*wait.not_begun, *wait.others)} for rank, found in waits.items()}
    awaited = [snapshot for snapshot in snapshots if any(snapshot.rank in targets for targets in edges.values())]
    if not awaited:
        first = min(snapshots, key=_suspicion)
        return [snapshot for snapshot in snapshots if _suspicion(snapshot) == _suspicion(first)]
    roots = [snapshot for snapshot in awaited if not edges.get(snapshot.rank)]
    # a rank that was too busy to answer seems to wait for nobody
    roots = [s for s in roots if s.issued is not None or s.activity < WAITING] or roots
    roots = roots or [snapshot for snapshot in awaited if snapshot.activity in (STOPPED, OWN_CODE)]
    return roots or _odd_ones(awaited, waits) or awaited


def _odd_ones(awaited: Sequence[RankSnapshot], waits: Mapping[int, list[Wait]]) -> list[RankSnapshot]:
    """Of ranks in different collectives: those unlike most, else those that handle an error or are in the user's code."""
    seen = Counter({rank: sum(len(wait.others) for wait in found) for rank, found in waits.items()})
    most = max(seen.values(), default=0)
    odd = [snapshot for snapshot in awaited if most and seen[snapshot.rank] == most]
    if len(odd) < len(awaited):
        return odd
    noted = [snapshot for snapshot in awaited if snapshot.note]
    return noted or [snapshot for snapshot in awaited if snapshot.frame and not snapshot.frame.startswith(_PACKAGE)]


def _suspicion(snapshot: RankSnapshot) -> tuple[int, Sequence[int]]:
    return snapshot.activity, snapshot.position


def describe(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """The lines of a report: which rank is stuck and where, then every rank with what it waits for."""
    culprits, waits = find_culprits(snapshots), waits_of(snapshots)
    first, numbers = culprits[0], [snapshot.rank for snapshot in culprits]
    alone = len(culprits) == 1
    lines = [
        f"shardwright: {_ranks(numbers)} of {first.world_size} {'is' if alone else 'are'} stuck in {first.doing} "
        f"({first.seconds:.0f} s without progress){f', at {first.frame}' if alone and first.frame else ''}."
    ]
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank):
        lines += _lines(snapshot, waits.get(snapshot.rank, []), snapshot in culprits)
    if first.stack:
        lines += [f"Stack of rank {first.rank}, innermost first:", *(f"  | {f}" for f in first.stack[:12])]
    return lines


def _lines(snapshot: RankSnapshot, waits: Sequence[Wait], culprits: bool) -> list[str]:
    text = f"  rank {snapshot.rank}: {snapshot.doing} for {snapshot.seconds:.1f} s, "
    if snapshot.ended:
        return [f"{text}waited for others in a collective for too long"]
    if snapshot.activity == STOPPED:
        return [text + ("stopped by a signal" if snapshot.stopped else "not answering signals")]
    activity = WAITING if waits and not culprits else snapshot.activity
    doing = {OWN_CODE: "in", BACKWARD: "in backward at", WAITING: "waiting for others in"}[activity]
    if activity == WAITING and snapshot.device_wait:
        doing = f"waits for the device in {snapshot.device_wait} at"
    note = f", {snapshot.note}" if snapshot.note else ""
    return [f"{text}{doing} {snapshot.frame}{note}", *(f"    begun: {wait}" for wait in waits[:3])]


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


def _statement(file: str, line: int) -> str:
    """The text of the statement at a line. Python names the first line of a call, and a call may stand on several lines."""
    lines, spans = linecache.getlines(file), [(line, line)]
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.stmt):
                body = getattr(node, "body", None)  # the text of a compound statement ends where its body begins
                last = max(node.lineno, body[0].lineno - 1) if isinstance(body, list) else node.end_lineno or line
                spans.append((node.lineno, last))
    first, last = max((span for span in spans[1:] if span[0] <= line <= span[1]), default=spans[0])
    return "".join(lines[first - 1 : last])


def _split(frame: str) -> tuple[str, int, str]:
    place, _, function = frame.rpartition(" ")
    file, _, line = place.rpartition(":")
    return file, int(line), function


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) or not (
        file.startswith((*_LIBRARIES, "<")) or "site-packages" in file or "dist-packages" in file
    )

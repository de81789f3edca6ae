"""One run that meets all live faults, one after another, and must end like the reference."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.checkpoint.directory import complete_checkpoints
from shardwright.checkpoint.manifest import read_manifest
from shardwright.errors import CheckFailed, ExitCode
from shardwright.measure import clock
from shardwright.tools.drill.compare import compare_checkpoints, compare_metrics
from shardwright.tools.drill.damage import EXECUTED, KINDS, POISON, damage
from shardwright.tools.drill.faults import Fault
from shardwright.tools.drill.session import Session


@dataclass
class Row:
    """One fault: where it struck, how long it took to be seen and to train again, from where, and what is wrong."""

    fault: str
    found: str
    detected_seconds: float | None = None
    resumed_from: int | None = None
    lost: int | None = None
    begun_seconds: float | None = None
    problem: str = ""
    after: str = "identical"


Say = Callable[[str], None]


def run_reference(session: Session) -> None:
    """The run that nothing happens to. Raises `CheckFailed` when it does not end well."""
    session.start(restarts=0)
    if session.wait_for_end(0) != ExitCode.DONE:
        raise CheckFailed("The reference, which nothing was done to, did not end well.", session.tail(20))


def run_chain(session: Session, faults: list[Fault], updates: int, chance: random.Random, say: Say) -> list[Row]:
    """Strikes each fault once, spread over the run; a start after each. Returns a row for each fault."""
    rows: list[Row] = []
    if faults[0].beside:
        session.save_beside(True)
    session.start()
    for number, fault in enumerate(faults):
        start = max(0, session.starts - 1) if rows or session.starts else 0
        for _ in session.polls("ranks to be started"):
            if session.starts > start:
                break
        if number + 1 < len(faults) and faults[number + 1].beside and not fault.beside:
            session.wait_for_begin(start)  # its ranks have read their run file
            session.save_beside(True)
        earliest = 1 + number * max(0, updates - 6) // max(1, len(faults)) + chance.randrange(2)
        row = _strike(session, fault, start, earliest)
        rows.append(row)
        say(f"{fault.name}: {row.found}{f' FAILED: {row.problem}' if row.problem else ''}")
        if row.problem:
            session.close()
        session.start()
    code = _end(session)
    if code != ExitCode.DONE:
        raise CheckFailed(f"The last start ended with {code}, not 0.", session.tail(20))
    return rows


def _end(session: Session) -> int | None:
    code = None
    while code is None:
        code = session.wait_for_end(session.starts - 1)
    return code


def _strike(session: Session, fault: Fault, start: int, earliest: int) -> Row:
    output_before = session.output.stat().st_size
    found = fault.strike(session, earliest)
    if found is None:
        return Row(fault.name, "", problem="the run was over before the moment came")
    struck = clock.now()
    code = session.wait_for_end(start)
    seen = clock.now()
    row = Row(fault.name, found, detected_seconds=seen - struck)
    said = session.output.read_bytes()[output_before:].decode(errors="replace")
    if code not in fault.codes:
        row.problem = f"the launcher ended with {code}, not {' or '.join(map(str, fault.codes))}"
    elif fault.says not in said:
        row.problem = f"the launcher did not say `{fault.says}`"
    expected = session.newest()
    session.start()
    row.resumed_from, begun = session.wait_for_begin(start + 1)
    row.begun_seconds = begun - seen
    row.lost = session.reached(start) - row.resumed_from
    if row.resumed_from != expected:
        row.problem = row.problem or f"it went on from update {row.resumed_from}, the newest checkpoint is {expected}"
    return row


def judge(rows: list[Row], session: Session, reference: Session) -> None:
    """Gives each row the first difference from the reference that comes after it and before the next one."""
    update, what = compare_metrics(session.output_dir, reference.output_dir)
    if update is None:
        for path in complete_checkpoints(session.output_dir):
            right = reference.output_dir / path.name
            if right.exists() and (what := compare_checkpoints(path, right)):
                update = int(path.name.split("-")[1]) - 1
                break
    if update is None:
        return
    blamed = [row for row in rows if row.resumed_from is not None and row.resumed_from <= update]
    for row in blamed[-1:] or rows[:1]:
        row.after, row.problem = what, row.problem or what


def run_damaged(session: Session, reference: Session, chance: random.Random, say: Say) -> Row:
    """Three checkpoints of the reference damaged in three ways; a start from them must use the fourth newest."""
    there = complete_checkpoints(reference.output_dir)[:-1]
    if len(there) < 4:
        raise CheckFailed(f"{len(there)} checkpoints are too few to damage three and go on from a fourth.")
    for path in there:
        shutil.copytree(path, session.output_dir / path.name)
    shutil.copy(reference.output_dir / "metrics.jsonl", session.output_dir / "metrics.jsonl")
    others = [kind for kind in KINDS if kind != POISON]
    kinds, files = [POISON, *chance.sample(others, 2)], chance.randrange(3)
    done = [
        damage(session.output_dir / path.name, kind, files + number)
        for number, (path, kind) in enumerate(zip(there[-3:], kinds))
    ]
    say(f"Damaged: {'; '.join(done)}.")
    row = Row("damaged checkpoints", "the 3 newest")
    struck = clock.now()
    session.start(restarts=0)
    row.resumed_from, begun = session.wait_for_begin(0)
    row.begun_seconds = begun - struck
    right = read_manifest(there[-4]).update
    row.lost = read_manifest(there[-1]).update - row.resumed_from
    if row.resumed_from != right:
        row.problem = f"it went on from update {row.resumed_from}, the newest good one is {right}"
    if _end(session) != ExitCode.DONE:
        row.problem = row.problem or f"it did not end well: {session.tail(3)}"
    if (session.output_dir / EXECUTED).exists():
        row.problem = "a command that was pickled into a checkpoint was executed"
    named = [path.name for path in there[-3:] if path.name not in session.output.read_text(encoding="utf-8")]
    if named:
        row.problem = row.problem or f"it did not name {', '.join(named)}"
    return row

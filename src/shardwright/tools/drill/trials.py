"""Trials of a drill: one run goes through all faults, one after another, and must end like the reference."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.checkpoint.directory import complete_checkpoints, update_of
from shardwright.checkpoint.manifest import read_manifest
from shardwright.errors import CheckFailed, ExitCode
from shardwright.measure import clock
from shardwright.tools.drill.compare import compare_checkpoints, compare_metrics
from shardwright.tools.drill.corruption import EXECUTED, KINDS, PICKLE, corrupt
from shardwright.tools.drill.faults import Trial
from shardwright.tools.drill.target_run import TargetRun


@dataclass
class TrialResult:
    """What one fault led to."""

    fault: str
    injected_at: str
    """Phase or stage of a save."""
    detected_seconds: float | None = None
    """From the fault until the launcher has ended the ranks."""
    resumed_from: int | None = None
    """Updates of the checkpoint that the next start resumed from."""
    lost: int | None = None
    """Updates that had to be done again."""
    restart_seconds: float | None = None
    """From the end of the ranks until training continues."""
    problem: str = ""
    after: str = "identical"
    """The first difference from the reference after the fault."""

    @property
    def cells(self) -> dict[str, str]:
        """Column -> text of the table of trials."""
        return {
            "fault": self.fault,
            "injected at": self.injected_at,
            "detected after": _text(self.detected_seconds, " s"),
            "resumed from": _text(self.resumed_from),
            "lost": _text(self.lost),
            "trains after": _text(self.restart_seconds, " s"),
            "then": "FAILED" if self.problem else self.after,
        }


def _text(number: float | None, unit: str = "") -> str:
    return "-" if number is None else f"{number:.1f}{unit}" if unit else str(number)


Say = Callable[[str], None]


def run_reference(target: TargetRun) -> None:
    """The run without faults. Raises `CheckFailed` when it fails."""
    target.start(restarts=0)
    if target.wait_for_end(0) != ExitCode.DONE:
        raise CheckFailed("The reference, a run without faults, failed.", target.tail(20))


def run_trials(target: TargetRun, trials: list[Trial], updates: int, rng: random.Random, say: Say) -> list[TrialResult]:
    """Injects each fault once, spread over the run, with a start after each."""
    results: list[TrialResult] = []
    if trials[0].async_save:
        target.set_async_save(True)
    target.start()
    for number, trial in enumerate(trials):
        start = max(0, target.starts - 1) if results or target.starts else 0
        for _ in target.polls("ranks to be started"):
            if target.starts > start:
                break
        if number + 1 < len(trials) and trials[number + 1].async_save and not trial.async_save:
            target.wait_for_first_update(start)  # its ranks have read their run file
            target.set_async_save(True)
        earliest = 1 + number * max(0, updates - 6) // max(1, len(trials)) + rng.randrange(2)
        result = _run_trial(target, trial, start, earliest)
        results.append(result)
        say(f"{trial.name}: {result.injected_at}{f' FAILED: {result.problem}' if result.problem else ''}")
        if result.problem:
            target.close()
        target.start()
    code = _wait_for_last_end(target)
    if code != ExitCode.DONE:
        raise CheckFailed(f"The last start ended with {code}, not 0.", target.tail(20))
    return results


def _wait_for_last_end(target: TargetRun) -> int | None:
    code = None
    while code is None:
        code = target.wait_for_end(target.starts - 1)
    return code


def _run_trial(target: TargetRun, trial: Trial, start: int, earliest: int) -> TrialResult:
    output_before = target.output.stat().st_size
    found = trial.inject(target, earliest)
    if found is None:
        return TrialResult(trial.name, "", problem="the run ended before the fault could be injected")
    injected = clock.now()
    code = target.wait_for_end(start)
    detected = clock.now()
    result = TrialResult(trial.name, found, detected_seconds=detected - injected)
    said = target.output.read_bytes()[output_before:].decode(errors="replace")
    if code not in trial.codes:
        result.problem = f"the launcher ended with {code}, not {' or '.join(map(str, trial.codes))}"
    elif trial.says not in said:
        result.problem = f"the launcher did not print `{trial.says}`"
    expected = target.newest()
    target.start()
    result.resumed_from, begun = target.wait_for_first_update(start + 1)
    result.restart_seconds = begun - detected
    result.lost = target.reached(start) - result.resumed_from
    if result.resumed_from != expected:
        text = f"the run resumed from update {result.resumed_from}, the newest checkpoint is {expected}"
        result.problem = result.problem or text
    return result


def judge(results: list[TrialResult], target: TargetRun, reference: TargetRun) -> None:
    """Gives the first difference from the reference to the last fault before it."""
    update, what = compare_metrics(target.output_dir, reference.output_dir)
    if update is None:
        for path in complete_checkpoints(target.output_dir):
            right = reference.output_dir / path.name
            if right.exists() and (what := compare_checkpoints(path, right)):
                update = update_of(path) - 1
                break
    if update is None:
        return
    before = [result for result in results if result.resumed_from is not None and result.resumed_from <= update]
    for result in before[-1:] or results[:1]:
        result.after, result.problem = what, result.problem or what


def run_corrupted(target: TargetRun, reference: TargetRun, rng: random.Random, say: Say) -> TrialResult:
    """Corrupts the three newest checkpoints of the reference in three ways; a start must resume from the fourth newest."""
    there = complete_checkpoints(reference.output_dir)[:-1]
    if len(there) < 4:
        raise CheckFailed(f"{len(there)} checkpoints are too few to corrupt three and resume from a fourth.")
    for path in there:
        shutil.copytree(path, target.output_dir / path.name)
    shutil.copy(reference.output_dir / "metrics.jsonl", target.output_dir / "metrics.jsonl")
    others = [kind for kind in KINDS if kind != PICKLE]
    kinds, first = [PICKLE, *rng.sample(others, 2)], rng.randrange(3)
    done = [
        corrupt(target.output_dir / path.name, kind, first + number)
        for number, (path, kind) in enumerate(zip(there[-3:], kinds))
    ]
    say(f"Corrupted: {'; '.join(done)}.")
    result = TrialResult("corrupted checkpoints", "the 3 newest")
    started = clock.now()
    target.start(restarts=0)
    result.resumed_from, begun = target.wait_for_first_update(0)
    result.restart_seconds = begun - started
    right = read_manifest(there[-4]).update
    result.lost = read_manifest(there[-1]).update - result.resumed_from
    code = _wait_for_last_end(target)
    named = [path.name for path in there[-3:] if path.name not in target.output.read_text(encoding="utf-8")]
    problems = {
        "a command that was pickled into a checkpoint was executed": (target.output_dir / EXECUTED).exists(),
        f"the run resumed from update {result.resumed_from}, the newest good one is {right}": result.resumed_from
        != right,
        f"the run failed: {target.tail(3)}": code != ExitCode.DONE,
        f"the run did not name {', '.join(named)}": bool(named),
    }
    result.problem = next((text for text, wrong in problems.items() if wrong), "")
    return result

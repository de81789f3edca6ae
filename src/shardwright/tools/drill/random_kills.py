"""A soak test: many random kills of one small run, of any rank or of the launcher, also while ranks load or save."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from shardwright.errors import CheckFailed, ExitCode
from shardwright.measure import clock
from shardwright.tools.drill.compare import compare_checkpoints, compare_metrics
from shardwright.tools.drill.injection import KILL, SAVE_STAGES, at_save_stage
from shardwright.tools.drill.target_run import POLL_SECONDS, TargetRun
from shardwright.units import format_seconds

LAUNCHER_SHARE, LOADING_SHARE, SAVING_SHARE = 0.15, 0.1, 0.3
"""Shares of the kills: of the launcher; while ranks load; at a stage of a save. The others come at any time of training."""
UPDATES_BETWEEN, LOADING_SECONDS, SECONDS_AFTER = 6, 4.0, 0.1
"""A kill comes on average 6 updates after training has begun, plus up to 0.1 s, or up to 4 s after the start of the ranks.

Updates, not seconds: a slow machine would otherwise never reach its next save.
"""
OF_THE_LAUNCHER = "of the launcher"


@dataclass
class KillStatistics:
    """What the kills led to."""

    kills: int = 0
    runs: int = 0
    resumed: int = 0
    """Kills after which the run resumed from its newest checkpoint."""
    lost_checkpoints: int = 0
    problems: list[str] = field(default_factory=list)
    identical: int = 0
    """Runs that ended like the reference."""
    places: Counter[str] = field(default_factory=Counter)
    """Phase, save or launcher -> kills."""
    restart_seconds: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems and not self.lost_checkpoints and self.resumed == self.kills

    def line(self, seconds: float) -> str:
        """`20 kills in 3 runs: 20 of 20 resumed, ...`."""
        places = ", ".join(f"{count} {place}" for place, count in sorted(self.places.items()))
        middle = format_seconds(median(self.restart_seconds)) if self.restart_seconds else "n/a"
        return (
            f"{self.kills} kills ({places}) in {self.runs} runs: {self.resumed} of {self.kills} resumed, "
            f"{self.lost_checkpoints} checkpoints lost, {self.identical} of {self.runs} runs end bit-identical, "
            f"{middle} to train again (median), {format_seconds(seconds)}."
        )


def run_random_kills(
    make: Callable[[str], TargetRun],
    reference: TargetRun,
    kills: int,
    updates: int,
    rng: random.Random,
    say: Callable[[str], None],
) -> KillStatistics:
    """Kills runs until `kills` are done; every run must then end like the reference."""
    found, begun = KillStatistics(), clock.now()
    while found.kills < kills and not found.problems:
        target = make(f"soak-{found.runs}")
        try:
            _one_run(target, found, kills, updates, rng, lambda: say(found.line(clock.now() - begun)))
        finally:
            target.close()
        found.runs += 1
        problem = compare_metrics(target.output_dir, reference.output_dir)[1]
        name = f"checkpoint-{updates}"
        problem = problem or compare_checkpoints(target.output_dir / name, reference.output_dir / name)
        if problem:
            found.problems.append(f"run {found.runs - 1}: {problem}")
        found.identical += not problem
        say(found.line(clock.now() - begun))
    return found


def _one_run(
    target: TargetRun,
    found: KillStatistics,
    kills: int,
    updates: int,
    rng: random.Random,
    say: Callable[[], None],
) -> None:
    target.start()
    start, newest = 0, 0
    while True:
        place = _kill(target, start, updates, rng) if found.kills < kills else None
        killed = clock.now()
        code = target.wait_for_end(start)
        if code == ExitCode.DONE:
            return  # the run was over before the kill
        if place is None:
            raise CheckFailed(f"A start without a kill ended with {code}.", target.tail(20))
        if code is not None and place != OF_THE_LAUNCHER:
            found.problems.append(f"killed {place}, ranks were not started again: the launcher ended with {code}")
        found.kills += 1
        found.places[place] += 1
        before, newest = newest, target.newest()
        found.lost_checkpoints += newest < before
        target.start()
        if newest >= updates:
            found.resumed += 1  # killed after the last save: there is nothing left to train
            while target.wait_for_end(target.starts - 1) is None:
                pass
            return
        first, at = target.wait_for_first_update(start + 1)
        found.restart_seconds.append(at - killed)
        found.resumed += first == newest
        start += 1
        if found.kills % 5 == 0:
            say()


def _kill(target: TargetRun, start: int, updates: int, rng: random.Random) -> str | None:
    """Kills a rank or the launcher at a random time of this start; returns which and where, None where the run was over."""
    for _ in target.polls("ranks to be started"):
        if target.starts > start:
            break
    rank, draw = rng.randrange(target.ranks), rng.random()
    if draw < SAVING_SHARE:
        found = at_save_stage(target, rank, rng.choice(SAVE_STAGES), 0, KILL)
        return "in a save" if found else None
    loading = draw < SAVING_SHARE + LOADING_SHARE
    if not loading:
        update = target.wait_for_first_update(start)[0] + int(rng.expovariate(1 / UPDATES_BETWEEN))
        for _ in target.polls(f"update {update}", POLL_SECONDS):
            if not target.running or ((beat := target.beat(rank, start)) and beat.update >= min(update, updates)):
                break
    clock.sleep(rng.uniform(0.0, LOADING_SECONDS if loading else SECONDS_AFTER))
    beat, process = target.beat(rank, start), target.process_of(rank)
    if process is None:
        return None
    if rng.random() < LAUNCHER_SHARE:
        target.kill_launcher()
        return OF_THE_LAUNCHER
    KILL.inject(process)
    return f"in {beat.phase if beat else 'start'}"

"""Many random kills of one small run: of any rank or of the launcher, at any moment, also while ranks load or save."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from shardwright.errors import CheckFailed, ExitCode
from shardwright.measure import clock
from shardwright.tools.drill.compare import compare_checkpoints, compare_metrics
from shardwright.tools.drill.faults import KILL
from shardwright.tools.drill.moments import STAGES, at_stage
from shardwright.tools.drill.session import POLL_SECONDS, Session
from shardwright.units import format_seconds

LAUNCHER_SHARE, LOADING_SHARE, SAVING_SHARE = 0.15, 0.1, 0.3
OF_THE_LAUNCHER = "of the launcher"
LOADING_SECONDS, UPDATES_BETWEEN, SECONDS_AFTER = 4.0, 6, 0.1
"""Parts of the kills: of the launcher; before training begins; at a stage of a save.

The rest is at any moment, on average 6 updates after training has begun: in updates, since a machine that is slow would
else be killed again and again before its next save.
"""


@dataclass
class Soak:
    """What came of it."""

    kills: int = 0
    runs: int = 0
    resumed: int = 0
    lost_checkpoints: int = 0
    problems: list[str] = field(default_factory=list)
    identical: int = 0
    places: dict[str, int] = field(default_factory=dict)
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


def run_soak(
    make: Callable[[str], Session], reference: Session, kills: int, updates: int, chance: random.Random,
    say: Callable[[str], None],
) -> Soak:  # fmt: skip
    """Kills runs until `kills` are done; every run must then end like the reference."""
    soak, begun = Soak(), clock.now()
    while soak.kills < kills and not soak.problems:
        session = make(f"soak-{soak.runs}")
        try:
            _one_run(session, soak, kills, updates, chance, lambda: say(soak.line(clock.now() - begun)))
        finally:
            session.close()
        soak.runs += 1
        problem = compare_metrics(session.output_dir, reference.output_dir)[1]
        name = f"checkpoint-{updates}"
        problem = problem or compare_checkpoints(session.output_dir / name, reference.output_dir / name)
        if problem:
            soak.problems.append(f"run {soak.runs - 1}: {problem}")
        soak.identical += not problem
        say(soak.line(clock.now() - begun))
    return soak


def _one_run(
    session: Session, soak: Soak, kills: int, updates: int, chance: random.Random, say: Callable[[], None]
) -> None:
    session.start()
    start, newest = 0, 0
    while True:
        place = _kill(session, start, updates, chance) if soak.kills < kills else None
        struck = clock.now()
        code = session.wait_for_end(start)
        if code == ExitCode.DONE:
            return  # it was over before a kill could meet it
        if place is None:
            raise CheckFailed(f"A start that nothing was done to ended with {code}.", session.tail(20))
        if code is not None and place != OF_THE_LAUNCHER:
            soak.problems.append(f"killed {place}, ranks were not started again: the launcher ended with {code}")
        soak.kills += 1
        soak.places[place] = soak.places.get(place, 0) + 1
        before, newest = newest, session.newest()
        soak.lost_checkpoints += newest < before
        session.start()
        if newest >= updates:
            soak.resumed += 1  # killed after the last save: there is nothing left to train
            while session.wait_for_end(session.starts - 1) is None:
                pass
            return
        first, at = session.wait_for_begin(start + 1)
        soak.restart_seconds.append(at - struck)
        soak.resumed += first == newest
        start += 1
        if soak.kills % 5 == 0:
            say()


def _kill(session: Session, start: int, updates: int, chance: random.Random) -> str | None:
    """Kills something at a random moment of this start; returns what and where, None when the run was over before."""
    for _ in session.polls("ranks to be started"):
        if session.starts > start:
            break
    rank, draw = chance.randrange(session.ranks), chance.random()
    if draw < SAVING_SHARE:
        found = at_stage(session, rank, chance.choice(STAGES), 0, KILL)
        return "in a save" if found else None
    loading = draw < SAVING_SHARE + LOADING_SHARE
    if not loading:
        target = session.wait_for_begin(start)[0] + int(chance.expovariate(1 / UPDATES_BETWEEN))
        for _ in session.polls(f"update {target}", POLL_SECONDS):
            if not session.running or ((beat := session.beat(rank, start)) and beat.update >= min(target, updates)):
                break
    clock.sleep(chance.uniform(0.0, LOADING_SECONDS if loading else SECONDS_AFTER))
    beat, process = session.beat(rank, start), session.process_of(rank)
    if process is None:
        return None
    if chance.random() < LAUNCHER_SHARE:
        session.kill_launcher()
        return OF_THE_LAUNCHER
    KILL(process)
    return f"in {beat.phase if beat else 'start'}"

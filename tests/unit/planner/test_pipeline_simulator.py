"""Pipelines by playing their lists, against the published idle times and a longest path. Known-fault row
A80.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shardwright.layout.pipeline_schedules import actions, legality, stage_rank
from shardwright.planner.pipeline_simulator import Played, StageSeconds, play


def run(schedule: str, pp: int, chunks: int, microbatches: int, times: list[StageSeconds], send: float = 0.0) -> Played:
    lists = actions(schedule, pp, chunks, microbatches)  # type: ignore[arg-type]
    return play(lists, lambda stage: stage_rank(schedule, pp, stage), times, send)  # type: ignore[arg-type]


def longest_path(
    schedule: str, pp: int, chunks: int, microbatches: int, times: list[StageSeconds], send: float
) -> float:
    """The end of the last action, by relaxing every edge until nothing moves: order on a rank, and data
    between stages.
    """
    lists = actions(schedule, pp, chunks, microbatches)  # type: ignore[arg-type]
    nodes = [(action.stage, action.kind, action.microbatch) for own in lists for action in own]
    took = {
        node: {"F": times[node[0]].forward, "I": times[node[0]].inputs, "W": times[node[0]].weights}.get(
            node[1], times[node[0]].inputs + times[node[0]].weights
        )
        for node in nodes
    }
    edges = []
    for own in lists:
        edges += [(tuple(a), tuple(b), 0.0) for a, b in pairwise(own)]
    last = len(times) - 1
    for stage, kind, index in nodes:
        for after, kinds in ((stage + 1, "F"), (stage - 1, "BI")):
            if (kind == "F") == (kinds == "F") and kind in "FBI" and 0 <= after <= last:
                hop = send if stage_rank(schedule, pp, after) != stage_rank(schedule, pp, stage) else 0.0  # type: ignore[arg-type]
                edges += [((stage, kind, index), (after, k, index), hop) for k in kinds if (after, k, index) in took]
        if kind == "F" and stage == last:
            edges += [((stage, "F", index), (stage, k, index), 0.0) for k in "BI" if (stage, k, index) in took]
    end = dict(took)
    moved = True
    while moved:
        moved = False
        for a, b, hop in edges:
            # tolerance: times are sums of a few tens of floats near 1
            if end[a] + hop + took[b] > end[b] + 1e-12:
                end[b] = end[a] + hop + took[b]
                moved = True
    return max(end.values())


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_idle_time_of_equal_stages(pp: int, rounds: int) -> None:
    """GPipe and 1F1B: (p - 1)(F + B); interleaved: divided by chunks (Narayanan et al. 2021); ZB1P: (p - 1)(F
    + I - W).
    """
    f, i, w = 1.0, 1.3, 0.7
    for schedule, chunks, idle in (
        ("gpipe", 1, (pp - 1) * (f + i + w)),
        ("1f1b", 1, (pp - 1) * (f + i + w)),
        ("interleaved_1f1b", 2, (pp - 1) * (f + i + w) / 2),
        ("interleaved_1f1b", 4, (pp - 1) * (f + i + w) / 4),
        ("zero_bubble", 1, (pp - 1) * (f + i - w)),
    ):
        times = [StageSeconds(f / chunks, i / chunks, w / chunks)] * (pp * chunks)
        played = run(schedule, pp, chunks, rounds * pp, times)
        assert played.total - max(played.busy) == pytest.approx(idle), schedule
        assert played.busy == pytest.approx([rounds * pp * (f + i + w)] * pp)


def test_fewer_microbatches_than_stages() -> None:
    """A80: 1F1B is refused before anything runs; GPipe runs, and idles as long as with many."""
    assert "at least as many microbatches as stages" in legality("1f1b", 4, 1, 2)
    assert run("gpipe", 4, 1, 2, [StageSeconds(1, 1, 1)] * 4).total == pytest.approx(2 * 3 + 3 * 3)


def test_unequal_stages_and_sends_equal_the_longest_path() -> None:
    dice = random.Random(5)
    for schedule, pp, chunks, microbatches in (
        ("gpipe", 3, 1, 4),
        ("1f1b", 4, 1, 6),
        ("interleaved_1f1b", 2, 3, 4),
        ("interleaved_1f1b", 4, 2, 8),
        ("zero_bubble", 4, 1, 8),
        ("zbv", 3, 2, 7),
    ):
        times = [
            StageSeconds(dice.uniform(0.5, 2), dice.uniform(0.5, 2), dice.uniform(0.5, 2)) for _ in range(pp * chunks)
        ]
        send = dice.uniform(0, 0.3)
        assert run(schedule, pp, chunks, microbatches, times, send).total == pytest.approx(
            longest_path(schedule, pp, chunks, microbatches, times, send)
        ), schedule


def test_lists_that_never_finish_are_refused() -> None:
    lists = actions("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match="never finish"):
        play([lists[0], ()], lambda stage: stage, [StageSeconds(1, 1, 1)] * 2)

"""Pipeline action lists against torch's own, and deadlocks under blocking sends. Known-fault rows: A86."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from shardwright.errors import ConfigError
from shardwright.layout.pipeline_schedules import (
    Action,
    actions,
    communicate,
    deadlock,
    legality,
    rank_stages,
    split_blocks,
    stage_rank,
)

SIZES = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32)]


def torch_order(schedule: str, pp: int, chunks: int, microbatches: int) -> list[list[str]]:
    """torch's pipeline_order as strings, idle slots left out, made without a process group."""
    fake: Any = SimpleNamespace(
        _num_stages=pp,
        _n_microbatches=microbatches,
        pp_group_size=pp,
        n_local_stages=chunks,
        num_stages=pp * chunks,
        number_of_rounds=max(1, microbatches // pp),
    )
    fake.microbatches_per_round = microbatches // fake.number_of_rounds
    if schedule in ("gpipe", "1f1b"):
        kind = torch_schedules.ScheduleGPipe if schedule == "gpipe" else torch_schedules.Schedule1F1B
        order = kind._get_pipeline_order(fake)
        lists = [[str(action) for action in order[rank] if action is not None] for rank in range(pp)]
        return [[action for action in own if "REDUCE" not in action] for own in lists]
    kind = {
        "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
    }[schedule]
    fake.pipeline_order = {rank: kind._calculate_single_rank_operations(fake, rank) for rank in range(pp)}
    if schedule == "zero_bubble":
        fake.pipeline_order = kind._add_bubbles_to_actions(fake, pp * chunks)
    return [[str(action) for action in fake.pipeline_order[rank] if action is not None] for rank in range(pp)]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
    ],
)
def test_the_lists_are_those_of_torch(schedule: Any, chunks: int) -> None:
    """Every rank, for 55 pairs of ranks and microbatches."""
    compared = 0
    for pp, microbatches in SIZES:
        if legality(schedule, pp, chunks, microbatches):
            continue
        ours = [[str(action) for action in own] for own in actions(schedule, pp, chunks, microbatches)]
        theirs = torch_order(schedule, pp, chunks, microbatches)
        if schedule == "1f1b":
            # The list that torch only displays counts the last rank's forwards from 1; what it runs starts at 0.
            theirs[-1] = [f"{pp - 1}{kind}{index}" for index in range(microbatches) for kind in "FB"]
        assert ours == theirs, (pp, microbatches)
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
    ],
)
def test_no_schedule_deadlocks_when_sends_block(schedule: Any, chunks: int) -> None:
    """A86: with sends that wait for their receive, every list runs to its end and every send has its receive."""
    for pp, microbatches in SIZES:
        if legality(schedule, pp, chunks, microbatches):
            continue
        rank_of = partial(stage_rank, schedule, pp)
        lists = communicate(actions(schedule, pp, chunks, microbatches), rank_of, pp * chunks)
        assert deadlock(lists, rank_of) == ""
        sends = sum(action.kind.startswith("SEND") for own in lists for action in own)
        crossing = sum(rank_of(stage) != rank_of(stage + 1) for stage in range(pp * chunks - 1))
        assert (
            sends
            == sum(action.kind.startswith("RECV") for own in lists for action in own)
            == 2 * crossing * microbatches
        )


def test_the_checker_finds_a_deadlock() -> None:
    """A86: 1F1B with each receive just before its use and each send just after its product stops for ever."""
    rank_of = partial(stage_rank, "1f1b", 2)
    naive = []
    for rank, own in enumerate(actions("1f1b", 2, 1, 4)):
        mine = []
        for action in own:
            receives, sends = ("RECV_F", "SEND_B") if rank else ("RECV_B", "SEND_F")
            takes = action.kind == ("F" if rank else "B")
            mine += [Action(rank, receives, action.microbatch)] * takes + [action]
            mine += [Action(rank, sends, action.microbatch)] * (not takes)
        naive.append(mine)
    assert deadlock(naive, rank_of) == "rank 0 waits at 0SEND_F1; rank 1 waits at 1SEND_B0"


def test_lists_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="1f1b needs at least as many microbatches as stages: 2 < 4"):
        actions("1f1b", 4, 1, 2)
    with pytest.raises(ConfigError, match="not a multiple of the 2 rounds"):
        actions("interleaved_1f1b", 4, 2, 9)
    assert rank_stages("zbv", 4, 2, 1) == (1, 6)
    assert rank_stages("interleaved_1f1b", 4, 3, 1) == (1, 5, 9)


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 130), stages=st.integers(1, 16), head=st.sampled_from([0.0, 1.0, 1.4, 2.5]))
def test_blocks_are_split_so_that_no_stage_could_be_lighter(layers: int, stages: int, head: float) -> None:
    if layers < stages:
        return
    counts = split_blocks(layers, stages, head)
    assert sum(counts) == layers and min(counts) >= 1
    heaviest = max(count + head * (stage == stages - 1) for stage, count in enumerate(counts))
    # The lightest possible heaviest stage, by trying every number of blocks on the last one.
    best = min(
        max(last + head, -(-(layers - last) // max(stages - 1, 1))) if stages > 1 else layers + head
        for last in range(1, layers - stages + 2)
    )
    assert heaviest == pytest.approx(best)
    if layers % stages == 0 and head <= 1:
        assert len(set(counts)) == 1

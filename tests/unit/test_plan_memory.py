"""Peak memory: closed form against timeline, papers, and measurements on this machine.

Known-fault rows: A108, A110, A112, A114.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.arch import generic_shape
from shardwright.arch.known import known_shape
from shardwright.layout.axes import Axes
from shardwright.layout.schedule import legality
from shardwright.plan.job import Job, Layout
from shardwright.plan.memory import peak
from shardwright.plan.peak import peak_bytes
from shardwright.plan.program import PROGRAMS

SHAPES = [
    generic_shape(layers=24, hidden=64, heads=4, vocab=1000, learned_positions=32),
    known_shape("llama-3.2-1b"),
    known_shape("qwen2.5-7b"),
]


@st.composite
def cases(draw: Any) -> tuple[Job, Layout, str]:
    shape = draw(st.sampled_from(SHAPES))
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    schedule = (
        draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])) if pp > 1 else None
    )
    chunks = {"zbv": 2, "interleaved_1f1b": draw(st.sampled_from([2, 3]))}.get(schedule, 1)
    axes = Axes(
        pp=pp,
        dp_replicate=draw(st.sampled_from([1, 2])),
        dp_shard=draw(st.sampled_from([1, 2, 3, 16])),
        cp=draw(st.sampled_from([1, 2])),
        tp=draw(st.sampled_from([1, 2])),
    )
    microbatches = draw(st.integers(1, 30))
    rows = draw(st.sampled_from([1, 3]))
    job = Job(
        shape,
        max_length=draw(st.sampled_from([33, 4096])),
        global_batch_size=microbatches * rows * axes.data_ranks,
        param_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        reduce_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["flash", "eager"])),
        loss=draw(st.sampled_from(["full", "chunked"])),
    )
    layout = Layout(
        axes,
        data_parallel=draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3"])),
        microbatch_rows=rows,
        schedule=schedule,
        chunks=chunks,
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        reshard_after_forward=draw(st.sampled_from([True, False, 2])),
        prefetch=draw(st.sampled_from([0, 1, 3])),
        unit=draw(st.sampled_from(["block", "root", 2])),
        offload=draw(st.sampled_from(["none", "none", "params"])),
    )
    return job, layout, draw(st.sampled_from(sorted(PROGRAMS)))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_closed_form_is_the_maximum_of_the_timeline(case: tuple[Job, Layout, str]) -> None:
    """On random models, layouts, schedules and programs; the timeline walks every block of every microbatch."""
    job, layout, program = case
    schedule = layout.schedule
    if schedule and legality(schedule, layout.axes.pp, layout.chunks, layout.microbatches(job)):
        return
    walked = peak(job, layout, PROGRAMS[program])
    assert peak_bytes(job, layout, PROGRAMS[program]) == pytest.approx((walked.allocated, walked.reserved))

"""Peak memory: closed form against timeline, papers, and measurements on this machine.

Known-fault rows: A108, A110, A112, A114.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.places import ROOT

from shardwright.arch.known_models import known_shape
from shardwright.arch.parameters import matrix_weights, named_sizes
from shardwright.arch.shape import generic_shape
from shardwright.layout.axes import Axes
from shardwright.layout.pipeline_schedules import legality
from shardwright.layout.zero import STAGES
from shardwright.planner.activations import loss_bytes
from shardwright.planner.host import host_bytes, pinned_bytes
from shardwright.planner.memory_peak import PeakMemory, short_peak
from shardwright.planner.memory_timeline import PARTS, peak, timeline
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.rank_bytes import blocks_per_stage

sys.path.insert(0, str(ROOT / "benchmarks"))

from published_programs import PROGRAMS

SHAPES = [
    generic_shape(layers=12, hidden=64, heads=4, vocab=1000, learned_positions=32),
    replace(known_shape("llama-3.2-1b"), layers=13),
    replace(known_shape("qwen2.5-7b"), layers=17),
]


@st.composite
def cases(draw: Any) -> tuple[Problem, Layout]:
    shape = draw(st.sampled_from(SHAPES))
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])) if pp > 1 else None
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
    problem = Problem(
        shape,
        max_length=draw(st.sampled_from([33, 4096])),
        global_batch_size=microbatches * rows * axes.data_ranks,
        param_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        reduce_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["flash", "eager"])),
        loss=draw(st.sampled_from(["full", "chunked", "auto"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "muon"])),
        program=draw(st.sampled_from([*PROGRAMS.values()])),
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
    return problem, layout


@settings(max_examples=120, deadline=None)
@given(cases())
def test_the_closed_form_is_the_maximum_of_the_timeline(case: tuple[Problem, Layout]) -> None:
    """On random models, layouts, schedules and programs; the timeline walks every block of every microbatch."""
    problem, layout = case
    schedule = layout.schedule
    if schedule and legality(schedule, layout.axes.pp, layout.chunks, layout.microbatches(problem)):
        return
    walked = peak(problem, layout)
    assert PeakMemory(problem).peak_bytes(layout) == pytest.approx((walked.allocated, walked.reserved))
    short = short_peak(problem, layout)
    assert (short.allocated, short.reserved) == pytest.approx((walked.allocated, walked.reserved))


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    """A108: blocks of 5, 9 and 17 MiB take 8, 16 and 32; every offloaded shard and gradient is rounded for itself."""
    mib = 2**20
    assert [pinned_bytes(size * mib) // mib for size in (5, 9, 17, 16)] == [8, 16, 32, 16]
    problem = Problem(generic_shape(layers=2, hidden=48, heads=4, vocab=100), 32, 2)
    host = host_bytes(problem, Layout(Axes(dp_shard=2), "zero3", offload="params"))
    sizes = {"whole": [], "pinned": []}  # type: ignore[var-annotated]
    for name, size in named_sizes(problem.shape).items():
        shard = math.ceil(size[0] / 2) * math.prod(size[1:]) * 4
        sizes["whole"].append(2 * shard)
        sizes["pinned"].append(2 * 2 ** math.ceil(math.log2(shard)))
        assert name
    assert host.pinned == sum(sizes["pinned"]) > 1.2 * sum(sizes["whole"])
    assert host.pageable == sum(sizes["whole"])
    assert host_bytes(problem, Layout(Axes(dp_shard=2), "zero3")).pinned == 0


@pytest.mark.parametrize(
    ("kind", "axes", "copies"),
    [
        ("zero3", Axes(dp_shard=2), 3),
        ("zero2", Axes(dp_shard=2), 3),
        ("zero1", Axes(dp_shard=2), 2),
        ("zero3", Axes(dp_shard=2, dp_replicate=2), 2),
    ],
)
def test_gradients_of_microbatches_are_summed_on_the_host(kind: Any, axes: Axes, copies: int) -> None:
    """Pinned are parameters and gradients, and a sum where each microbatch brings gradients to the host."""
    problem = Problem(generic_shape(layers=2, hidden=48, heads=4, vocab=100), 32, 32)
    once = host_bytes(replace(problem, global_batch_size=axes.data_ranks), Layout(axes, kind, offload="params"))
    assert host_bytes(problem, Layout(axes, kind, offload="params")).pinned == once.pinned * copies // 2


SMALL = generic_shape(layers=4, hidden=64, heads=4, vocab=64, tied=False, biases=False)


def at_step(kind: Any, microbatches: int) -> dict[str, float]:
    """Most bytes of each part over one update of a small model on two ranks."""
    problem = Problem(SMALL, 16, 2 * microbatches, "fp32", "fp32")
    most: dict[str, float] = {}
    for moment in timeline(problem, Layout(Axes(dp_shard=2), kind)):
        for part, size in zip(PARTS, moment.alive):
            most[part] = max(most.get(part, 0.0), size)
    return most


def test_gradients_stay_whole_while_their_reduction_is_put_off() -> None:
    """A112: two microbatches on two ranks. zero1 holds whole gradients until the last one, zero2 only shards and one unit."""
    whole = 4 * sum(math.prod(size) for size in named_sizes(SMALL).values())
    late, early = at_step("zero1", 2), at_step("zero2", 2)
    assert late["unreduced gradients"] >= whole
    assert early["unreduced gradients"] == 2 * 4 * (3 * 64 * 64 + 64 * 64 + 8 * 64 * 64 + 2 * 64)
    assert early["gradients"] == late["gradients"] == whole / 2
    assert at_step("zero1", 1) == at_step("zero2", 1)


def test_the_peak_is_a_maximum_over_phases() -> None:
    """A114: full recomputation frees most activations, but the peak falls by less, because it moves to another phase."""
    shape = generic_shape(layers=32, hidden=4096, heads=32, vocab=30000, ffn=16384, tied=False)
    problem = Problem(shape, 2048, 64)
    plain = peak(problem, Layout(Axes(dp_shard=8), "zero3", 4))
    full = peak(problem, Layout(Axes(dp_shard=8), "zero3", 4, recompute="full"))
    freed = plain.composition["activations"] - full.composition.get("activations", 0.0)
    assert plain.moment == "loss of microbatch 1"
    assert full.moment == "backward of microbatch 1, block 31"
    assert 0 < plain.allocated - full.allocated < freed - 0.3e9
    walked = list(timeline(problem, Layout(Axes(dp_shard=8), "zero3", 4, recompute="full")))
    assert max(moment.total for moment in walked) == full.allocated
    assert sum(max(moment.alive[part] for moment in walked) for part in range(len(PARTS))) > 1.02 * full.allocated


def test_stages_are_cut_where_the_runtime_cuts() -> None:
    """A head of 6.7 blocks: 10 blocks on 2 stages are 8 and 2; tied or not (see `parallel/pipeline/test_stages.py`)."""
    sizes = {"layers": 10, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vocab": 1600, "gated": True}
    for tied in (True, False):
        shape = generic_shape(**sizes, tied=tied, biases=False)
        assert matrix_weights(shape) == (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48, 1600 * 32)
        assert blocks_per_stage(shape, 2) == (8, 2)


def test_root_and_ends_are_gathered_once_for_each_microbatch() -> None:
    """zero3 drops a unit after forward and gathers it again for backward, but not root and ends: 4 gathers, not 8."""
    assert (STAGES["zero3"].gathers(4), STAGES["zero3"].gathers(4, once=True)) == (8, 4)
    assert STAGES["zero1"].gathers(4, once=True) == STAGES["zero2"].gathers(4, once=True) == 1


def test_a_loss_in_chunks_keeps_gradients_and_one_chunk() -> None:
    """Vocabulary 128,000 and 8,192 tokens of width 512 in bf16: 1,024 tokens a chunk, gradients of states and head kept."""
    shape = replace(known_shape("llama-3-8b"), hidden=512, vocab=128_000)
    for loss, layout in (("auto", Layout()), ("chunked", Layout())):
        problem = Problem(shape, 8_192, 8, loss=loss)  # type: ignore[arg-type]
        kept = 8_192 * 512 * 2 + 128_000 * 512 * 4
        chunk = 1_024 * 128_000 * (2 + 4 + 2)  # 512 MiB of fp32 logits, in steps of 64 tokens: 1,024
        assert loss_bytes(problem, layout) == (kept + chunk, kept, kept + 128_000 * 512 * 2)
    assert loss_bytes(Problem(shape, 512, 8, loss="auto"), Layout()) == loss_bytes(Problem(shape, 512, 8), Layout())


def test_chunks_of_the_loss_are_as_large_as_the_device_likes() -> None:
    """64 MiB of fp32 logits on a CPU, 512 on a GPU: 131,072 entries make chunks of 128 and 1,024 tokens."""
    shape = replace(known_shape("llama-3-8b"), vocab=131072)
    layout = Layout(Axes(), "ddp", 1)
    gpu = loss_bytes(Problem(shape, 8192, 1, param_dtype="fp32", loss="auto"), layout)
    cpu = loss_bytes(Problem(shape, 8192, 1, param_dtype="fp32", loss="auto", device_kind="cpu"), layout)
    assert gpu[0] - cpu[0] == (1024 - 128) * shape.vocab * (4 + 4 + 4)
    assert gpu[1:] == cpu[1:]

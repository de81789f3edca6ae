"""What each rank sends: two units against three, per axis, against arithmetic by hand. Known-fault rows: none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.arch.known_models import known_shape
from shardwright.arch.shape import generic_shape
from shardwright.layout.axes import Axes
from shardwright.layout.pipeline_schedules import actions, communicate, stage_rank
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.traffic import sent_by_axis, traffic

SHAPE = known_shape("llama-3-8b")
PARAMETERS = 8_030_261_248
ENDS = 2 * 128_256 * 4096 + 4096
"""Of them in embedding, final norm and head."""


@pytest.mark.parametrize(("kind", "units"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_three_units_against_two(kind: str, units: int) -> None:
    """One microbatch: each rank sends `units` x (N - 1) / N of the parameters, of the ends 2, at one dtype for all."""
    problem = Problem(SHAPE, 4096, 8, "bf16", "bf16")
    sent = sent_by_axis(traffic(problem, Layout(Axes(dp_shard=8), kind)))  # type: ignore[arg-type]
    assert sum(sent.values()) == pytest.approx(7 / 8 * 2 * (units * (PARAMETERS - ENDS) + 2 * ENDS))


def test_accumulation_costs_what_each_stage_says() -> None:
    """Four microbatches: zero1 gathers and reduces once, zero2 reduces four times, zero3 gathers eight times (ends: four)."""
    problem = Problem(SHAPE, 4096, 32, "bf16", "fp32")
    for kind, gathers, of_ends, reductions in (("zero1", 1, 1, 1), ("zero2", 1, 1, 4), ("zero3", 8, 4, 4)):
        layout = Layout(Axes(dp_shard=8), kind)  # type: ignore[arg-type]
        sent = sent_by_axis(traffic(problem, layout))["dp_shard"]
        gathered = gathers * (PARAMETERS - ENDS) + of_ends * ENDS
        assert sent == pytest.approx(7 / 8 * (2 * gathered + 4 * reductions * PARAMETERS))
    once = Layout(Axes(dp_shard=8), "zero3", reshard_after_forward=False)
    assert sent_by_axis(traffic(problem, once))["dp_shard"] == pytest.approx(7 / 8 * PARAMETERS * (2 * 4 + 4 * 4))


def test_a_hybrid_sends_shards_between_replicas() -> None:
    problem = Problem(SHAPE, 4096, 8, "bf16", "fp32")
    sent = sent_by_axis(traffic(problem, Layout(Axes(dp_replicate=2, dp_shard=4), "zero3")))
    assert sent["dp_shard"] == pytest.approx(3 / 4 * (PARAMETERS * (2 + 2 + 4) - ENDS * 2))
    assert sent["dp_replicate"] == pytest.approx(2 * 1 / 2 * 4 * PARAMETERS / 4)


def test_an_embedding_kept_on_fewer_ranks_is_gathered_there() -> None:
    """A number for `reshard_after_forward`: everything is gathered over all ranks once, and all but the head over 2 of them."""
    problem, layout = Problem(SHAPE, 4096, 8, "bf16", "fp32"), Layout(Axes(dp_shard=8), reshard_after_forward=2)
    sent = sent_by_axis(traffic(problem, layout))["dp_shard"]
    again = PARAMETERS - 128_256 * 4096 - 4096
    assert sent == pytest.approx(7 / 8 * PARAMETERS * (2 + 4) + 1 / 2 * 2 * again)


def test_tensor_parallel_as_our_engine_sends_it() -> None:
    """Llama 3 8B, tp 4, one row of 4096 in bf16: payloads by hand. 65 norms of 4096 in fp32 minus the final one are partial."""
    problem, layout = Problem(SHAPE, 4096, 1), Layout(Axes(tp=4), "ddp")
    hidden = 4096 * 4096 * 2
    found = {(t.collective, t.what): (t.count, t.payload_bytes) for t in traffic(problem, layout)}
    assert found == {
        ("all-gather", "activations"): (4 * 32, hidden),
        ("reduce-scatter", "activations"): (4 * 32, hidden),
        ("all-reduce", "embedding"): (1, hidden),
        ("all-gather", "ends of the blocks"): (2, hidden),
        ("all-reduce", "gradient of the head's input"): (1, hidden),
        ("all-reduce", "largest logits"): (1, 4096 * 4),
        ("all-reduce", "sums of the loss"): (1, 2 * 4096 * 4),
        ("all-reduce", "partial gradients"): (1, 64 * 4096 * 4),
    }
    whole = traffic(problem, replace(layout, sequence_parallel=False, recompute="full"))
    found = {(t.collective, t.what): (t.count, t.payload_bytes) for t in whole}
    assert found["all-reduce", "activations"] == (5 * 32, hidden)
    assert ("all-reduce", "partial gradients") not in found


def test_pieces_of_sequences_travel_between_stages() -> None:
    """The head weighs 2.4 blocks: 17 and 15 blocks. With sequence parallelism a stage sends a quarter."""
    problem, layout = Problem(SHAPE, 4096, 8), Layout(Axes(pp=2, tp=4), "ddp", schedule="1f1b")
    for sequence, part in ((True, 4), (False, 1)):
        found = traffic(problem, replace(layout, sequence_parallel=sequence), 1)
        sends = [t for t in found if t.axis == "pp"]
        assert [(t.what, t.count, t.payload_bytes) for t in sends] == [
            ("gradients of activations", 8, 4096 * 4096 * 2 // part)
        ]
    inside = next(t for t in traffic(problem, layout, 1) if t.what == "activations" and t.axis == "tp")
    assert inside.count == 4 * 15 * 8


def test_context_parallel_gathers_keys_and_values() -> None:
    problem = Problem(SHAPE, 131072, 1)
    found = traffic(problem, Layout(Axes(cp=8), "ddp"))
    assert {t.axis for t in found} == {"cp"}  # ddp's all-reduce too: context-parallel ranks are all its replicas
    exchanged = sum(t.sent_bytes for t in found if t.what.endswith("keys and values"))
    assert exchanged == 32 * 2 * 7 / 8 * 131072 * 2 * 1024 * 2


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_pipeline_sends_are_those_of_the_action_lists(schedule: str, chunks: int) -> None:
    shape = generic_shape(layers=24, hidden=64, heads=4, vocab=1000, tied=False)
    problem = Problem(shape, 128, 8)
    lists = communicate(actions(schedule, 4, chunks, 8), lambda s: stage_rank(schedule, 4, s), 4 * chunks)  # type: ignore[arg-type]
    for rank, own in enumerate(lists):
        sends = sum(action.kind.startswith("SEND") for action in own)
        layout = Layout(Axes(pp=4), "ddp", 1, schedule, chunks)  # type: ignore[arg-type]
        assert sent_by_axis(traffic(problem, layout, rank))["pp"] == sends * 128 * 64 * 2

"""Step time: laws of the kernels by hand, closed form against played pipelines, limits that must hold.
Known-fault row A119.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwright.arch.flops import attention_forward_flops, model_flops, utilisation
from shardwright.arch.parameters import counts
from shardwright.arch.shape import generic_shape
from shardwright.layout.axes import Axes
from shardwright.layout.pipeline_schedules import legality, split_blocks
from shardwright.planner.device import Device
from shardwright.planner.hardware import find_device
from shardwright.planner.kernels import attention_seconds, block_time, matmul_seconds
from shardwright.planner.network import RankGroup, gather_seconds
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.program import Program
from shardwright.planner.step_time import Clock, StepTime

H100 = find_device("h100-sxm-80gb")
IDEAL = Program(
    "ideal",
    bucket_bytes=None,
    reduces_units=False,
    host_forward=0,
    host_backward=0,
    host_tensor_parallel=0,
    hidden_passes=0,
    mlp_passes=0,
    logits_bytes=0,
    accumulate_bytes=0,
    overlap_slowdown=0,
    pipeline_seconds=0,
    update_seconds=0,
)
SHAPE = generic_shape(layers=32, hidden=4096, heads=32, vocab=1024, ffn=16384, biases=False)


def ideal_device() -> Device:
    """An H100 whose products run at the peak, whatever their size, and whose links take no time."""
    e = replace(
        H100.efficiency,
        matmul=1.0,
        wave=0.0,
        depth=0.0,
        attention_forward=1e9,
        attention_backward=1e9,
        bandwidth=1e9,
    )
    node = replace(H100.node, link_bandwidth=1e30, network_bandwidth=1e30, link_latency=0.0, network_latency=0.0)
    return replace(H100, efficiency=e, node=node)


def time_of(
    layout: Layout, batch: int, *, device: Device = H100, program: Program = IDEAL, length: int = 4096
) -> StepTime:
    problem = Problem(SHAPE, length, batch)
    blocks = split_blocks(SHAPE.layers, layout.axes.pp * layout.chunks)
    return Clock(replace(problem, device=device, program=program)).step(layout, blocks)


def test_product_law() -> None:
    e = H100.efficiency
    m, n, k = 4096, 8192, 2048
    rate = 989.4e12 * e.matmul * (m * n / (m * n + e.wave)) * (k / (k + e.depth))
    assert matmul_seconds(H100, m, n, k, "bf16") == pytest.approx(2 * m * n * k / rate)
    # One row is read from memory: K x N weights of two bytes at the fitted share of 3.35 TB/s.
    assert matmul_seconds(H100, 1, 4096, 4096, "bf16") >= 4096 * 4096 * 2 / (3.35e12 * e.bandwidth)


def test_flash_attention_law() -> None:
    e = H100.efficiency
    forward, backward = attention_seconds(H100, 2, 4096, 4096, 32, 128, "bf16", "flash")
    flops = 4 * 2 * 32 * 128 * 4096 * 4096 / 2  # causal: half of both products
    shape = 4096 / (4096 + e.attention_ramp)
    assert forward == pytest.approx(flops / (989.4e12 * e.attention_forward * shape))
    assert backward == pytest.approx(2.5 * flops / (989.4e12 * e.attention_backward * shape))


def test_ideal_device_reaches_the_peak() -> None:
    """With every overhead off, one rank takes exactly FLOPs / peak; attention is switched off by its rate."""
    t = time_of(Layout(Axes(), "ddp", 2), 8, device=ideal_device())
    flops = (model_flops(SHAPE, 4096).blocks + model_flops(SHAPE, 4096).head) * 8 * 4096
    assert t.total == pytest.approx(flops / 989.4e12)


def test_a119_mfu_does_not_change_when_devices_and_tokens_double() -> None:
    """A119: the denominator is devices x peak."""
    flops = model_flops(SHAPE, 4096).total
    one = utilisation(flops, 1000.0, 8, 989e12)
    assert utilisation(flops, 2000.0, 16, 989e12) == pytest.approx(one) == pytest.approx(flops * 1000 / (8 * 989e12))


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_ideal_data_parallel_divides_the_time(kind: str) -> None:
    one = time_of(Layout(Axes(), "ddp", 1), 64, device=ideal_device()).total
    eight = time_of(Layout(Axes(dp_shard=8), kind, 1), 64, device=ideal_device()).total  # type: ignore[arg-type]
    assert eight == pytest.approx(one / 8)


def test_ideal_tensor_and_context_parallel_divide_the_blocks_time() -> None:
    device = ideal_device()
    one = time_of(Layout(Axes(), "ddp", 1), 8, device=device)
    assert time_of(Layout(Axes(tp=4), "ddp", 1), 8, device=device).total == pytest.approx(one.total / 4)
    assert time_of(Layout(Axes(cp=4), "ddp", 1), 8, device=device).total == pytest.approx(one.total / 4)


def test_full_recomputation_adds_one_forward() -> None:
    plain = time_of(Layout(Axes(), "ddp", 1), 8, device=ideal_device())
    full = time_of(Layout(Axes(), "ddp", 1, recompute="full"), 8, device=ideal_device())
    assert full.recompute == pytest.approx(model_flops(SHAPE, 4096).blocks / 3 * 8 * 4096 / 989.4e12)
    assert full.total - plain.total == pytest.approx(full.recompute)


def test_zero3_exposes_what_does_not_fit_under_compute() -> None:
    """Prefetch hides a block's gather under the block before, and none without it. The ends are always exposed:
    embedding and head, the first gather of a pass, and what leaves last.
    """
    problem, shard = Problem(SHAPE, 512, 8), RankGroup(8, 8)
    block = counts(SHAPE).block * 2.0
    gather, reduce = gather_seconds(H100, shard, block), gather_seconds(H100, shard, 2 * block)
    b = block_time(H100, IDEAL, SHAPE, 1, 512, 1, 1, False, "none", "flash", "bf16", 512)
    edge = counts(SHAPE).embedding + counts(SHAPE).final_norm
    ends = gather_seconds(H100, shard, edge * 2.0) + gather_seconds(H100, shard, edge * 4.0)
    clock = Clock(replace(problem, device=H100, program=IDEAL))
    layout = Layout(Axes(dp_shard=8), "zero3", 1, sequence_parallel=False)
    hidden = clock.step(layout, (32,)).gathers
    assert hidden == pytest.approx(
        31 * (max(gather - b.forward, 0) + max(gather + reduce - b.backward, 0)) + 2 * gather + reduce + ends
    )
    assert hidden > ends
    bare = clock.step(replace(layout, prefetch=0), (32,)).gathers
    assert bare == pytest.approx(32 * (2 * gather + reduce) + ends)
    kept = clock.step(replace(layout, prefetch=0, reshard_after_forward=False), (32,)).gathers
    assert bare - kept == pytest.approx(32 * gather)


def test_ddp_exposes_what_does_not_fit_under_the_last_backward() -> None:
    problem = Problem(SHAPE, 4096, 64)
    clock = Clock(replace(problem, device=H100, program=IDEAL))
    few = clock.step(Layout(Axes(dp_shard=64), "ddp", 1), (32,))
    whole = clock.step(Layout(Axes(dp_shard=8), "ddp", 1), (32,))
    assert few.reduction > 0 and whole.reduction > 0
    late = Clock(replace(problem, device=H100, program=replace(IDEAL, overlap_data_parallel=False))).step(
        Layout(Axes(dp_shard=8), "ddp", 1), (32,)
    )
    volume = counts(SHAPE).total * 4.0
    assert late.reduction == pytest.approx(2 * gather_seconds(H100, RankGroup(8, 8), volume))


def test_host_time_is_a_floor() -> None:
    slow = replace(IDEAL, host_forward=1.0, host_backward=2.0)
    t = time_of(Layout(Axes(), "ddp", 1), 4, program=slow)
    # tolerance: latencies are left out
    assert t.total == pytest.approx(4 * (32 * 3.0 + 0.5 + 1.0), rel=1e-3)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks", "tolerance"),
    [
        ("gpipe", 1, 0.01),
        ("1f1b", 1, 0.01),
        ("interleaved_1f1b", 2, 0.02),
        ("interleaved_1f1b", 4, 0.02),
        ("zero_bubble", 1, 0.01),
        ("zbv", 2, 0.03),
    ],
)
def test_closed_form_equals_the_played_pipeline_for_equal_stages(
    pp: int, schedule: str, chunks: int, tolerance: float
) -> None:
    """Every combination, none drawn by chance. Embedding and head make the end stages a little heavier, also without a
    vocabulary: their collectives remain. zbv's closed form is exact where forward, input and weight gradients take equal
    times.
    """
    shape = replace(SHAPE, vocab=8)  # embedding and head too small to make the end stages heavier
    program = replace(IDEAL, hidden_passes=20)
    blocks = split_blocks(32, pp * chunks, 0.0)
    kinds = ("ddp",) if schedule in ("zero_bubble", "zbv") else ("ddp", "zero1", "zero2", "zero3")
    for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 14, 15, 16, 24):
        if legality(schedule, pp, chunks, microbatches):  # type: ignore[arg-type]
            continue
        clock = Clock(replace(Problem(shape, 2048, 2 * microbatches), device=H100, program=program))
        for tp, kind in product((1, 2, 4), kinds):
            layout = Layout(Axes(pp=pp, dp_shard=2, tp=tp), kind, 1, schedule, chunks)  # type: ignore[arg-type]
            closed, played = clock.step(layout, blocks), clock.timed(layout, blocks)
            assert closed.total == pytest.approx(played.total, rel=tolerance), (microbatches, tp, kind)
            assert closed[:5] == played[:5]


def test_offload_pays_for_every_gather() -> None:
    problem = Problem(SHAPE, 4096, 16)
    clock = Clock(replace(problem, device=H100, program=IDEAL))
    on = clock.step(Layout(Axes(dp_shard=2), "zero3", 1, prefetch=0, offload="params"), (32,))
    off = clock.step(Layout(Axes(dp_shard=2), "zero3", 1, prefetch=0), (32,))
    moved = 8 * counts(SHAPE).total * (2 + 4) + 8 * 32 * counts(SHAPE).block * 2
    # tolerance: latencies are left out
    assert on.gathers - off.gathers == pytest.approx(moved / 2 / H100.host_bandwidth, rel=0.01)
    assert on.optimizer > off.optimizer


def test_attention_of_packed_rows_works_within_documents() -> None:
    """Rows of 4,096 in documents of 512: an eighth of the attention, all else as before; FLOPs of MFU likewise."""
    layout = Layout(Axes(), "ddp", 1)
    rows, documents = Problem(SHAPE, 4096, 8), Problem(SHAPE, 4096, 8, document_length=512)
    device = ideal_device()
    device = replace(device, efficiency=replace(device.efficiency, attention_forward=1.0, attention_backward=1.0))
    whole, packed = (
        Clock(replace(problem, device=device, program=IDEAL)).step(layout, (32,)) for problem in (rows, documents)
    )
    flops = attention_forward_flops(SHAPE, 4096, causal=True) * 4096
    one = flops / 989.4e12 * (1 + 2.5)  # flash makes the scores again in its backward pass
    assert whole.compute - packed.compute == pytest.approx(8 * one * (1 - 512 / 4096))
    assert whole._replace(compute=0) == packed._replace(compute=0)
    assert Problem(SHAPE, 4096, 8, document_length=9000).attended == rows.attended == 4096

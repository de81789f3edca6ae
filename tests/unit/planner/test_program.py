"""What our own runs add to the planner's times: gathers in order, what a transfer takes from a core, narrow elements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.arch.known_models import known_shape
from shardwright.layout.axes import Axes
from shardwright.planner.activations import in_chunks
from shardwright.planner.device import Device
from shardwright.planner.hardware import find_device
from shardwright.planner.kernels import attention_seconds, block_time, matmul_seconds
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.program import COMPILED, EAGER, ON_CPU, own_program
from shardwright.planner.step_time import Clock, StepTime
from shardwright.tools.doctor.fit import Block, Products, Transfer, fit_link
from shardwright.tools.doctor.hardware_file import in_a_step

CPU, H100 = find_device("cpu"), find_device("h100-sxm-80gb")
PROBLEM = Problem(known_shape("llama-3.2-1b"), 1024, 16)


def step(device: Device, kind: str, **changes: object) -> StepTime:
    layout = Layout(Axes(dp_shard=8), kind, 1)  # type: ignore[arg-type]
    clock = Clock(replace(PROBLEM, device=device, program=replace(EAGER, **changes)))  # type: ignore[arg-type]
    return clock.step(layout, (PROBLEM.shape.layers,))


def test_each_kind_of_device_has_its_own() -> None:
    assert own_program("cuda", False) is EAGER and own_program("cuda", True) is COMPILED
    assert own_program("cpu", False) is ON_CPU
    assert own_program("cpu", True).hidden_passes < ON_CPU.hidden_passes


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_gathers_in_order_hide_under_forward(kind: str) -> None:
    """All at once takes the whole gather; in order the first unit and the ends are left, and what transfers cost beside."""
    at_once = step(H100, kind, units_in_order=False).reduction
    in_order = step(H100, kind).reduction
    assert 0 < in_order < at_once
    free = step(H100, kind, overlap_slowdown=0.0).reduction
    assert free < in_order


def test_a_measured_load_stands_for_what_the_program_assumes() -> None:
    """`transfer_load` of the hardware file, where network cards do not do the work."""
    loaded = replace(H100, node=replace(H100.node, transfer_load=0.9))
    slowdown = {device.node: Clock(replace(PROBLEM, device=device)).slowdown for device in (loaded, H100)}
    assert slowdown == {loaded.node: 0.9, H100.node: 0.2}
    assert step(loaded, "zero3").gathers > step(H100, "zero3").gathers


def test_copies_of_the_computing_core_count() -> None:
    more = step(H100, "zero3", gather_passes=2.0, reduce_passes=3.0).gathers - step(H100, "zero3").gathers
    parameters = 1.2e9
    speed = H100.memory_bandwidth * H100.efficiency.bandwidth
    a_microbatch = parameters * (2 * 2.0 * 2 + 3.0 * 4) / speed  # two gathers in bf16, one reduction in fp32
    # tolerance: the fit of a line, to a twentieth
    assert more == pytest.approx(2 * a_microbatch, rel=0.05)


@pytest.mark.parametrize(
    ("packed", "device", "dtype", "chunked"),
    [
        (True, "cpu", "fp32", True),
        (False, "cpu", "fp32", False),
        (True, "cpu", "bf16", True),
        (True, "cuda", "fp32", False),
    ],
)
def test_packed_rows_on_a_cpu_have_the_loss_in_chunks(packed: bool, device: str, dtype: str, chunked: bool) -> None:
    """However few the logits, where runs do it (`layout/loss.py`)."""
    problem = replace(PROBLEM, max_length=8, packed=packed, device_kind=device, param_dtype=dtype, loss="auto")
    assert in_chunks(problem, Layout(Axes(), "ddp", 1)) == chunked


def test_narrow_elements_and_products() -> None:
    shape = PROBLEM.shape
    times = {
        dtype: block_time(CPU, ON_CPU, shape, 1, 1024, 1, 1, False, "none", "flash", dtype, 1024.0)
        for dtype in ("fp32", "bf16")
    }
    assert times["bf16"].elementwise == times["fp32"].elementwise
    half = replace(H100, efficiency=replace(H100.efficiency, matmul_16bit=0.5))
    assert matmul_seconds(half, 4096, 4096, 4096, "bf16") == pytest.approx(
        2 * matmul_seconds(H100, 4096, 4096, 4096, "bf16")
    )
    own = replace(H100, efficiency=replace(H100.efficiency, attention_peak=1e12))
    first = attention_seconds(own, 1, 512, 512, 4, 64, "bf16", "flash")
    assert first == attention_seconds(own, 1, 512, 512, 4, 64, "fp32", "flash")


def test_what_a_step_leaves_of_products() -> None:
    """1 where blocks take just what products alone and elements take; half where products in them take twice as long."""
    product, block = Products(1e11, 1.0, 1.0, 1.0), Block(256, 128, 512, 3)
    flops = 3 * 3 * 2 * 256 * (4 * 128 * 128 + 3 * 128 * 512)
    elements = block.elements * 4 / 1e10
    # tolerance: the fit of a line, to a fiftieth
    assert in_a_step(product, block, flops / 1e11 + elements, 4, 1e10) == pytest.approx(1.0, rel=0.02)
    assert in_a_step(product, block, 2 * flops / 1e11 + elements, 4, 1e10) == pytest.approx(
        0.5, rel=0.02
    )  # tolerance: the same


def test_a_collective_that_leaves_gaps_does_not_set_the_rate() -> None:
    found = fit_link(
        [
            Transfer("all-gather", 1, 2048.0, 4096, 1e-4 + 2048e-8),
            Transfer("all-reduce", 2, 1e7, 10**7, 2e-4 + 0.1),
            Transfer("all-to-all", 1, 1e7, 2 * 10**7, 0.2),
        ]
    )
    # tolerance: the fit of a line by least squares
    assert found.bandwidth == pytest.approx(1e8, rel=1e-6) and found.alpha == pytest.approx(1e-4, rel=1e-3)

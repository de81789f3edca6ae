"""Exposed communication from traces whose overlap is known because they are written by hand.

Known-fault rows: none of kinds j and k is about it.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.measure.profile import difference, length, trace_times, union


def event(category: str, name: str, thread: Any, start: float, end: float, **args: Any) -> dict[str, Any]:
    """Times in milliseconds."""
    times = {"ts": 7e12 + start * 1000, "dur": (end - start) * 1000}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, **times, "args": args}


def test_spans() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert difference([(0, 10)], [(2, 3), (2.5, 4), (9, 12)]) == [(0, 2), (4, 9)]
    assert difference([(0, 1), (2, 3)], [(0, 5)]) == []
    assert length([(0, 2), (1, 3), (10, 11)]) == 4


GLOO = [
    # 0 to 100: a product; 100 to 140: a synchronous gather over tp, in which the rank waits
    event("cpu_op", "aten::linear", 1, 0, 100),
    event("cpu_op", "aten::mm", 1, 10, 90),
    event("cpu_op", "_c10d_functional::all_gather_into_tensor", 1, 100, 140),
    event("user_annotation", "communication:tp/all-gather", 1, 101, 139),
    event("cpu_op", "c10d::allgather_into_tensor_coalesced_", 1, 102, 138),
    event("user_annotation", "gloo:all_gather", 8, 105, 137),
    event("cpu_op", "aten::copy_", 8, 106, 107),
    # an asynchronous reduce-scatter of dp_shard is issued in backward: half of it under a product of 50
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1, 140, 260),
    event("user_annotation", "communication:dp_shard/reduce-scatter", 1, 150, 152),
    event("cpu_op", "c10d::_reduce_scatter_base_", 1, 150.5, 151.5),
    event("cpu_op", "aten::mm", 1, 160, 210),
    event("user_annotation", "gloo:all_reduce", 9, 160, 260),
    event("cpu_op", "aten::add_", 9, 170, 250),
    # an element-wise operator, within which a collective is waited for (DTensor)
    event("cpu_op", "aten::mul", 1, 270, 300),
    event("cpu_op", "_c10d_functional::wait_tensor", 1, 280, 290),
]


def test_gloo() -> None:
    """Hidden: 50 of the 100 ms of the reduce-scatter, which gloo calls an all-reduce. Its own threads' sums do not cover."""
    window = trace_times({"traceEvents": GLOO})
    found = {(one.axis, one.collective): one for one in window.by_axis}
    assert set(found) == {("tp", "all-gather"), ("dp_shard", "reduce-scatter")}
    gather, scatter = found["tp", "all-gather"], found["dp_shard", "reduce-scatter"]
    assert gather.seconds == pytest.approx(0.040) and gather.exposed_seconds == pytest.approx(0.040)
    assert scatter.seconds == pytest.approx(0.101)  # the call itself, and gloo's work
    assert scatter.exposed_seconds == pytest.approx(0.051)
    assert window.seconds == pytest.approx(0.300)
    assert window.compute_seconds == pytest.approx(0.100 + 0.050 + 0.020)
    assert window.products_seconds == pytest.approx(0.150)
    assert window.exposed_seconds == pytest.approx(0.091)
    assert window.idle_seconds == pytest.approx(0.300 - 0.170 - 0.091)
    assert window.exposed_axes == pytest.approx({"tp": 0.040, "dp_shard": 0.051})
    assert trace_times({"traceEvents": GLOO}, updates=2).by_axis[0].seconds == pytest.approx(
        window.by_axis[0].seconds / 2
    )


def test_a_span_belongs_to_its_own_kind() -> None:
    """A send that is still under way does not take the span of a gather, and two sends are told apart by order."""
    events = [
        event("user_annotation", "communication:pp/send", 1, 0, 1),
        event("user_annotation", "communication:cp/send", 1, 2, 3),
        event("user_annotation", "communication:tp/all-gather", 1, 4, 5),
        event("user_annotation", "gloo:all_gather", 8, 6, 10),
        event("user_annotation", "gloo:send", 1, 20, 40),
        event("user_annotation", "gloo:send", 1, 50, 80),
    ]
    found = {one.axis: one.seconds for one in trace_times({"traceEvents": events}).by_axis}
    assert found == pytest.approx({"tp": 0.004, "pp": 0.020, "cp": 0.030})


def test_nccl() -> None:
    """Streams: a collective of 100 ms with 60 ms of kernels beside it exposes 40; host operators say nothing."""
    events = [
        event("cpu_op", "aten::mm", 1, 0, 500),
        event("kernel", "sm90_xmma_gemm_bf16", 7, 0, 100),
        event("kernel", "vectorized_elementwise_kernel", 7, 100, 160),
        event(
            "kernel",
            "ncclDevKernel_AllGather_RING_LL",
            20,
            50,
            150,
            **{"Process Group Name": "5", "Collective name": "_allgather_base"},
        ),
        event(
            "kernel",
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
            21,
            150,
            200,
            **{"Process Group Name": "9", "Collective name": "_reduce_scatter_base"},
        ),
    ]
    window = trace_times({"traceEvents": events}, {"5": "dp_shard"})
    found = {(one.axis, one.collective): one for one in window.by_axis}
    assert found["dp_shard", "all-gather"].seconds == pytest.approx(0.100)
    assert found["dp_shard", "all-gather"].exposed_seconds == pytest.approx(0.0)
    assert found["9", "reduce-scatter"].exposed_seconds == pytest.approx(0.040)
    assert window.compute_seconds == pytest.approx(0.160)
    assert window.products_seconds == pytest.approx(0.100)
    assert window.exposed_seconds == pytest.approx(0.040)


def test_an_empty_trace() -> None:
    assert trace_times({"traceEvents": []}).seconds == 0


def test_collectives_of_an_axis_at_once_count_once() -> None:
    """A gather from 0 to 10 ms and a reduction from 5 to 15 ms of the same group: 15 ms of its axis are exposed."""
    group = {"Process Group Name": "1"}
    events = [
        event("kernel", "ncclDevKernel_AllGather", 20, 0, 10, **group),
        event("kernel", "ncclDevKernel_ReduceScatter", 21, 5, 15, **group),
    ]
    window = trace_times({"traceEvents": events}, {"1": "dp_shard"})
    assert window.exposed_axes == pytest.approx({"dp_shard": 0.015})
    assert sum(one.exposed_seconds for one in window.by_axis) == pytest.approx(0.020)
    assert trace_times({"traceEvents": events}, {"1": "dp_shard"}, 2).exposed_axes == pytest.approx(
        {"dp_shard": 0.0075}
    )


def test_copies_between_host_and_device_are_no_idle_time() -> None:
    """Of 100 ms: 40 of a kernel, 20 of a gather, a copy from 30 to 80 of which 20 stand alone, a fill of 5, 15 idle."""
    events = [
        event("kernel", "gemm", 7, 0, 40),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 9, 30, 80),
        event("kernel", "ncclDevKernel_AllGather", 20, 60, 80),
        event("gpu_memset", "Memset (Device)", 7, 85, 90),
        event("cpu_op", "aten::add", 1, 95, 100),
    ]
    window = trace_times({"traceEvents": events})
    assert window.compute_seconds == pytest.approx(0.040)
    assert window.exposed_seconds == pytest.approx(0.020)  # a copy covers no communication
    assert window.copied_seconds == pytest.approx(0.025)
    assert window.idle_seconds == pytest.approx(0.015)

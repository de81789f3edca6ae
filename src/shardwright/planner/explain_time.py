"""The arithmetic of a predicted step time, line by line: sizes, rates, and the constants of the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.arch.parameters import counts, matmuls
from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.kernels import attention_flops, attention_seconds, matmul_seconds
from shardwright.planner.network import gather_time, group_of, ring_bandwidth, step_latency
from shardwright.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.problem import Layout
    from shardwright.planner.step_time import Clock


def _compute(clock: Clock, layout: Layout) -> Iterator[str]:
    """The products and the attention of one block: shapes, rates, and shares of the peak."""
    problem, device, program, a = clock.problem, clock.device, clock.program, layout.axes
    s, e, dtype = problem.shape, device.efficiency, problem.param_dtype
    rows, length = layout.microbatch_rows, problem.max_length / a.cp
    peak, source = device.peak(dtype), device.sources.get("peak_flops", "hardware file")
    yield (
        f"{device.name}: peak {format_flops(peak)}/s {dtype} [{source}]; large products reach {e.matmul:.2f} of the peak, and "
        f"half of that with {e.wave:.3g} elements of the result or with an inner dim of {e.depth:.0f} [{e.fitted}]"
    )
    for product in matmuls(s):
        fan_in = product.fan_in / (a.tp if product.split == "row" else 1)
        fan_out = product.fan_out / (a.tp if product.split == "column" else 1)
        forward = matmul_seconds(device, rows * length, fan_out, fan_in, dtype)
        flops = 2 * rows * length * fan_in * fan_out
        yield (
            f"  {product.name:<5} {rows * length:,.0f} x {fan_in:,.0f} x {fan_out:,.0f}: {format_flops(flops)} / "
            f"{format_flops(flops / forward)}/s = {format_seconds(forward)} ({flops / forward / peak:.0%} of peak)"
        )
    sizes = (rows, length, problem.attended, s.heads / a.tp, s.head_dim)
    forward, backward = attention_seconds(device, *sizes, dtype, problem.attention, program.attention_rate)
    yield (
        f"  attention ({problem.attention}, causal): {format_flops(attention_flops(*sizes))} forward in "
        f"{format_seconds(forward)}, backward {format_seconds(backward)}"
    )
    yield (
        f"  norms, residuals, rotary: {program.hidden_passes:g} passes over tokens x hidden and {program.mlp_passes:g} over "
        f"tokens x MLP width, at {format_bytes(device.memory_bandwidth * e.bandwidth)}/s ({e.bandwidth:.2f} of the memory "
        "bandwidth); twice as many in backward"
    )
    b = clock.block(layout)
    yield (
        f"  a block: forward {format_seconds(b.forward)}, backward {format_seconds(b.backward)} (of it recomputation "
        f"{format_seconds(b.recompute)}), with waits for tp of {format_seconds(b.tensor)} and for cp of "
        f"{format_seconds(b.context)}; x {s.layers // a.pp} blocks a rank"
    )


def _collectives(clock: Clock, layout: Layout) -> Iterator[str]:
    """One collective of each axis in use: ranks, steps, bytes, bandwidth."""
    problem, device, a = clock.problem, clock.device, layout.axes
    size, s, node, e = DTYPE_BYTES[problem.param_dtype], problem.shape, device.node, device.efficiency

    def line(name: str, ranks: int, stride: int, payload: float) -> str:
        group = group_of(ranks, stride, node.devices)
        return (
            f"  {name}: {ranks} ranks ({group.local} in a node): {ranks - 1} steps x "
            f"{format_seconds(step_latency(device, group))} + {ranks - 1}/{ranks} x {format_bytes(payload)} / "
            f"{format_bytes(ring_bandwidth(device, group))}/s = {format_seconds(gather_time(device, group).seconds(payload))}"
        )

    yield (
        f"links {format_bytes(node.link_bandwidth)}/s x {e.link:.2f}, network {format_bytes(node.network_bandwidth)}/s a "
        f"device x {e.network:.2f}, one direction [{node.source}; {e.fitted}]"
    )
    tokens = layout.microbatch_rows * problem.max_length
    if a.tp > 1:
        yield line("tp, one gather of tokens x hidden", a.tp, 1, tokens / a.cp * s.hidden * size)
    if a.cp > 1:
        yield line("cp, keys and values of the row", a.cp, a.tp, tokens * 2 * s.kv_width / a.tp * size)
    ddp = layout.data_parallel == "ddp"
    shard = (a.data_ranks if ddp else a.dp_shard) * a.cp
    if shard > 1:
        block = counts(s).block_split / a.tp + counts(s).block_whole
        if not ddp:
            yield line(f"gather of one block in {problem.param_dtype}", shard, a.tp, block * size)
        reduced = block * DTYPE_BYTES[problem.reduce_dtype]
        yield line(f"reduction of one block in {problem.reduce_dtype}", shard, a.tp, reduced)
        yield (
            "  hidden under the computation of the block before, as far as that lasts; computation loses "
            f"{clock.slowdown:g} s for each second of overlap"
        )


def time_lines(field: str | None, clock: Clock, layout: Layout) -> Iterator[str]:
    """The lines behind one field of the time, or behind all fields."""
    if field in (None, "time", "compute", "recompute"):
        yield from _compute(clock, layout)
    if field in (None, "time", "tensor", "context", "gathers", "reduction"):
        yield from _collectives(clock, layout)
    if field in (None, "time", "bubble") and layout.axes.pp > 1:
        yield (
            f"  {layout.schedule} on {layout.axes.pp} ranks x {layout.chunks} stages, {layout.microbatches(clock.problem)} "
            "microbatches: a simulation of the lists of layout/pipeline_schedules.py; with equal stages, each rank of 1F1B "
            "waits (p - 1)(F + B)"
        )

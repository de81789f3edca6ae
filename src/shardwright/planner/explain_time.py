"""The arithmetic of a predicted step time, line by line: sizes, rates and the constants they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.arch.inventory import counts, matmuls
from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.kernels import attention_flops, attention_seconds, matmul_seconds
from shardwright.planner.network import Group, gather_line, group_of, ring_bandwidth, step_latency
from shardwright.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.job import Layout
    from shardwright.planner.step_time import Clock


def compute_lines(clock: Clock, layout: Layout) -> Iterator[str]:
    """One block's products and attention: shapes, rate and share of the peak."""
    job, device, a = clock.job, clock.device, layout.axes
    s, e = job.shape, device.efficiency
    tokens = layout.microbatch_rows * job.max_length / a.cp
    peak = device.peak(job.param_dtype)
    yield (
        f"{device.name}: peak {format_flops(peak)}/s {job.param_dtype} "
        f"[{device.sources.get('peak_flops', 'hardware file')}]; reached by large "
        f"products {e.matmul:.2f}, wave {e.wave:.3g}, depth {e.depth:.0f} [{e.fitted}]"
    )
    for product in matmuls(s):
        fan_in = product.fan_in / (a.tp if product.split == "row" else 1)
        fan_out = product.fan_out / (a.tp if product.split == "column" else 1)
        forward = matmul_seconds(device, tokens, fan_out, fan_in, job.param_dtype)
        flops = 2 * tokens * fan_in * fan_out
        yield (
            f"  {product.name:<5} {tokens:,.0f} x {fan_in:,.0f} x {fan_out:,.0f}: {format_flops(flops)} / "
            f"{format_flops(flops / forward)}/s = "
            f"{format_seconds(forward)} ({flops / forward / peak:.0%} of peak)"
        )
    forward, backward = attention_seconds(
        device,
        layout.microbatch_rows,
        job.max_length / a.cp,
        job.attended,
        s.heads / a.tp,
        s.head_dim,
        job.param_dtype,
        job.attention,
        clock.software.attention_rate,
    )
    flops = attention_flops(layout.microbatch_rows, job.max_length / a.cp, job.attended, s.heads / a.tp, s.head_dim)
    yield (
        f"  attention ({job.attention}, causal): {format_flops(flops)} forward in "
        f"{format_seconds(forward)}, backward {format_seconds(backward)}"
    )
    element = clock.software.hidden_passes, clock.software.mlp_passes
    yield (
        f"  norms, residuals, rotary: {element[0]:g} passes over tokens x hidden and {element[1]:g} over "
        f"tokens x MLP width at "
        f"{format_bytes(device.memory_bandwidth * e.bandwidth)}/s ({e.bandwidth:.2f} of the memory "
        f"bandwidth); backward twice"
    )
    b = clock.block(layout)
    yield (
        f"  a block: forward {format_seconds(b.forward)}, backward {format_seconds(b.backward)} (recomputed "
        f"{format_seconds(b.recompute)}), "
        f"waits of tp {format_seconds(b.tensor)} and cp {format_seconds(b.context)} in them; x "
        f"{s.layers // a.pp} blocks a rank"
    )


def _line(clock: Clock, name: str, group: Group, payload: float) -> str:
    line = gather_line(clock.device, group)
    return (
        f"  {name}: {group.size} ranks ({group.local} in a node): {group.size - 1} steps x "
        f"{format_seconds(step_latency(clock.device, group))} + "
        f"{group.size - 1}/{group.size} x {format_bytes(payload)} / "
        f"{format_bytes(ring_bandwidth(clock.device, group))}/s = "
        f"{format_seconds(line.seconds(payload))}"
    )


def collective_lines(clock: Clock, layout: Layout) -> Iterator[str]:
    """One collective of each axis in use: ranks, steps, bytes, bandwidth."""
    job, device, a = clock.job, clock.device, layout.axes
    size, s, per_node = DTYPE_BYTES[job.param_dtype], job.shape, device.node.devices
    e = device.efficiency
    yield (
        f"links {format_bytes(device.node.link_bandwidth)}/s x {e.link:.2f}, network "
        f"{format_bytes(device.node.network_bandwidth)}/s a device x "
        f"{e.network:.2f}, one direction [{device.node.source}; {e.fitted}]"
    )
    tokens = layout.microbatch_rows * job.max_length / a.cp
    if a.tp > 1:
        yield _line(clock, "tp, one gather of tokens x hidden", group_of(a.tp, 1, per_node), tokens * s.hidden * size)
    if a.cp > 1:
        kv = layout.microbatch_rows * job.max_length * 2 * s.kv_width / a.tp * size
        yield _line(clock, "cp, keys and values of the row", group_of(a.cp, a.tp, per_node), kv)
    shard = a.dp_shard * a.cp if layout.data_parallel != "ddp" else a.data_ranks * a.cp
    if shard > 1:
        number = counts(s)
        block = number.block_split / a.tp + number.block_whole
        group = group_of(shard, a.tp, per_node)
        if layout.data_parallel != "ddp":
            yield _line(clock, f"gather of one block in {job.param_dtype}", group, block * size)
        yield _line(
            clock, f"reduction of one block in {job.reduce_dtype}", group, block * DTYPE_BYTES[job.reduce_dtype]
        )
        yield (
            f"  hidden under the block before where it fits; compute loses "
            f"{clock.slowdown:g} s for each second of overlap"
        )


def time_lines(field: str | None, clock: Clock, layout: Layout) -> list[str]:
    """The lines behind a time field, or behind all of them."""
    lines: list[str] = []
    if field in (None, "time", "compute", "recompute"):
        lines += compute_lines(clock, layout)
    if field in (None, "time", "tensor", "context", "gathers", "reduction"):
        lines += collective_lines(clock, layout)
    if field in (None, "time", "bubble") and layout.axes.pp > 1:
        a, k = layout.axes, layout.microbatches(clock.job)
        lines.append(
            f"  {layout.schedule} on {a.pp} ranks x {layout.chunks} stages, {k} microbatches: the lists of "
            f"layout/pipeline_schedules.py, played; equal "
            "stages of 1F1B would idle (p - 1)(F + B)"
        )
    return lines

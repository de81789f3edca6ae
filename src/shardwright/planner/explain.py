"""The arithmetic behind every number that `plan` prints, line by line, each with its source.

`explain(field, subject)` gives the lines of one field; `FIELDS` lists them. The numbers come from the functions that made
the answer; a line only writes out what was multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardwright.arch.flops import model_flops, recompute_flops
from shardwright.arch.parameters import counts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.errors import ConfigError, did_you_mean
from shardwright.planner.activations import kept_tensors, loss_copies, total_per_token
from shardwright.planner.block_bytes import in_chunks
from shardwright.planner.memory_timeline import Peak, short_peak
from shardwright.planner.program import SHARDWRIGHT, Program
from shardwright.planner.rank_bytes import Rules, holds, moments_of, rank_bytes, rank_elements, rules
from shardwright.planner.reliability import FAILURES_SOURCE, interruptions, training_flops
from shardwright.planner.traffic import traffic
from shardwright.units import format_bytes_binary, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.device import Device
    from shardwright.planner.job import Job, Layout
    from shardwright.planner.step_time import StepTime

KORTHIKANTI = "Korthikanti et al. 2022 (arXiv:2205.05198), section 4"
ZERO = "Rajbhandari et al. 2019 (arXiv:1910.02054), section 5"


@dataclass(frozen=True)
class Subject:
    """What is explained: one layout of a job on devices, with its predicted time."""

    job: Job
    layout: Layout
    device: Device
    devices: int
    time: StepTime | None = None
    program: Program = SHARDWRIGHT
    tokens: float | None = None

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.job)

    @property
    def rules(self) -> Rules:
        return rules(self.job, self.layout, self.program, self.microbatches)

    @cached_property
    def peak(self) -> Peak:
        return short_peak(self.job, self.layout, self.program)


def _gib(size: float) -> str:
    return format_bytes_binary(size, 2)


def _memory(s: Subject) -> list[str]:
    p = s.peak
    where = f"pipeline rank {p.pipeline_rank}, {p.moment}" if s.layout.axes.pp > 1 else p.moment
    lines = [f"peak = the largest sum over all moments of one update; it is at: {where}"]
    lines += [f"  {name:<28}{_gib(size):>12}" for name, size in p.composition.items()]
    lines.append(f"  {'allocated':<28}{_gib(p.allocated):>12}")
    lines += [
        f"  {'reserved besides':<28}{_gib(p.reserved - p.allocated):>12}  fragmentation, {s.program.fragmentation:.0%} of "
        "all but model states, and room that gradients at rest keep  [published peaks: benchmarks/planner_validation.py]",
        f"  {'CUDA context and libraries':<28}{_gib(s.program.context_bytes):>12}  [allowance]",
        f"  {'on the device':<28}{_gib(p.device):>12}  of {_gib(s.device.memory_bytes)}",
    ]
    return lines


def _parameters(s: Subject) -> list[str]:
    rank = s.peak.pipeline_rank
    blocks, first, last = holds(s.job, s.layout, rank)
    rule, axes = s.rules, s.layout.axes
    parts = rank_elements(s.job, s.layout, rule.degree, first >= 0, last >= 0)
    sharded = rule.sharded
    column = "shard" if sharded else "whole"
    block, embedding, head = (getattr(part, column) for part in parts)
    count = sum(blocks)
    total = count * block + embedding + head
    size = rule.master if s.program.engine == "torch" else rule.compute
    dtype = s.job.master_dtype if s.program.engine == "torch" else s.job.param_dtype
    over = f"tp {axes.tp}" + (f" and, along the first dim, {rule.degree} ranks (dp_shard x cp)" if sharded else "")
    return [
        f"{counts(s.job.shape).total:,} parameters; each divided by {over}, rounded up  [{ZERO}; fully_shard]",
        f"pipeline rank {rank}: {count} blocks x {block:,} + embedding {embedding:,} + head {head:,} = {total:,} elements",
        f"x {size} bytes ({dtype}) = {_gib(total * size)}",
    ]


def _gradients(s: Subject) -> list[str]:
    rule, b = s.rules, rank_bytes(s.job, s.layout, s.program, s.peak.pipeline_rank)
    if not rule.sharded:
        return [
            f"whole on every rank, always there: {_gib(b.always)} ({s.job.master_dtype})  [gradient_as_bucket_view]"
        ]
    lines = [f"reduced, they rest as shards in {s.job.master_dtype}: {_gib(b.at_rest)}"]
    if rule.late:
        whole = sum(b.blocks) * b.accumulated[0] + (b.accumulated[1] if b.first >= 0 else 0)
        whole += b.accumulated[2] if b.last >= 0 else 0
        lines.append(f"until the last microbatch they stay whole in {s.job.reduce_dtype}: {_gib(whole)}")
    lines.append(
        f"one unit on its way: {rule.compute} bytes as autograd made it + {rule.reduce} bytes to be reduced = "
        f"{_gib(b.transient[0])}"
    )
    return lines


def _optimizer(s: Subject) -> list[str]:
    b = rank_bytes(s.job, s.layout, s.program, s.peak.pipeline_rank)
    what = "two moments" if moments_of(s.job.optimizer) == 2 else "one momentum"
    shared = f"over {s.rules.degree} ranks" if s.rules.degree > 1 else "on every rank"
    return [f"{s.job.optimizer}: {what} in {s.job.master_dtype} {shared}: {_gib(b.optimizer)}  [{ZERO}]"]


def _activations(s: Subject) -> list[str]:
    job, layout, axes = s.job, s.layout, s.layout.axes
    width = DTYPE_BYTES[job.param_dtype]
    tokens = layout.microbatch_rows * -(-job.max_length // axes.cp)
    kept = kept_tensors(job.shape, s.program, width, job.attention, job.max_length, layout.recompute, axes.cp)
    sp = layout.sequence_parallel and axes.tp > 1
    lines = [
        f"{layout.microbatch_rows} rows x {job.max_length} tokens / cp {axes.cp} = {tokens:,} tokens per microbatch and rank"
    ]
    for one in kept:
        share = total_per_token((one,), axes.tp, sp, s.program.keeps_gathered)
        cut = f" / {one.bytes_per_token / share:.0f}" if share != one.bytes_per_token else ""
        lines.append(f"  {one.name:<28}{one.bytes_per_token:>12,.0f}{cut} bytes per token")
    per_token = total_per_token(kept, axes.tp, sp, s.program.keeps_gathered)
    b = rank_bytes(job, layout, s.program, s.peak.pipeline_rank)
    coefficient = per_token / job.shape.hidden
    lines += [
        f"  a block keeps {per_token:,.0f} bytes per token = {coefficient:.1f} s b h with recompute {layout.recompute}  "
        f"[{KORTHIKANTI}]",
        f"  x {tokens:,} tokens = {_gib(b.activations.saved)} per block and microbatch; {sum(b.blocks)} blocks on this rank",
        f"  in one block's backward besides: {_gib(b.activations.work)} (recomputed, and gradients of activations)",
    ]
    return lines


def _logits(s: Subject) -> list[str]:
    job, layout = s.job, s.layout
    b = rank_bytes(job, layout, s.program, layout.axes.pp - 1)
    copies = loss_copies(s.program, DTYPE_BYTES[job.param_dtype], layout.axes.tp > 1, layout.axes.pp > 1)
    logits = b.activations.logits
    tokens = layout.microbatch_rows * -(-job.max_length // layout.axes.cp)
    lines = [f"{tokens:,} tokens x {job.shape.vocab:,} vocabulary / tp {layout.axes.tp} = {logits:,.0f} logits"]
    lines += [f"  {name:<34}{size:g} bytes" for name, size in copies]
    total = sum(size for _, size in copies)
    if in_chunks(job, s.program, logits, layout):
        own = "gradients of hidden states and head, and the logits" if s.program.own else "fp32 copies"
        lines.append(f"  made in chunks of tokens: {own} of a part at a time: {_gib(b.loss)} at once")
    else:
        lines.append(f"  alive at once {total:g} bytes x {logits:,.0f} = {_gib(b.loss)}")
    return lines


def _traffic(s: Subject) -> list[str]:
    lines = ["per update and device; a ring over N ranks sends (N - 1) / N of the tensor, an all-reduce twice that"]
    for one in traffic(s.job, s.layout, 0, s.program):
        factor = (
            ""
            if one.collective == "send"
            else f" x {'2 x ' if one.collective == 'all-reduce' else ''}{one.size - 1}/{one.size}"
        )
        lines.append(
            f"  {one.axis:<13}{one.collective:<15}{one.what:<28} {one.count:>7,.0f} x "
            f"{format_bytes_binary(one.payload_bytes)}{factor} = {_gib(one.sent_bytes)}"
        )
    return lines


_TIME = {
    "compute": ("compute", "matrix products, attention, element-wise kernels  [planner/kernels.py]"),
    "recompute": ("recompute", "what the backward pass runs again"),
    "tensor": ("tensor", "tensor-parallel collectives that compute does not hide  [planner/network.py]"),
    "context": ("context", "keys and values gathered along cp"),
    "gathers": ("gathers", "parameters waited for, unit by unit: what does not fit under the unit before"),
    "bubble": (
        "bubble",
        "idle time of the busiest pipeline rank, the action list played  [layout/pipeline_schedules.py]",
    ),
    "sends": ("sends", "activations between stages"),
    "reduction": ("reduction", "gradients reduced and parameters gathered once per update"),
    "optimizer_time": ("optimizer", "bytes the optimizer reads and writes / memory bandwidth"),
    "fixed": ("fixed", "what an update costs besides: data, logging, synchronisation"),
}


def _time_part(s: Subject, field: str) -> list[str]:
    name, what = _TIME[field]
    if s.time is None:
        return [f"{field}: n/a"]
    seconds = getattr(s.time, name)
    per = f", {format_seconds(seconds / s.microbatches)} for each of {s.microbatches} microbatches" if seconds else ""
    return [
        f"{field:<15}{format_seconds(seconds) if seconds else '0':>9} of {format_seconds(s.time.total)}{per}: {what}"
    ]


def _time(s: Subject) -> list[str]:
    return [line for field in _TIME for line in _time_part(s, field)]


def _utilisation(s: Subject, counts_recompute: bool) -> list[str]:
    job, length = s.job, s.job.max_length
    flops = model_flops(job.shape, job.attended)
    lines = [
        f"FLOPs per token: blocks {flops.blocks:.4g} + attention 12 L H d_h S = {flops.attention:.4g} "
        f"(S {job.attended:,.0f}, full, not halved for causal) + head {flops.head:.4g} = {flops.total:.4g}; "
        "embedding lookup 0  [arch/flops.py]"
    ]
    total = flops.total
    if counts_recompute:
        # Selective recomputation keeps matrix products and attention: what it repeats has next to no FLOPs.
        again = recompute_flops(job.shape, job.attended, "full") if s.layout.recompute == "full" else 0.0
        total += again
        lines.append(f"+ recomputed ({s.layout.recompute}) {again:.4g} = {total:.4g}")
    if s.time is None:
        return lines
    rate = job.global_batch_size * length / s.time.total
    peak_flops = s.device.peak(job.param_dtype)
    share = total * rate / (s.devices * peak_flops)
    lines.append(
        f"{job.global_batch_size:,} rows x {length:,} tokens / {s.time.total:.4g} s = {rate:,.0f} tokens/s of all devices"
    )
    lines.append(
        f"{total:.4g} x {rate:,.0f} / ({s.devices:,} devices x {peak_flops:.4g} FLOP/s {job.param_dtype}) = {share:.1%}"
    )
    return lines


def _training(s: Subject) -> list[str]:
    if s.time is None or s.tokens is None:
        return ["training time needs the number of tokens (--tokens)"]
    parameters = counts(s.job.shape).total
    flops = training_flops(parameters, s.tokens)
    rate = s.job.global_batch_size * s.job.max_length / s.time.total
    return [
        f"C = 6PD = 6 x {parameters:,} x {s.tokens:.4g} = {flops:.3g} FLOPs  [Kaplan et al. 2020 (arXiv:2001.08361)]",
        f"{s.tokens:.4g} tokens / {rate:,.0f} tokens/s = {format_seconds(s.tokens / rate)}",
    ]


def _interruptions(s: Subject) -> list[str]:
    nodes = max(1, s.devices // s.device.node.devices)
    size = counts(s.job.shape).total * 12
    i = interruptions(s.devices, size, nodes)
    return [
        f"{FAILURES_SOURCE}: one in {format_seconds(i.mtbf_seconds)} on {s.devices:,} devices, {i.failures_per_day:.3g} a day",
        f"checkpoint 12 bytes x parameters = {_gib(size)}, {nodes} nodes at 1 GB/s (assumed): {format_seconds(i.save_seconds)}",
        f"interval = sqrt(2 x save x MTBF), Daly's higher order: {format_seconds(i.interval_seconds)}  [Young 1974; Daly 2006]",
        f"effective training time {i.effective:.1%} with a restart of {format_seconds(i.restart_seconds)} (assumed)",
    ]


def _part(field: str) -> Callable[[Subject], list[str]]:
    return lambda subject: _time_part(subject, field)


FIELDS: dict[str, Callable[[Subject], list[str]]] = {
    "memory": _memory,
    "parameters": _parameters,
    "gradients": _gradients,
    "optimizer": _optimizer,
    "activations": _activations,
    "logits": _logits,
    "traffic": _traffic,
    "time": _time,
    **{field: _part(field) for field in _TIME},
    "mfu": lambda s: _utilisation(s, counts_recompute=False),
    "hfu": lambda s: _utilisation(s, counts_recompute=True),
    "training": _training,
    "interruptions": _interruptions,
}


def explain(field: str | None, subject: Subject) -> list[str]:
    """The lines of one field, or of all. Raises `ConfigError` with the nearest name for a field that is not known."""
    if field is not None and field not in FIELDS:
        raise ConfigError(f"`{field}` is no field of the answer.", did_you_mean(field, FIELDS), "")
    lines = []
    for name in FIELDS if field is None else [field]:
        if field is None and name in _TIME:
            continue
        lines += [f"{name}:", *(f"  {line}" for line in FIELDS[name](subject))]
    return lines

"""The arithmetic behind every number that `plan` prints, line by line, with sources: `plan --explain FIELD`.

The numbers come from the functions that made the answer; a line only writes out the factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from shardwright.arch.flops import model_flops, recompute_flops
from shardwright.arch.parameters import counts
from shardwright.errors import ConfigError, did_you_mean
from shardwright.planner.activations import (
    Activations,
    in_chunks,
    kept_tensors,
    local_logits,
    loss_bytes,
    loss_copies,
    total_per_token,
)
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.memory_timeline import Peak, sized_rank
from shardwright.planner.optimizer import optimizer_of
from shardwright.planner.rank_bytes import Holding, RankBytes, Rules, holding, rank_elements, rules
from shardwright.planner.reliability import CHECKPOINT_BYTES, FAILURES_SOURCE, interruptions, training_flops
from shardwright.planner.traffic import traffic
from shardwright.units import format_bytes_binary, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.device import Device
    from shardwright.planner.problem import Layout, Problem
    from shardwright.planner.program import Program
    from shardwright.planner.step_time import StepTime

KORTHIKANTI = "Korthikanti et al. 2022 (arXiv:2205.05198), section 4"
ZERO = "Rajbhandari et al. 2019 (arXiv:1910.02054), section 5"


@dataclass(frozen=True)
class Subject:
    """What is explained: one layout on so many devices, with its predicted time."""

    problem: Problem
    layout: Layout
    devices: int
    time: StepTime | None = None
    tokens: float | None = None

    @property
    def device(self) -> Device:
        return self.problem.known_device

    @property
    def program(self) -> Program:
        return self.problem.program

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.problem)

    @property
    def rules(self) -> Rules:
        return rules(self.problem, self.layout, self.microbatches)

    def rank(self, rank: int) -> tuple[Holding, Activations, RankBytes]:
        """What a pipeline rank holds, and its bytes."""
        held = holding(self.problem, self.layout, rank)
        return held, *sized_rank(self.problem, self.layout, self.rules, held)

    @cached_property
    def peak(self) -> Peak:
        return short_peak(self.problem, self.layout)


def _gib(size: float) -> str:
    return format_bytes_binary(size, 2)


def _memory(s: Subject) -> list[str]:
    p = s.peak
    where = f"pipeline rank {p.pipeline_rank}, {p.moment}" if s.layout.axes.pp > 1 else p.moment
    lines = [f"peak = the largest sum of memory over all moments of one update, reached at: {where}"]
    lines += [f"  {name:<28}{_gib(size):>12}" for name, size in p.composition.items()]
    lines.append(f"  {'allocated':<28}{_gib(p.allocated):>12}")
    lines += [
        f"  {'reserved besides':<28}{_gib(p.reserved - p.allocated):>12}  fragmentation: {s.program.fragmentation:.0%} of all "
        "but model states, and blocks of reduced gradients  [published peaks: benchmarks/planner_validation.py]",
        f"  {'CUDA context and libraries':<28}{_gib(s.program.context_bytes):>12}  [assumed]",
        f"  {'on the device':<28}{_gib(p.device):>12}  of {_gib(s.device.memory_bytes)}",
    ]
    return lines


def _parameters(s: Subject) -> list[str]:
    rank = s.peak.pipeline_rank
    held = holding(s.problem, s.layout, rank)
    rule, axes = s.rules, s.layout.axes
    parts = rank_elements(s.problem, s.layout, rule.degree, held.first >= 0, held.last >= 0)
    sharded = rule.sharded
    column = "shard" if sharded else "whole"
    block, embedding, head = (getattr(part, column) for part in parts)
    count = sum(held.blocks)
    total = count * block + embedding + head
    size = rule.master if s.program.engine == "torch" else rule.compute
    dtype = s.problem.master_dtype if s.program.engine == "torch" else s.problem.param_dtype
    over = f"tp {axes.tp}" + (f" and, along the first dim, {rule.degree} ranks (dp_shard x cp)" if sharded else "")
    return [
        f"{counts(s.problem.shape).total:,} parameters; each divided by {over}, rounded up  [{ZERO}; fully_shard]",
        f"pipeline rank {rank}: {count} blocks x {block:,} + embedding {embedding:,} + head {head:,} = {total:,} elements",
        f"x {size} bytes ({dtype}) = {_gib(total * size)}",
    ]


def _gradients(s: Subject) -> list[str]:
    rule, held, b = s.rules, *s.rank(s.peak.pipeline_rank)[::2]
    if not rule.sharded:
        return [
            f"whole on every rank, during the whole update: {_gib(b.states.gradients)} ({s.problem.master_dtype})  "
            "[DDP's gradient_as_bucket_view]"
        ]
    lines = [f"reduced gradients are kept as shards in {s.problem.master_dtype}: {_gib(b.at_rest)}"]
    if rule.late:
        whole = sum(held.blocks) * b.accumulated[0] + b.accumulated[1] + b.accumulated[2]
        lines.append(
            f"until the last microbatch, unreduced gradients stay whole in {s.problem.reduce_dtype}: {_gib(whole)}"
        )
    lines.append(
        f"the unit that is reduced: {rule.compute} bytes an element from autograd + {rule.reduce} bytes for the reduction = "
        f"{_gib(b.sent[0])}"
    )
    return lines


def _optimizer(s: Subject) -> list[str]:
    _, _, b = s.rank(s.peak.pipeline_rank)
    optimizer = optimizer_of(s.problem.optimizer)
    what = "two moments" if optimizer.states == 2 else "one momentum"
    if optimizer.matrix_states != optimizer.states:
        what = "one momentum of a block's matrices, two moments of the rest,"
    shared = f"over {s.rules.degree} ranks" if s.rules.degree > 1 else "on every rank"
    return [f"{s.problem.optimizer}: {what} in {s.problem.master_dtype} {shared}: {_gib(b.states.optimizer)}  [{ZERO}]"]


def _activations(s: Subject) -> list[str]:
    problem, layout, axes = s.problem, s.layout, s.layout.axes
    tokens = layout.microbatch_rows * -(-problem.max_length // axes.cp)
    kept = kept_tensors(problem, layout.recompute, axes.cp)
    sp = layout.sequence_parallel and axes.tp > 1
    lines = [
        f"{layout.microbatch_rows} rows x {problem.max_length} tokens / cp {axes.cp} = {tokens:,} tokens "
        "per microbatch and rank"
    ]
    for tensor in kept:
        share = total_per_token((tensor,), axes.tp, sp, s.program.keeps_gathered)
        cut = f" / {tensor.bytes_per_token / share:.0f}" if share != tensor.bytes_per_token else ""
        lines.append(f"  {tensor.name:<28}{tensor.bytes_per_token:>12,.0f}{cut} bytes per token")
    per_token = total_per_token(kept, axes.tp, sp, s.program.keeps_gathered)
    held, sizes, _ = s.rank(s.peak.pipeline_rank)
    coefficient = per_token / problem.shape.hidden
    lines += [
        f"  a block keeps {per_token:,.0f} bytes per token = {coefficient:.1f} s b h with recompute {layout.recompute}  "
        f"[{KORTHIKANTI}]",
        f"  x {tokens:,} tokens = {_gib(sizes.saved)} per block and microbatch; {sum(held.blocks)} blocks on this rank",
        f"  in the backward of one block, besides: {_gib(sizes.work)} (recomputed activations, and gradients of activations)",
    ]
    return lines


def _logits(s: Subject) -> list[str]:
    problem, layout = s.problem, s.layout
    copies, logits, loss = loss_copies(problem, layout), local_logits(problem, layout), loss_bytes(problem, layout)[0]
    tokens = layout.microbatch_rows * -(-problem.max_length // layout.axes.cp)
    lines = [f"{tokens:,} tokens x {problem.shape.vocab:,} vocabulary / tp {layout.axes.tp} = {logits:,.0f} logits"]
    lines += [f"  {name:<34}{size:g} bytes" for name, size in copies]
    total = sum(size for _, size in copies)
    if in_chunks(problem, layout):
        own = "gradients of hidden states and head, and the logits" if s.program.own else "the fp32 copies"
        lines.append(f"  computed in chunks of tokens; alive at once: {own} of one chunk: {_gib(loss)}")
    else:
        lines.append(f"  alive at once {total:g} bytes x {logits:,.0f} = {_gib(loss)}")
    return lines


def _traffic(s: Subject) -> list[str]:
    lines = [
        "per update and device; a rank of a ring of N sends (N - 1) / N of the tensor, in an all-reduce twice as much"
    ]
    for one in traffic(s.problem, s.layout):
        twice = "2 x " if one.collective == "all-reduce" else ""
        factor = "" if one.collective == "send" else f" x {twice}{one.size - 1}/{one.size}"
        lines.append(
            f"  {one.axis:<13}{one.collective:<15}{one.what:<28} {one.count:>7,.0f} x "
            f"{format_bytes_binary(one.payload_bytes)}{factor} = {_gib(one.sent_bytes)}"
        )
    return lines


_TIME = {
    "compute": "matrix products, attention and element-wise kernels  [planner/kernels.py]",
    "recompute": "kernels that the backward pass runs again",
    "tensor": "tensor-parallel collectives that no computation hides  [planner/network.py]",
    "context": "gathers of keys and values over cp",
    "gathers": "waits for gathered parameters: the part of a gather that outlasts the computation of the unit before",
    "bubble": "waits of the busiest pipeline rank, by simulation of the schedule  [layout/pipeline_schedules.py]",
    "sends": "activations sent between pipeline stages",
    "reduction": "reduction of gradients, and gathers of parameters, once per update",
    "optimizer_time": "bytes that the optimizer reads and writes / memory bandwidth",
    "fixed": "data, logging and synchronization, once per update",
}


def _time_part(s: Subject, field: str) -> list[str]:
    if s.time is None:
        return [f"{field}: n/a"]
    seconds = getattr(s.time, field.removesuffix("_time"))
    per = f", {format_seconds(seconds / s.microbatches)} for each of {s.microbatches} microbatches" if seconds else ""
    shown = format_seconds(seconds) if seconds else "0"
    return [f"{field:<15}{shown:>9} of {format_seconds(s.time.total)}{per}: {_TIME[field]}"]


def _time(s: Subject) -> list[str]:
    return [line for field in _TIME for line in _time_part(s, field)]


def _utilisation(s: Subject, counts_recompute: bool) -> list[str]:
    problem, length = s.problem, s.problem.max_length
    flops = model_flops(problem.shape, problem.attended)
    lines = [
        f"FLOPs per token: blocks {flops.blocks:.4g} + attention 12 L H d_h S = {flops.attention:.4g} "
        f"(S = {problem.attended:,.0f} keys, not halved for the causal mask) + head {flops.head:.4g} = {flops.total:.4g}; "
        "embedding lookup 0  [arch/flops.py]"
    ]
    total = flops.total
    if counts_recompute:
        # Selective recomputation keeps matrix products and attention: the kernels that it repeats have next to no FLOPs.
        again = recompute_flops(problem.shape, problem.attended, "full") if s.layout.recompute == "full" else 0.0
        total += again
        lines.append(f"+ recomputed ({s.layout.recompute}) {again:.4g} = {total:.4g}")
    if s.time is None:
        return lines
    rate = problem.global_batch_size * length / s.time.total
    peak_flops = s.device.peak(problem.param_dtype)
    share = total * rate / (s.devices * peak_flops)
    lines.append(
        f"{problem.global_batch_size:,} rows x {length:,} tokens / {s.time.total:.4g} s = {rate:,.0f} tokens/s of all devices"
    )
    lines.append(
        f"{total:.4g} x {rate:,.0f} / ({s.devices:,} devices x {peak_flops:.4g} FLOP/s {problem.param_dtype}) = {share:.1%}"
    )
    return lines


def _training(s: Subject) -> list[str]:
    if s.time is None or s.tokens is None:
        return ["n/a: add --tokens, the number of tokens to train on"]
    parameters = counts(s.problem.shape).total
    flops = training_flops(parameters, s.tokens)
    rate = s.problem.global_batch_size * s.problem.max_length / s.time.total
    return [
        f"C = 6PD = 6 x {parameters:,} x {s.tokens:.4g} = {flops:.3g} FLOPs  [Kaplan et al. 2020 (arXiv:2001.08361)]",
        f"{s.tokens:.4g} tokens / {rate:,.0f} tokens/s = {format_seconds(s.tokens / rate)}",
    ]


def _interruptions(s: Subject) -> list[str]:
    nodes = max(1, s.devices // s.device.node.devices)
    size = counts(s.problem.shape).total * CHECKPOINT_BYTES
    i = interruptions(s.devices, size, nodes)
    return [
        f"one failure every {format_seconds(i.mtbf_seconds)} on {s.devices:,} devices, {i.failures_per_day:.3g} a day  "
        f"[{FAILURES_SOURCE}]",
        f"a checkpoint has {CHECKPOINT_BYTES} bytes x parameters = {_gib(size)}; {nodes} nodes write 1 GB/s each (assumed): "
        f"{format_seconds(i.save_seconds)}",
        f"a save every sqrt(2 x save x MTBF), with Daly's higher orders: {format_seconds(i.interval_seconds)}  "
        "[Young 1974; Daly 2006]",
        f"effective training time {i.effective:.1%}, with a restart of {format_seconds(i.restart_seconds)} (assumed)",
    ]


FIELDS: dict[str, Callable[[Subject], list[str]]] = {
    "memory": _memory,
    "parameters": _parameters,
    "gradients": _gradients,
    "optimizer": _optimizer,
    "activations": _activations,
    "logits": _logits,
    "traffic": _traffic,
    "time": _time,
    **{field: partial(_time_part, field=field) for field in _TIME},
    "mfu": lambda s: _utilisation(s, counts_recompute=False),
    "hfu": lambda s: _utilisation(s, counts_recompute=True),
    "training": _training,
    "interruptions": _interruptions,
}


def explain(field: str | None, subject: Subject) -> list[str]:
    """The lines of one field, or of all fields. Raises `ConfigError` with the nearest name for an unknown field."""
    if field is not None and field not in FIELDS:
        raise ConfigError(
            f"--explain {field}: plan has no such field.", did_you_mean(field, FIELDS), f"Fields: {', '.join(FIELDS)}."
        )
    lines = []
    for name in FIELDS if field is None else [field]:
        if field is None and name in _TIME:
            continue
        lines += [f"{name}:", *(f"  {line}" for line in FIELDS[name](subject))]
    return lines

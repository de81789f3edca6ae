"""The arithmetic behind every number that `plan` prints, line by line, with sources: `plan --explain FIELD`.

The numbers come from the functions that made the answer; a line only writes out the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from shardwright.arch.flops import model_flops, recompute_flops
from shardwright.arch.parameters import counts
from shardwright.errors import ConfigError, did_you_mean
from shardwright.planner import activations as tensors
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.memory_timeline import Peak, sized_rank
from shardwright.planner.optimizer import optimizer_of
from shardwright.planner.rank_bytes import Holding, RankBytes, Rules, holding, rank_elements, rules
from shardwright.planner.reliability import CHECKPOINT_BYTES, FAILURES_SOURCE, interruptions, training_flops
from shardwright.planner.traffic import traffic
from shardwright.units import format_bytes_binary, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.problem import Layout, Problem
    from shardwright.planner.step_time import StepTime

KORTHIKANTI = "Korthikanti et al. 2022 (arXiv:2205.05198), section 4"
ZERO = "Rajbhandari et al. 2019 (arXiv:1910.02054), section 5"
KAPLAN = "Kaplan et al. 2020 (arXiv:2001.08361)"


@dataclass(frozen=True)
class Subject:
    """What is explained: one layout on so many devices."""

    problem: Problem
    layout: Layout
    devices: int
    time: StepTime | None = None  # predicted; None: the layout does not fit
    tokens: float | None = None  # of the whole run

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.problem)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.layout.microbatch_rows * -(-self.problem.max_length // self.layout.axes.cp)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices; 0 where no time is predicted."""
        return self.problem.global_batch_size * self.problem.max_length / self.time.total if self.time else 0.0

    @property
    def rules(self) -> Rules:
        return rules(self.problem, self.layout, self.microbatches)

    @cached_property
    def peak(self) -> Peak:
        return short_peak(self.problem, self.layout)

    @cached_property
    def held(self) -> Holding:
        """What the pipeline rank with the largest peak holds."""
        return holding(self.problem, self.layout, self.peak.pipeline_rank)

    @cached_property
    def sizes(self) -> tuple[tensors.Activations, RankBytes]:
        """Bytes on the same rank."""
        return sized_rank(self.problem, self.layout, self.rules, self.held)


def _gib(size: float) -> str:
    return format_bytes_binary(size, 2)


def _memory(s: Subject) -> Iterator[str]:
    p, program = s.peak, s.problem.program
    where = f"pipeline rank {p.pipeline_rank}, {p.moment}" if s.layout.axes.pp > 1 else p.moment
    yield f"peak = the largest sum of memory over all moments of one update, reached at: {where}"
    for name, size in (*p.composition.items(), ("allocated", p.allocated)):
        yield f"  {name:<28}{_gib(size):>12}"
    yield (
        f"  {'reserved besides':<28}{_gib(p.reserved - p.allocated):>12}  fragmentation: {program.fragmentation:.0%} of all "
        "but model states, and blocks of reduced gradients  [published peaks: benchmarks/planner_validation.py]"
    )
    yield f"  {'CUDA context and libraries':<28}{_gib(program.context_bytes):>12}  [assumed]"
    yield f"  {'on the device':<28}{_gib(p.device):>12}  of {_gib(s.problem.known_device.memory_bytes)}"


def _parameters(s: Subject) -> Iterator[str]:
    held, rule, axes = s.held, s.rules, s.layout.axes
    parts = rank_elements(s.problem, s.layout, rule.degree, held.first >= 0, held.last >= 0)
    block, embedding, head = (part.shard if rule.sharded else part.whole for part in parts)
    count = sum(held.blocks)
    total = count * block + embedding + head
    over = f"tp {axes.tp}" + (f" and, along the first dim, {rule.degree} ranks (dp_shard x cp)" if rule.sharded else "")
    yield f"{counts(s.problem.shape).total:,} parameters; each divided by {over}, rounded up  [{ZERO}; fully_shard]"
    yield (
        f"pipeline rank {s.peak.pipeline_rank}: {count} blocks x {block:,} + embedding {embedding:,} + head {head:,} = "
        f"{total:,} elements"
    )
    yield f"x {rule.master} bytes ({s.problem.master_dtype}) = {_gib(total * rule.master)}"


def _gradients(s: Subject) -> Iterator[str]:
    rule, (_, b), stored = s.rules, s.sizes, s.problem.master_dtype
    if not rule.sharded:
        whole = _gib(b.states.gradients)
        yield f"whole on every rank, during the whole update: {whole} ({stored})  [DDP's gradient_as_bucket_view]"
        return
    yield f"reduced gradients are kept as shards in {stored}: {_gib(b.at_rest)}"
    if rule.late:
        late = sum(s.held.blocks) * b.accumulated[0] + b.accumulated[1] + b.accumulated[2]
        yield f"until the last microbatch, unreduced gradients stay whole in {s.problem.reduce_dtype}: {_gib(late)}"
    yield (
        f"the unit that is reduced: {rule.compute} bytes an element from autograd + {rule.reduce} bytes for the reduction = "
        f"{_gib(b.sent[0])}"
    )


def _optimizer(s: Subject) -> Iterator[str]:
    optimizer, dtype = optimizer_of(s.problem.optimizer), s.problem.master_dtype
    what = "two moments" if optimizer.states == 2 else "one momentum"
    if optimizer.matrix_states != optimizer.states:
        what = "one momentum of a block's matrices, two moments of the rest,"
    shared = f"over {s.rules.degree} ranks" if s.rules.degree > 1 else "on every rank"
    yield f"{s.problem.optimizer}: {what} in {dtype} {shared}: {_gib(s.sizes[1].states.optimizer)}  [{ZERO}]"


def _activations(s: Subject) -> Iterator[str]:
    problem, layout, axes, sizes = s.problem, s.layout, s.layout.axes, s.sizes[0]
    split = (axes.tp, layout.sequence_parallel and axes.tp > 1, problem.program.keeps_gathered)
    kept = tensors.kept_tensors(problem, layout.recompute, axes.cp)
    yield (
        f"{layout.microbatch_rows} rows x {problem.max_length} tokens / cp {axes.cp} = {s.microbatch_tokens:,} tokens per "
        "microbatch and rank"
    )
    for tensor in kept:
        share = tensors.total_per_token((tensor,), *split)
        cut = f" / {tensor.bytes_per_token / share:.0f}" if share != tensor.bytes_per_token else ""
        yield f"  {tensor.name:<28}{tensor.bytes_per_token:>12,.0f}{cut} bytes per token"
    per_token = tensors.total_per_token(kept, *split)
    yield (
        f"  a block keeps {per_token:,.0f} bytes per token = {per_token / problem.shape.hidden:.1f} s b h with recompute "
        f"{layout.recompute}  [{KORTHIKANTI}]"
    )
    yield (
        f"  x {s.microbatch_tokens:,} tokens = {_gib(sizes.saved)} per block and microbatch; {sum(s.held.blocks)} blocks on "
        "this rank"
    )
    yield (
        f"  in the backward of one block, besides: {_gib(sizes.work)} (recomputed activations, and gradients of activations)"
    )


def _logits(s: Subject) -> Iterator[str]:
    problem, layout = s.problem, s.layout
    copies, logits = tensors.loss_copies(problem, layout), tensors.local_logits(problem, layout)
    loss = _gib(tensors.loss_bytes(problem, layout)[0])
    yield (
        f"{s.microbatch_tokens:,} tokens x {problem.shape.vocab:,} vocabulary / tp {layout.axes.tp} = {logits:,.0f} logits"
    )
    for name, size in copies:
        yield f"  {name:<34}{size:g} bytes"
    if tensors.in_chunks(problem, layout):
        yield f"  computed in chunks of tokens; alive at once: gradients of hidden states and head, logits of one chunk: {loss}"
    else:
        yield f"  alive at once {sum(size for _, size in copies):g} bytes x {logits:,.0f} = {loss}"


def _traffic(s: Subject) -> Iterator[str]:
    yield "per update and device; a rank of a ring of N sends (N - 1) / N of the tensor, in an all-reduce twice as much"
    for one in traffic(s.problem, s.layout):
        twice = "2 x " if one.collective == "all-reduce" else ""
        factor = "" if one.collective == "send" else f" x {twice}{one.size - 1}/{one.size}"
        yield (
            f"  {one.axis:<13}{one.collective:<15}{one.what:<28} {one.count:>7,.0f} x "
            f"{format_bytes_binary(one.payload_bytes)}{factor} = {_gib(one.sent_bytes)}"
        )


_TIME = {
    "compute": "matrix products, attention and element-wise kernels  [planner/kernels.py]",
    "recompute": "kernels that the backward pass runs again",
    "tensor": "tensor-parallel collectives that no computation hides  [planner/network.py]",
    "context": "gathers of keys and values over cp",
    "gathers": "waits for gathered parameters: the part of a gather that outlasts the computation of the unit before",
    "bubble": "waits of the busiest pipeline rank, by simulation of the schedule  [layout/pipeline_schedules.py]",
    "sends": "activations sent between pipeline stages",
    "reduction": "reduction of gradients, and gathers of parameters, once per update",
    "optimizer_time": "bytes that the optimizer reads and writes / memory bandwidth; with Muon its gathers and products too",
    "fixed": "data, logging and synchronization, once per update",
}
"""Parts of the time of an update, by field; `optimizer` is the field of its memory."""


def _time_part(s: Subject, field: str) -> Iterator[str]:
    if s.time is None:
        yield f"{field}: n/a"
        return
    seconds = getattr(s.time, field.removesuffix("_time"))
    per = f", {format_seconds(seconds / s.microbatches)} for each of {s.microbatches} microbatches" if seconds else ""
    shown = format_seconds(seconds) if seconds else "0"
    yield f"{field:<15}{shown:>9} of {format_seconds(s.time.total)}{per}: {_TIME[field]}"


def _time(s: Subject) -> Iterator[str]:
    for field in _TIME:
        yield from _time_part(s, field)


def _utilisation(s: Subject, counts_recompute: bool) -> Iterator[str]:
    problem, dtype = s.problem, s.problem.param_dtype
    flops = model_flops(problem.shape, problem.attended)
    yield (
        f"FLOPs per token: blocks {flops.blocks:.4g} + attention 12 L H d_h S = {flops.attention:.4g} "
        f"(S = {problem.attended:,.0f} keys, not halved for the causal mask) + head {flops.head:.4g} = {flops.total:.4g}; "
        "embedding lookup 0  [arch/flops.py]"
    )
    total = flops.total
    if counts_recompute:
        # Selective recomputation keeps matrix products and attention: the kernels that it repeats have next to no FLOPs.
        again = recompute_flops(problem.shape, problem.attended, "full") if s.layout.recompute == "full" else 0.0
        total += again
        yield f"+ recomputed ({s.layout.recompute}) {again:.4g} = {total:.4g}"
    if s.time is not None:
        rate, peak_flops = s.tokens_per_second, problem.known_device.peak(dtype)
        yield (
            f"{problem.global_batch_size:,} rows x {problem.max_length:,} tokens / {s.time.total:.4g} s = {rate:,.0f} tokens/s "
            "of all devices"
        )
        yield (
            f"{total:.4g} x {rate:,.0f} / ({s.devices:,} devices x {peak_flops:.4g} FLOP/s {dtype}) = "
            f"{total * rate / (s.devices * peak_flops):.1%}"
        )


def _training(s: Subject) -> Iterator[str]:
    if s.time is None or s.tokens is None:
        yield "n/a: add --tokens, the number of tokens to train on"
        return
    parameters, rate = counts(s.problem.shape).total, s.tokens_per_second
    yield f"C = 6PD = 6 x {parameters:,} x {s.tokens:.4g} = {training_flops(parameters, s.tokens):.3g} FLOPs  [{KAPLAN}]"
    yield f"{s.tokens:.4g} tokens / {rate:,.0f} tokens/s = {format_seconds(s.tokens / rate)}"


def _interruptions(s: Subject) -> Iterator[str]:
    nodes = max(1, s.devices // s.problem.known_device.node.devices)
    size = counts(s.problem.shape).total * CHECKPOINT_BYTES
    i = interruptions(s.devices, size, nodes)
    yield (
        f"one failure every {format_seconds(i.mtbf_seconds)} on {s.devices:,} devices, {i.failures_per_day:.3g} a day  "
        f"[{FAILURES_SOURCE}]"
    )
    yield (
        f"a checkpoint has {CHECKPOINT_BYTES} bytes x parameters = {_gib(size)}; {nodes} nodes write 1 GB/s each (assumed): "
        f"{format_seconds(i.save_seconds)}"
    )
    yield (
        f"a save every sqrt(2 x save x MTBF), with Daly's higher orders: {format_seconds(i.interval_seconds)}  "
        "[Young 1974; Daly 2006]"
    )
    yield f"effective training time {i.effective:.1%}, with a restart of {format_seconds(i.restart_seconds)} (assumed)"


FIELDS: dict[str, Callable[[Subject], Iterator[str]]] = {
    "memory": _memory,
    "parameters": _parameters,
    "gradients": _gradients,
    "optimizer": _optimizer,
    "activations": _activations,
    "logits": _logits,
    "traffic": _traffic,
    "time": _time,
    **{field: partial(_time_part, field=field) for field in _TIME},
    "mfu": partial(_utilisation, counts_recompute=False),
    "hfu": partial(_utilisation, counts_recompute=True),
    "training": _training,
    "interruptions": _interruptions,
}


def explain(field: str | None, subject: Subject) -> Iterator[str]:
    """The lines of one field, or of all fields. Raises `ConfigError` with the nearest name for an unknown field."""
    if field is not None and field not in FIELDS:
        raise ConfigError(
            f"--explain {field}: plan has no such field.", did_you_mean(field, FIELDS), f"Fields: {', '.join(FIELDS)}."
        )
    for name in [name for name in FIELDS if name not in _TIME] if field is None else [field]:
        yield f"{name}:"
        yield from (f"  {line}" for line in FIELDS[name](subject))

"""The planner's answer as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.planner.advice import PATHS
from shardwright.planner.reliability import FAILURES_SOURCE, training_flops
from shardwright.units import GIB, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.answer import Answer, Described

WIDTH = 60
FILLS = "█▓▒░▚▞▤▥▦▧"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def keys_line(described: Described) -> str:
    """`--training.per_device_train_batch_size 2 ...`: what sets this layout in a run."""
    flags = [
        f"--{key} {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in described.keys.items()
        if "." in key
    ]
    rest = [f"{key} {value}" for key, value in described.keys.items() if "." not in key]
    return " ".join(flags) + (f"  ({', '.join(rest)})" if rest else "")


def bar(described: Described, capacity: float) -> Iterator[str]:
    """The peak of a layout: one bar as wide as the device's memory, and what each stretch of it is."""
    drawn, legend, used = "", [], 0.0
    overhead = described.device_bytes - described.allocated_bytes
    parts = [*described.composition.items(), ("fragmentation and context", overhead)]
    for index, (name, size) in enumerate(parts):
        fill = FILLS[index % len(FILLS)]
        used += size
        drawn += fill * (round(used / capacity * WIDTH) - len(drawn))
        legend.append(f"{fill} {name} {gib(size)}")
    yield f"    |{drawn[: 2 * WIDTH]:<{WIDTH}}| {gib(described.device_bytes)} of {gib(capacity)}"
    for start in range(0, len(legend), 3):
        yield "     " + "   ".join(legend[start : start + 3])
    yield f"     at: {described.moment}"


def parts_line(described: Described) -> str:
    """`compute 72%, recompute 23%, gathers 5%`."""
    shares = sorted(described.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {seconds / described.seconds:.0%}" for name, seconds in shares if seconds >= 0.005 * described.seconds
    )


def head(a: Answer) -> Iterator[str]:
    problem = a.problem
    name = problem.shape.name or problem.shape.family
    yield (
        f"{name}: {format_count(a.parameters)} parameters on {a.devices:,} x {a.device} ({gib(a.capacity_bytes)} each)"
    )
    packed = f" in documents of {problem.attended:,.0f}" if problem.document_length else ""
    yield (
        f"Update: {problem.global_batch_size:,} rows of {problem.max_length:,} tokens{packed}; {problem.param_dtype} compute, "
        f"{problem.reduce_dtype} reduction, "
        f"{problem.master_dtype} weights, {problem.optimizer}"
    )
    yield f"{a.considered:,} legal layouts considered"


def layout_table(ranked: tuple[Described, ...]) -> Iterator[str]:
    width = max(8, *(len(d.name) + 2 for d in ranked))
    yield (
        f"  {'layout':<{width}}{'microbatch':>10}  "
        f"{'recompute':<10}{'s/update':>9}{'tokens/s':>15}{'MFU':>6}{'HFU':>6}{'peak':>11}"
    )
    for d in ranked:
        rows = f"{d.keys['training.per_device_train_batch_size']} x {d.microbatches}"
        recompute = d.keys.get("memory.activation_checkpointing", "none")
        yield (
            f"  {d.name:<{width}}{rows:>10}  "
            f"{recompute:<10}{d.seconds:>9.2f}{d.tokens_per_second:>15,.0f}{d.mfu:>6.0%}{d.hfu:>6.0%}"
            f"{gib(d.device_bytes):>11}"
        )
    yield (
        "  MFU and HFU: full attention (not halved for causal), head in, embedding lookup out; HFU "
        "counts recomputed blocks."
    )


def first(a: Answer) -> Iterator[str]:
    path, d = PATHS[a.path], a.first
    assert d is not None
    yield f"Test first: {path.name} ({path.situation})"
    yield f"  {d.name}: {keys_line(d)}"
    yield f"  {format_seconds(d.seconds)} per update: {parts_line(d)}"
    if d.sent_bytes:
        yield "  Sends per update and device: " + ", ".join(
            f"{axis} {gib(size)}" for axis, size in d.sent_bytes.items()
        )
    yield f"  Check besides: {path.checks}"
    yield from bar(d, a.capacity_bytes)


def nothing(a: Answer) -> Iterator[str]:
    yield "Nothing fits with all state on the devices. What would, nearest first:"
    for line in a.would_fit:
        yield f"  - {line}"


def refused(a: Answer, most: int = 8) -> Iterator[str]:
    if not a.refused:
        return
    yield "Does not fit, at its leanest (one row, everything recomputed, finest sharding):"
    width = max(len(r.family) for r in a.refused[:most]) + 2
    for r in a.refused[:most]:
        yield f"  {r.family:<{width}}{gib(r.device_bytes):>12}  mostly {r.mostly}" + (
            f"  -> {r.change}" if r.change else ""
        )
    if len(a.refused) > most:
        yield f"  and {len(a.refused) - most} more families (--json lists them)"


def interruption_lines(a: Answer) -> Iterator[str]:
    i = a.interruptions
    yield (
        f"Interruptions: one in {format_seconds(i.mtbf_seconds)} expected ({FAILURES_SOURCE}); save "
        f"{format_seconds(i.save_seconds)}, restart "
        f"{format_seconds(i.restart_seconds)} (assumed)"
    )
    yield (f"  save every {format_seconds(i.interval_seconds)} (Daly 2006): {i.effective:.1%} effective training time")


def training_lines(a: Answer, tokens: float) -> Iterator[str]:
    """Days for so many tokens, by C = 6PD and by the predicted step."""
    if a.first is None:
        return
    flops = training_flops(a.parameters, tokens)
    seconds = tokens / a.first.tokens_per_second
    yield (
        f"Training on {format_count(tokens)} tokens: C = 6PD = {flops:.3g} FLOP; {format_seconds(seconds)} "
        f"at the predicted rate "
        f"({format_flops(flops / seconds)}/s by that count), "
        f"{format_seconds(seconds / a.interruptions.effective)} with interruptions"
    )


def text(a: Answer, tokens: float | None = None) -> Iterator[str]:
    """The whole answer, line by line."""
    yield from head(a)
    yield ""
    if a.first is None:
        yield from nothing(a)
    else:
        yield from first(a)
        yield ""
        yield "Fits, fastest first; within 2% the simpler one:"
        # The path to test first need not be among the fastest families: it stands below them.
        known = [d.name for d in a.ranked]
        yield from layout_table(a.ranked if a.first.name in known else (*a.ranked, a.first))
    if a.refused:
        yield ""
        yield from refused(a)
    if a.illegal:
        reasons = "; ".join(
            f"{reason} ({number})" for reason, number in sorted(a.illegal.items(), key=lambda item: -item[1])
        )
        yield f"Not legal: {reasons}"
    if a.limits:
        yield ""
        yield "What this will not fix:"
        for line in a.limits:
            yield f"  - {line}"
    yield ""
    yield from interruption_lines(a)
    if tokens:
        yield from training_lines(a, tokens)

"""The planner's answer as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.planner.advice import APPROACHES
from shardwright.planner.optimizer import OPTIMIZERS
from shardwright.planner.reliability import FAILURES_SOURCE, training_flops
from shardwright.units import GIB, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.answer import Answer, Described

WIDTH = 60
FILLS = "█▓▒░▚▞▤▥▦▧"
MOST_REJECTED = 8


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def keys_line(described: Described) -> str:
    """`--training.per_device_train_batch_size 2 ...`: the flags that set this layout in a run."""
    keys = {key: str(value).lower() if isinstance(value, bool) else value for key, value in described.keys.items()}
    flags = " ".join(f"--{key} {value}" for key, value in keys.items() if "." in key)
    rest = ", ".join(f"{key} {value}" for key, value in keys.items() if "." not in key)
    return flags + (f"  ({rest})" if rest else "")


def bar(described: Described, capacity: float) -> Iterator[str]:
    """The peak memory of a layout: a bar as wide as the device's memory, and the tensors that fill it."""
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
    yield f"     memory is fullest at: {described.moment}"


def parts_line(described: Described) -> str:
    """`compute 72%, recompute 23%, gathers 5%`."""
    shares = sorted(described.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {seconds / described.seconds:.0%}" for name, seconds in shares if seconds >= 0.005 * described.seconds
    )


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
    yield "  microbatch: rows x microbatches of an update, per data rank. peak: memory of the fullest device."
    yield (
        "  MFU counts attention over all keys (not halved for the causal mask) and the output head, but no embedding lookup; "
        "HFU adds recomputed blocks."
    )


def _head(a: Answer) -> Iterator[str]:
    problem = a.problem
    yield (
        f"{problem.shape.name or problem.shape.family}: {format_count(a.parameters)} parameters on {a.devices:,} x {a.device} "
        f"({gib(a.capacity_bytes)} each)"
    )
    packed = f" in documents of {problem.attended:,.0f} tokens" if problem.document_length else ""
    yield (
        f"One update: {problem.global_batch_size:,} rows of {problem.max_length:,} tokens{packed}; "
        f"{problem.param_dtype} compute, {problem.reduce_dtype} gradient reduction, "
        f"{problem.master_dtype} weights, optimizer {problem.optimizer}"
    )
    if problem.optimizer not in OPTIMIZERS:
        yield f"The planner does not know {problem.optimizer}: its states and step are counted as those of adamw."
    yield f"{a.considered:,} legal layouts searched"
    yield ""


def _first(a: Answer) -> Iterator[str]:
    d = a.first
    if d is None:
        yield "Nothing fits with all states on the devices. Each of these changes alone makes a layout fit, the smallest first:"
        yield from (f"  - {line}" for line in a.would_fit)
        return
    approach = APPROACHES[a.path]
    yield f"Test first: {approach.name} ({approach.situation})"
    yield f"  {d.name}: {keys_line(d)}"
    yield f"  {format_seconds(d.seconds)} per update: {parts_line(d)}"
    if d.sent_bytes:
        sent = ", ".join(f"{gib(size)} over {axis}" for axis, size in d.sent_bytes.items())
        yield f"  Each device sends per update: {sent}"
    yield f"  Check before a long run: {approach.checks}"
    yield from bar(d, a.capacity_bytes)
    yield ""
    yield "Layouts that fit, the best of each kind, fastest first (of layouts within 2%, the simpler one first):"
    # The layout to test first need not be among the fastest: it then stands below them.
    known = [ranked.name for ranked in a.ranked]
    yield from layout_table(a.ranked if d.name in known else (*a.ranked, d))


def _rejected(a: Answer) -> Iterator[str]:
    if a.rejected:
        yield ""
        yield "Does not fit, even with one row per microbatch, everything recomputed and the finest sharding:"
    shown = a.rejected[:MOST_REJECTED]
    for r in shown:
        name = f"{r.family:<{max(len(each.family) for each in shown) + 2}}"
        yield f"  {name}{gib(r.device_bytes):>12}, mostly {r.mostly}" + (f"  -> {r.change}" if r.change else "")
    if len(a.rejected) > MOST_REJECTED:
        yield f"  and {len(a.rejected) - MOST_REJECTED} more (--json lists all)"
    if a.illegal:
        reasons = sorted(a.illegal.items(), key=lambda item: -item[1])
        yield "Not legal (how many sizes of tp, cp and pp): " + "; ".join(f"{reason} ({n})" for reason, n in reasons)


def _interruptions(a: Answer) -> Iterator[str]:
    i = a.interruptions
    yield (
        f"Failures: one every {format_seconds(i.mtbf_seconds)} is expected ({FAILURES_SOURCE}); a save takes "
        f"{format_seconds(i.save_seconds)} and a restart {format_seconds(i.restart_seconds)} (assumed)"
    )
    yield (
        f"  save every {format_seconds(i.interval_seconds)} (Daly 2006): {i.effective:.1%} of the time is then effective "
        "training time"
    )


def _training(a: Answer, tokens: float) -> Iterator[str]:
    """Days for so many tokens, by C = 6PD and by the predicted step."""
    if a.first is not None:
        flops = training_flops(a.parameters, tokens)
        seconds = tokens / a.first.tokens_per_second
        yield (
            f"Training on {format_count(tokens)} tokens: C = 6PD = {flops:.3g} FLOP take {format_seconds(seconds)} at the "
            f"predicted speed ({format_flops(flops / seconds)}/s by this count), "
            f"{format_seconds(seconds / a.interruptions.effective)} with failures"
        )


def text(a: Answer, tokens: float | None = None) -> Iterator[str]:
    """The whole answer, line by line. tokens: of the whole run, for its duration."""
    yield from _head(a)
    yield from _first(a)
    yield from _rejected(a)
    if a.limits:
        yield ""
        yield "What this layout does not solve:"
        yield from (f"  - {line}" for line in a.limits)
    yield ""
    yield from _interruptions(a)
    if tokens:
        yield from _training(a, tokens)

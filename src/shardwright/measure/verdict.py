"""What limits a run, from its figures: one verdict, what would help and what would not. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.units import format_seconds

WORTH = 0.10
"""A share of an update that is less than this limits nothing."""


@dataclass(frozen=True)
class Figures:
    """Seconds of one update, medians; None was not measured.

    exposed_seconds: by axis, communication that no compute covers; on `pp` that is waiting for other stages. host_seconds:
    neither compute nor communication ran. compute_seconds, products_seconds: any operator, and of these matrix products and
    attention. slowest_factor: own seconds of the slowest rank over the median of its peers; 1 where ranks are alike.
    planned_idle: fraction of the update that the pipeline schedule idles by itself.
    """

    step_seconds: float
    wait_seconds: float = 0.0
    padding_fraction: float = 0.0
    exposed_seconds: Mapping[str, float] | None = field(default_factory=dict)
    host_seconds: float | None = None
    compute_seconds: float | None = None
    products_seconds: float | None = None
    slowest_rank: int | None = None
    slowest_factor: float = 1.0
    planned_idle: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What limits: its name, the share of an update that it takes, and the sentences for a person."""

    limit: str
    share: float
    evidence: str
    helps: str
    helps_not: str

    def __str__(self) -> str:
        text = f"What limits this run: {self.limit}, {self.evidence}. Would help: {self.helps}."
        return f"{text} Would not: {self.helps_not}." if self.helps_not else text


def what_limits(figures: Figures) -> Verdict:
    """The part of an update that takes most beyond matrix products, where it is worth naming."""
    found = sorted(_candidates(figures), key=lambda verdict: -verdict.share)
    worst = next((verdict for verdict in found if verdict.share >= WORTH), None)
    if worst is None:
        return _nothing(figures, found[0] if found else None)
    straggler = next((verdict for verdict in found if verdict.limit.startswith("rank")), None)
    if straggler and straggler.share >= WORTH and worst.limit.startswith("communication"):
        # the others wait for it inside of their collectives
        return straggler if straggler.share >= worst.share / 2 else worst
    return worst


def _nothing(figures: Figures, most: Verdict | None) -> Verdict:
    evidence = "nothing else takes a tenth of an update"
    if most is not None and most.share >= 0.01:
        evidence += f" (most: {most.limit}, {most.share:.0%})"
    if figures.exposed_seconds is None:
        return Verdict(
            "compute or communication",
            1.0,
            f"{evidence}; communication was not measured",
            "to know more: logging.profile_steps, or `shardwright bench`",
            "",
        )
    share = figures.compute_seconds / figures.step_seconds if figures.compute_seconds is not None else 1.0
    return Verdict(
        "compute",
        share,
        evidence,
        "more or faster devices, a narrower dtype, a smaller model",
        "another data-parallel kind",
    )


def _candidates(f: Figures) -> Iterator[Verdict]:
    step = f.step_seconds

    def of_step(seconds: float) -> str:
        return f"{format_seconds(seconds)} of {format_seconds(step)} ({seconds / step:.0%})"

    yield Verdict(
        "waiting for data",
        f.wait_seconds / step,
        f"{of_step(f.wait_seconds)} an update",
        "faster storage, cores left for the loader, longer rows",
        "another layout: every one of them waits for the same rows",
    )
    computing = step - f.wait_seconds if f.compute_seconds is None else f.compute_seconds
    yield Verdict(
        "padding",
        f.padding_fraction * computing / step,
        f"{f.padding_fraction:.0%} of all positions are computed for nothing",
        "data.batching: pack, or bucket",
        "another layout, which pads as much",
    )
    for axis, seconds in (f.exposed_seconds or {}).items():
        if axis == "pp":
            yield _pipeline(f, seconds, of_step(seconds))
        else:
            yield Verdict(
                f"communication of {axis}",
                seconds / step,
                f"{of_step(seconds)} an update is not covered by compute",
                _less_of(axis),
                "another way of batching rows of the same length",
            )
    if f.slowest_factor > 1 and f.slowest_rank is not None:
        yield Verdict(
            f"rank {f.slowest_rank}, slower than its peers",
            1 - 1 / f.slowest_factor,
            f"{f.slowest_factor:.2f} times their time; they wait for it",
            "another machine for that rank, or what else runs there stopped",
            "another layout: the slowest rank sets the pace of all",
        )
    if f.host_seconds is not None:
        yield Verdict(
            "the host",
            f.host_seconds / step,
            f"{of_step(f.host_seconds)} an update neither an operator nor a collective runs",
            "more rows a microbatch, memory.compile",
            "less communication",
        )
    if f.compute_seconds is not None and f.products_seconds is not None:
        rest = f.compute_seconds - f.products_seconds
        if rest > f.products_seconds:
            yield Verdict(
                "memory-bound operators",
                rest / step,
                f"{of_step(rest)} an update is no matrix product",
                "memory.compile, memory.activation_checkpointing none, a wider model, a narrower dtype",
                "faster matrix products",
            )


def _pipeline(f: Figures, seconds: float, shown: str) -> Verdict:
    planned = "" if f.planned_idle is None else f"; the schedule itself idles {f.planned_idle:.0%}"
    return Verdict(
        "pipeline idle",
        seconds / f.step_seconds,
        f"{shown} an update ranks wait for other stages{planned}",
        "more microbatches an update, interleaved_1f1b or zero_bubble, fewer stages",
        "faster links, unless activations are large",
    )


def _less_of(axis: str) -> str:
    if axis == "tp":
        return "tensor parallelism within a node only, a smaller tp_size, sequence_parallel"
    if axis == "cp":
        return "a smaller cp_size, longer rows a rank, cp_attention ring where it overlaps"
    return "more microbatches an update with zero1 or ddp, bf16 on the wire (precision.reduce_dtype), hsdp, prefetch"

"""The bottleneck of a run, from its measured times: its name, what would help and what would not. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.units import format_seconds

MIN_SHARE = 0.10
"""Anything that takes a smaller share of an update is no bottleneck."""


@dataclass(frozen=True)
class UpdateTimes:
    """One update: medians in seconds. None means not measured."""

    step_seconds: float
    wait_seconds: float = 0.0
    """Waiting for data."""
    padding_fraction: float = 0.0
    exposed_seconds: Mapping[str, float] | None = field(default_factory=dict)
    """By axis, communication that no compute covers; on `pp` waiting for other stages."""
    host_seconds: float | None = None
    """Neither compute nor communication ran."""
    compute_seconds: float | None = None
    products_seconds: float | None = None
    """Of the compute: matrix products and attention."""
    slowest_rank: int | None = None
    slowest_factor: float = 1.0
    """Own seconds of the slowest rank / the median of its peers."""
    planned_idle: float | None = None
    """Fraction of the update in which the pipeline schedule idles by design."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run: its name, the share of an update that it takes, and sentences for a person."""

    limit: str
    share: float
    evidence: str
    helps: str
    helps_not: str

    def __str__(self) -> str:
        text = f"What limits this run: {self.limit}, {self.evidence}. Would help: {self.helps}."
        return f"{text} Would not: {self.helps_not}." if self.helps_not else text


def find_bottleneck(times: UpdateTimes) -> Bottleneck:
    """The largest part of an update beside matrix products, if its share is at least `MIN_SHARE`; else compute."""
    found = sorted(_candidates(times), key=lambda one: -one.share)
    if found[0].share < MIN_SHARE:
        return _no_bottleneck(times, found[0])
    straggler = next((one for one in found if one.limit.startswith("rank")), None)
    # the other ranks wait for a slow rank inside of their collectives, so both show
    if (
        straggler
        and found[0].limit.startswith("communication")
        and straggler.share >= max(MIN_SHARE, found[0].share / 2)
    ):
        return straggler
    return found[0]


def _no_bottleneck(times: UpdateTimes, most: Bottleneck) -> Bottleneck:
    evidence = "nothing else takes a tenth of an update"
    if most.share >= 0.01:
        evidence += f" (most: {most.limit}, {most.share:.0%})"
    if times.exposed_seconds is None:
        return Bottleneck(
            "compute or communication",
            1.0,
            f"{evidence}; communication was not measured",
            "to know more: logging.profile_steps, or `shardwright bench`",
            "",
        )
    share = times.compute_seconds / times.step_seconds if times.compute_seconds is not None else 1.0
    helps = "more or faster devices, a narrower dtype, a smaller model"
    return Bottleneck("compute", share, evidence, helps, "another data-parallel kind")


def _candidates(t: UpdateTimes) -> Iterator[Bottleneck]:
    step = t.step_seconds

    def of_step(seconds: float) -> str:
        return f"{format_seconds(seconds)} of {format_seconds(step)} ({seconds / step:.0%})"

    yield Bottleneck(
        "waiting for data",
        t.wait_seconds / step,
        f"{of_step(t.wait_seconds)} an update",
        "faster storage, cores left for the loader, longer rows",
        "another layout: every layout waits for the same rows",
    )
    computing = step - t.wait_seconds if t.compute_seconds is None else t.compute_seconds
    yield Bottleneck(
        "padding",
        t.padding_fraction * computing / step,
        f"{t.padding_fraction:.0%} of all positions are padding",
        "data.batching: pack, or bucket",
        "another layout, which pads as much",
    )
    for axis, seconds in (t.exposed_seconds or {}).items():
        if axis == "pp":
            planned = "" if t.planned_idle is None else f"; the schedule itself idles {t.planned_idle:.0%}"
            yield Bottleneck(
                "pipeline idle",
                seconds / step,
                f"{of_step(seconds)} an update ranks wait for other stages{planned}",
                "more microbatches an update, interleaved_1f1b or zero_bubble, fewer stages",
                "faster links, unless activations are large",
            )
        else:
            yield Bottleneck(
                f"communication of {axis}",
                seconds / step,
                f"{of_step(seconds)} an update is not covered by compute",
                _LESS_COMMUNICATION.get(axis, _LESS_COMMUNICATION["dp"]),
                "another way of batching rows of the same length",
            )
    if t.slowest_factor > 1 and t.slowest_rank is not None:
        yield Bottleneck(
            f"rank {t.slowest_rank}, slower than its peers",
            1 - 1 / t.slowest_factor,
            f"{t.slowest_factor:.2f} times their time; the others wait for this rank",
            "another machine for that rank, or an end to the other programs there",
            "another layout: the slowest rank sets the pace of all",
        )
    if t.host_seconds is not None:
        yield Bottleneck(
            "the host",
            t.host_seconds / step,
            f"{of_step(t.host_seconds)} an update neither an operator nor a collective runs",
            "more rows a microbatch, memory.compile",
            "less communication",
        )
    if t.compute_seconds is not None and t.products_seconds is not None:
        rest = t.compute_seconds - t.products_seconds
        if rest > t.products_seconds:
            yield Bottleneck(
                "memory-bound operators",
                rest / step,
                f"{of_step(rest)} an update is no matrix product",
                "memory.compile, memory.activation_checkpointing none, a wider model, a narrower dtype",
                "faster matrix products",
            )


_LESS_COMMUNICATION = {
    "tp": "tensor parallelism within a node only, a smaller tp_size, sequence_parallel",
    "cp": "a smaller cp_size, longer rows a rank, cp_attention ring where communication overlaps",
    "dp": "more microbatches an update with zero1 or ddp, bf16 reductions (precision.reduce_dtype), hsdp, prefetch",
}
"""What helps, by axis; the data axes and the group of all ranks share one line."""

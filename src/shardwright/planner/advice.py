"""Which layout to test first, what that layout does not solve, and which changes would make some layout fit.

The ways of training and their situations are those of the project's notes on distributed training (October 2026), with one
added for long rows: DDP when a useful batch fits; FSDP2 when replicated states do not fit; ZeRO with offload where that is set
up; tensor and pipeline parallelism when layers are too large for a device, or devices too many for their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.parameters import counts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.catalogue import CATALOGUE
from shardwright.planner.host import host_bytes
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.search import Choice, Found, Search, complexity
from shardwright.planner.space import mesh_shapes
from shardwright.units import format_bytes_binary, format_seconds

if TYPE_CHECKING:
    from shardwright.layout.axes import Axes

CLOSE = 1.25
"""A simpler way is tested first when its predicted time is within this factor of the fastest."""
STILL_USEFUL = 1.5
"""Doubling the ranks is of little use below this speed-up."""


class Approach(NamedTuple):
    """One way of training, from the simplest to the most involved."""

    name: str
    situation: str  # when this way is the right one
    checks: str  # what to look at before a long run


APPROACHES = {
    "ddp": Approach(
        "DDP",
        "a useful batch fits on each device",
        "data loading, token weighting over all ranks, synchronization",
    ),
    "fsdp": Approach(
        "FSDP2",
        "parameters, gradients and optimizer states do not fit on each device: shard them",
        "units gathered together, dtypes, measured peak memory, save and restart",
    ),
    "context": Approach(
        "FSDP2 with context parallelism",
        "the activations of long rows do not fit, and FSDP does not divide activations",
        "attention between the parts of a row, positions, labels shifted before the split, communication",
    ),
    "parallel": Approach(
        "tensor or pipeline parallelism",
        "single layers are too large, or devices too many, for data parallelism alone",
        "support by the model, links between the devices, communication, checkpoints under other layouts",
    ),
    "offload": Approach(
        "ZeRO-3 with offload",
        "the states fit only with shards in host memory",
        "host memory, what is really sharded, versions, checkpoints",
    ),
}


def approach_of(layout: Layout) -> str:
    """The key of `APPROACHES` for a layout."""
    if layout.offload != "none":
        return "offload"
    if layout.axes.tp > 1 or layout.axes.pp > 1:
        return "parallel"
    if layout.axes.cp > 1:
        return "context"
    return "ddp" if layout.data_parallel == "ddp" else "fsdp"


def first_to_test(search: Search, found: Found) -> Choice | None:
    """The simplest layout whose time is close to the fastest; None when nothing fits.

    The best layout of a kind may split rows (cp) where that is not needed: the best one without cp is looked at too.
    """
    ranked = found.ranked()
    if not ranked:
        return None
    if not search.problem.global_batch_size % search.devices:
        for kind in {c.family for c in ranked if approach_of(c.layout) == "context"}:
            plain = search.only(1, 1, 1, kind)
            ranked += [plain] if plain else []
    fastest = min(choice.seconds for choice in ranked)
    for approach in APPROACHES:
        close = [c for c in ranked if approach_of(c.layout) == approach and c.seconds <= CLOSE * fastest]
        if close:
            return min(close, key=lambda c: (complexity(c.layout), c.seconds))
    return ranked[0]


# ---- what the layout does not solve


def remaining_limits(search: Search, choice: Choice, composition: dict[str, float], allocated: float) -> Iterator[str]:
    """Sentences: loading and padding; activations that data parallelism does not divide; devices that no longer help."""
    yield (
        "Slow data loading, preprocessing or padding: no layout changes them. The metrics data/wait_seconds and "
        "data/padding_fraction show them."
    )
    activations = composition.get("activations", 0.0) + composition.get("recomputation and workspace", 0.0)
    if allocated and activations > 0.3 * allocated and choice.layout.axes.cp == 1:
        yield (
            f"Activations: {format_bytes_binary(activations)} of the {format_bytes_binary(allocated)} allocated at the peak. "
            "FSDP does not divide activations, and more data ranks at the same microbatch do not either: recompute, use a "
            "smaller microbatch, or split rows with cp_size or tp_size."
        )
    yield useful_ranks(search, choice)


def useful_ranks(search: Search, choice: Choice) -> str:
    """A sentence: the number of devices beyond which doubling the data ranks gives less than 1.5 times the speed."""
    problem, layout = search.problem, choice.layout
    devices, seconds = search.devices, choice.seconds
    while True:
        axes, rows = _doubled(layout.axes), layout.microbatch_rows
        while rows > 1 and problem.global_batch_size % (axes.data_ranks * rows):
            rows -= 1
        if problem.global_batch_size % (axes.data_ranks * rows):
            return (
                f"More than {devices:,} devices with the same tp, cp and pp: the {problem.global_batch_size:,} rows of an "
                "update cannot be divided over twice as many data ranks, and the batch is part of the objective."
            )
        wider = replace(layout, axes=axes, microbatch_rows=rows)
        if layout.schedule == "1f1b" and wider.microbatches(problem) < axes.pp:
            return (
                f"More than {devices:,} devices with the same tp, cp and pp: an update would have fewer microbatches than "
                "pipeline stages."
            )
        faster = search.clock.step(wider, choice.stage_blocks).total
        if seconds / faster < STILL_USEFUL:
            return (
                f"More than {devices:,} devices: each would have little work. {2 * devices:,} devices are predicted to be "
                f"{seconds / faster:.2f} times as fast, not 2 times."
            )
        devices, seconds, layout = 2 * devices, faster, wider


def _doubled(axes: Axes) -> Axes:
    if axes.dp_replicate > 1:
        return replace(axes, dp_replicate=2 * axes.dp_replicate)
    return replace(axes, dp_shard=2 * axes.dp_shard)


# ---- nothing fits


def _leanest(search: Search, kinds: tuple[str, ...], split: str | None = None) -> float | None:
    """Bytes on a device of the first layout that fits, of one way of splitting the model or of any; None: nothing fits."""
    legal, _ = mesh_shapes(search.problem, search.devices)
    for mesh_shape in legal:
        for kind in kinds if split in (None, mesh_shape.family) else ():
            least = search.least(mesh_shape, kind)
            if least is not None and least[1] <= search.capacity:
                return least[1]
    return None


def more_devices(search: Search, family: str) -> str:
    """How many devices layouts of `family` need: doubled until the leanest fits, 64 times as many at most."""
    kind, _, split = family.partition("+")
    for devices in (search.devices * 2**i for i in range(1, 7)):
        wider = Search(search.problem, devices)
        if _leanest(wider, (kind,), split) is not None:
            return f"{devices:,} devices instead of {search.devices:,}"
    return f"does not fit on {64 * search.devices:,} devices either"


def _least_bytes(search: Search, problem: Problem, devices: int, device_name: str = "") -> float | None:
    """Bytes on a device of the first sharded or replicated layout that fits under a change; None: nothing fits."""
    problem = replace(problem, device=CATALOGUE[device_name]) if device_name else problem
    return _leanest(Search(problem, devices), ("zero3", "zero1", "ddp"))


def what_would_fit(search: Search) -> Iterator[str]:
    """Changes, the smallest first, each of which alone would make some layout fit with all states on the devices."""
    problem, devices = search.problem, search.devices
    number, width = counts(problem.shape), DTYPE_BYTES[problem.param_dtype]
    unit = max(number.block, number.embedding, number.head) * width
    if 2 * unit > search.capacity:
        yield (
            f"Even one unit does not fit: the largest one takes {format_bytes_binary(unit)} when it is gathered, and its "
            "gradient as much again. Use smaller units, or tp_size, which also splits the computation of a layer."
        )
    for more in (devices * 2**i for i in range(1, 11)):
        needed = _least_bytes(search, problem, more)
        if needed is not None:
            yield (
                f"{more:,} devices instead of {devices:,}: the states are then divided further, and the leanest layout needs "
                f"{format_bytes_binary(needed)} on each device."
            )
            break
    larger = sorted(
        (d for d in CATALOGUE.values() if d.memory_bytes > search.capacity and d.kind == "cuda"),
        key=lambda d: d.memory_bytes,
    )
    for bigger in larger:
        if _least_bytes(search, problem, devices, bigger.name) is not None:
            yield (
                f"As many devices with {format_bytes_binary(bigger.memory_bytes)} each, such as {bigger.name} "
                f"(--device {bigger.name})."
            )
            break
    length = problem.max_length // 2
    while length >= 256:
        if _least_bytes(search, replace(problem, max_length=length), devices) is not None:
            yield f"max_length {length:,} instead of {problem.max_length:,}. This changes the objective."
            break
        length //= 2
    wide = Search(problem, devices, ("offload",))
    for host in wide.run().ranked()[:1]:
        per_node = host_bytes(problem, host.layout).peak * min(devices, search.device.node.devices)
        yield (
            f"memory.cpu_offload params (here --offload): {format_bytes_binary(host.device_bytes)} on each device, "
            f"{format_bytes_binary(per_node)} on each host, {format_seconds(host.seconds)} per update."
        )
    yield (
        f"Training fewer parameters (model.freeze, LoRA): frozen weights in {problem.param_dtype} need "
        f"{format_bytes_binary(number.total * width / devices)} on each device, and no gradients or optimizer states. "
        "This changes the objective."
    )

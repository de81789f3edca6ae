"""Which path to test first, what it needs checking, what it will not fix, and what would make a job fit.

The situations and their paths are those of the project's notes on distributed training (October 2026), with
one added for long rows: DDP when a useful batch fits; FSDP2 when replicated state does not; a ZeRO stage with
offload where that is set up; tensor and pipeline parallelism when layer compute or scale needs more
partitioning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.inventory import counts
from shardwright.dtypes import DTYPE_BYTES
from shardwright.planner.catalogue import CATALOGUE
from shardwright.planner.host import host_bytes
from shardwright.planner.job import Job, Layout
from shardwright.planner.search import Choice, Found, Search, complexity
from shardwright.planner.space import shells
from shardwright.units import format_bytes_binary, format_seconds

if TYPE_CHECKING:
    from shardwright.layout.axes import Axes

CLOSE = 1.25
"""A simpler path is tested first when it is predicted within this factor of the fastest."""
STILL_USEFUL = 1.5
"""Doubling the ranks is of little use below this speed-up."""


class Path(NamedTuple):
    """One row of the notes' table of paths."""

    name: str
    situation: str
    checks: str


PATHS = {
    "ddp": Path(
        "DDP", "A useful batch fits; scale data throughput", "Loading, global token weighting, synchronization"
    ),
    "fsdp": Path(
        "FSDP2", "Replicated state does not fit; retain a PyTorch model", "Grouping, dtypes, peaks, save and restart"
    ),
    "offload": Path(
        "ZeRO-3 with offload",
        "State fits only with shards on the host",
        "Actual sharding, versions, checkpoint compatibility",
    ),
    "context": Path(
        "FSDP2 with CP",
        "Activations of long rows do not fit; FSDP does not divide them",
        "Attention across the parts of a row, positions, labels shifted before the split, communication",
    ),
    "parallel": Path(
        "TP / PP", "Layer compute or scale needs more partitioning", "Model support, topology, communication, layouts"
    ),
}


def path_of(layout: Layout) -> str:
    """Which row of the table a layout belongs to."""
    if layout.offload != "none":
        return "offload"
    if layout.axes.tp > 1 or layout.axes.pp > 1:
        return "parallel"
    if layout.axes.cp > 1:
        return "context"
    return "ddp" if layout.data_parallel == "ddp" else "fsdp"


def first_to_test(search: Search, found: Found) -> Choice | None:
    """The simplest path that is close to the fastest; None when nothing fits.

    A family's best may split rows (cp) where it need not: its best without is looked at too.
    """
    ranked = found.ranked()
    if not ranked:
        return None
    if not search.job.global_batch_size % search.devices:
        for kind in {c.family for c in ranked if path_of(c.layout) == "context"}:
            plain = search.only(1, 1, 1, kind)
            ranked += [plain] if plain else []
    fastest = min(choice.seconds for choice in ranked)
    for path in ("ddp", "fsdp", "context", "parallel", "offload"):
        close = [c for c in ranked if path_of(c.layout) == path and c.seconds <= CLOSE * fastest]
        if close:
            return min(close, key=lambda c: (complexity(c.layout), c.seconds))
    return ranked[0]


@dataclass(frozen=True)
class Limits:
    """What the path will not fix, as sentences with this job's numbers."""

    sentences: tuple[str, ...]


def will_not_fix(search: Search, choice: Choice, composition: dict[str, float], allocated: float) -> Limits:
    """Loading and padding; activations that no data rank divides; the number of ranks beyond which local work
    is too small.
    """
    lines = [
        "Slow loading, preprocessing or padding: no layout changes them. Look at data/wait_seconds and "
        "data/padding_fraction."
    ]
    activations = composition.get("activations", 0.0) + composition.get("recomputation and workspace", 0.0)
    if allocated and activations > 0.3 * allocated and choice.layout.axes.cp == 1:
        lines.append(
            f"Activations: {format_bytes_binary(activations)} of the {format_bytes_binary(allocated)} allocated "
            f"at the peak. FSDP does not divide them, nor do more data ranks at a fixed microbatch: recompute, "
            f"lower the microbatch, or split rows with cp_size "
            "or tp_size."
        )
    useful = useful_ranks(search, choice)
    if useful:
        lines.append(useful)
    return Limits(tuple(lines))


def useful_ranks(search: Search, choice: Choice) -> str:
    """The number of devices beyond which doubling the data ranks gives less than 1.5 times the speed, as a
    sentence.
    """
    job, layout = search.job, choice.layout
    devices, seconds = search.devices, choice.seconds
    while True:
        axes = _doubled(layout.axes)
        rows = layout.microbatch_rows
        while rows > 1 and job.global_batch_size % (axes.data_ranks * rows):
            rows -= 1
        if job.global_batch_size % (axes.data_ranks * rows):
            return (
                f"More than {devices:,} devices with these axes: {job.global_batch_size:,} rows per update "
                f"do not divide over twice as "
                "many data ranks, and the batch is part of the objective."
            )
        wider = replace(layout, axes=axes, microbatch_rows=rows)
        if layout.schedule == "1f1b" and wider.microbatches(job) < axes.pp:
            return (
                f"More than {devices:,} devices with these axes: fewer microbatches than pipeline stages would be left."
            )
        faster = search.clock.step(wider, choice.stage_blocks).total
        if seconds / faster < STILL_USEFUL:
            return (
                f"Beyond {devices:,} devices local work is small: {2 * devices:,} are predicted "
                f"{seconds / faster:.2f} times as fast, not 2."
            )
        devices, seconds, layout = 2 * devices, faster, wider


def _doubled(axes: Axes) -> Axes:
    if axes.dp_replicate > 1:
        return replace(axes, dp_replicate=2 * axes.dp_replicate)
    return replace(axes, dp_shard=2 * axes.dp_shard)


# ---- nothing fits


def _leanest(search: Search, kinds: tuple[str, ...], split: str | None = None) -> float | None:
    """Bytes on a device of the first layout that fits, of one way of splitting the model or of any; None for none."""
    legal, _ = shells(search.job, search.devices)
    for shell in legal:
        for kind in kinds if split in (None, shell.family) else ():
            least = search.least(shell, kind)
            if least is not None and least[1] <= search.capacity:
                return least[1]
    return None


def more_devices(search: Search, family: str) -> str:
    """How many devices the family needs, as a change: doubled until its leanest layout fits, 64 times at most."""
    kind, _, split = family.partition("+")
    for devices in (search.devices * 2**i for i in range(1, 7)):
        wider = Search(search.job, search.device, devices, search.clock.software, search.program)
        if _leanest(wider, (kind,), split) is not None:
            return f"{devices:,} devices instead of {search.devices:,}"
    return f"not on {64 * search.devices:,} devices either"


def _try(
    search: Search, job: Job, devices: int, device_name: str = "", kinds: tuple[str, ...] = ("zero3", "zero1", "ddp")
) -> float | None:
    device = CATALOGUE[device_name] if device_name else search.device
    return _leanest(Search(job, device, devices, search.clock.software, search.program), kinds)


def offloaded(search: Search) -> Choice | None:
    """The best layout with shards and optimizer on the host, if that fits."""
    wide = Search(search.job, search.device, search.devices, search.clock.software, search.program, ("offload",))
    ranked = wide.run().ranked()
    return ranked[0] if ranked else None


def what_would_fit(search: Search) -> list[str]:
    """Changes, nearest first, each of which alone would make some layout fit with all state on the
    devices.
    """
    job, devices = search.job, search.devices
    lines = []
    unit = largest_unit_bytes(job)
    if 2 * unit > search.capacity:
        lines.append(
            f"Even one unit does not fit: the largest one gathers {format_bytes_binary(unit)} and makes a gradient "
            f"as large. Cut it: smaller "
            "units, or tp_size, which splits the computation of a layer too."
        )
    for more in (devices * 2**i for i in range(1, 11)):
        needed = _try(search, job, more)
        if needed is not None:
            lines.append(
                f"{more:,} devices instead of {devices:,}: the states are then divided finely enough, "
                f"{format_bytes_binary(needed)} on each at the leanest."
            )
            break
    larger = sorted(
        (d for d in CATALOGUE.values() if d.memory_bytes > search.capacity and d.kind == "cuda"),
        key=lambda d: d.memory_bytes,
    )
    bigger = next((d for d in larger if _try(search, job, devices, d.name) is not None), None)
    if bigger:
        lines.append(
            f"A device with {format_bytes_binary(bigger.memory_bytes)}, such as {bigger.name}, at the same number."
        )
    length = job.max_length // 2
    while length >= 256:
        if _try(search, replace(job, max_length=length), devices) is not None:
            lines.append(f"max_length {length:,} instead of {job.max_length:,}: this changes the objective.")
            break
        length //= 2
    host = offloaded(search)
    if host is not None:
        per_node = host_bytes(job, host.layout).peak * min(devices, search.device.node.devices)
        lines.append(
            f"memory.cpu_offload params: {format_bytes_binary(host.device_bytes)} on a device, "
            f"{format_bytes_binary(per_node)} on each host, {format_seconds(host.seconds)} per update."
        )
    weights = counts(job.shape).total * DTYPE_BYTES[job.param_dtype] / devices
    lines.append(
        f"Training fewer parameters (model.freeze, LoRA): frozen weights in {job.param_dtype} need "
        f"{format_bytes_binary(weights)} a rank and no "
        "gradients or optimizer states. That is another objective."
    )
    return lines


def largest_unit_bytes(job: Job) -> float:
    """Bytes that the largest block, embedding or head needs when it is gathered whole."""
    number = counts(job.shape)
    return max(number.block, number.embedding, number.head) * DTYPE_BYTES[job.param_dtype]

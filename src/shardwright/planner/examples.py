"""Worked examples: the arithmetic of sharding in small, each line computed by the functions the planner itself uses.

Every function states one piece of arithmetic for any numbers; `worked_examples` gives it the numbers of the published
texts, so that what people learned elsewhere can be found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.layout.zero import STAGES
from shardwright.planner.reliability import training_flops, training_seconds
from shardwright.units import GB, TB

ZERO = "Rajbhandari et al. 2019 (arXiv:1910.02054), section 3.1 and figure 1"


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's model states."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def ideal_states(
    parameter_count: float,
    data_parallel: str,
    degree: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> StateBytes:
    """Model states per rank by the ZeRO paper's account: each kind divides what `layout/zero.py` says by `degree`.

    The defaults are mixed-precision Adam: 2 + 2 + 12 bytes per parameter (Rajbhandari et al. 2019, section 3.1).
    """
    stage = STAGES[data_parallel]

    def part(size: float, sharded: bool) -> float:
        return parameter_count * size / (degree if sharded else 1)

    return StateBytes(
        part(parameter_bytes, stage.shards_parameters),
        part(gradient_bytes, stage.shards_gradients),
        part(optimizer_bytes, stage.shards_optimizer),
    )


def _size(size_bytes: float, digits: int = 1) -> str:
    unit, name = (TB, "TB") if size_bytes >= TB else (GB, "GB")
    return f"{size_bytes / unit:.{digits}f}".removesuffix(".0") + f" {name}"


def _count(value: float) -> str:
    return f"{value / 1e9:g}e9" if value >= 1e9 else f"{value:g}"


def state_lines(parameters: float) -> list[str]:
    """Model states of mixed-precision Adam on one device: 2 + 2 + 12 bytes per parameter."""
    total = ideal_states(parameters, "ddp", 1).total
    name = _count(parameters)
    return [
        f"model states = (2 + 2 + 12) x {name} bytes = 16 x {name} = {_size(total, 2 if total >= TB else 1)}  [{ZERO}]"
    ]


def stage_lines(degree: int) -> list[str]:
    """Bytes per parameter of each ZeRO stage."""
    lines = []
    for kind, arithmetic in (
        ("zero1", "2 + 2 + 12 / {n}"),
        ("zero2", "2 + (2 + 12) / {n}"),
        ("zero3", "(2 + 2 + 12) / {n}"),
    ):
        total = ideal_states(1, kind, degree).total
        lines.append(f"{kind} on {degree} ranks: {arithmetic.format(n=degree)} = {total:g}P bytes  [{ZERO}]")
    return lines


def shard_lines(parameters: float, degree: int, device_bytes: float | None = None) -> list[str]:
    """Full sharding: states per rank, and what a device has left."""
    s = ideal_states(parameters, "zero3", degree)
    name = _count(parameters)
    weights, gradients, optimizer = (
        _size(part).removesuffix(" GB") for part in (s.parameters, s.gradients, s.optimizer)
    )
    lines = [
        f"zero3, {name} over {degree} ranks: weights 2 x {name} / {degree} = {weights} GB, gradients {gradients} GB, "
        f"optimizer 12 x {name} / {degree} = {optimizer} GB",
        f"{weights} + {gradients} + {optimizer} = {_size(s.total)} per rank  [{ZERO}]",
    ]
    if device_bytes is not None:
        rest = _size(device_bytes - s.total)
        lines.append(
            f"{_size(device_bytes)} - {_size(s.total)} = {rest} left for activations, gathered units and workspace"
        )
    return lines


def peak_lines(
    parameters: float, degree: int, blocks: int, activation_bytes: float, workspace_bytes: float
) -> list[str]:
    """The peak in the backward of one block: fp32 throughout, two Adam moments, no master copy."""
    whole = ideal_states(parameters, "zero3", 1, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8).total
    states = ideal_states(parameters, "zero3", degree, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8).total
    block = parameters / blocks * 4
    total = states + activation_bytes + block + block + workspace_bytes
    terms = " + ".join(
        _size(part).removesuffix(" GB") for part in (states, activation_bytes, block, block, workspace_bytes)
    )
    return [
        f"{_count(parameters)} parameters in fp32: (4 + 4 + 8) bytes = {_size(whole)}, over {degree} ranks {_size(states)}",
        f"one of {blocks} blocks gathered: {_size(block)}, and its gradient before the reduce-scatter: {_size(block)}",
        f"peak in its backward = states + activations + gathered + gradient + workspace = {terms} = {_size(total)}",
    ]


def matrix_lines(rows: int, columns: int, element_bytes: int, payload_bytes: float, bandwidth: float) -> list[str]:
    """The size of one gathered matrix, and the least time a payload takes on a link."""
    size = rows * columns * element_bytes
    return [
        f"{rows:,} x {columns:,} x {element_bytes} bytes = {_size(size, 2)}",
        f"{_size(payload_bytes)} / {_size(bandwidth)}/s = {payload_bytes / bandwidth * 1e3:.0f} ms at least",
    ]


def batch_lines(ranks: int, rows: int, microbatches: int) -> list[str]:
    """Rows of one update: what accumulation makes of the microbatch."""
    return [
        f"{ranks} ranks x {rows} rows x {microbatches} microbatches = {prod((ranks, rows, microbatches))} sequences per update"
    ]


def training_lines(parameters: float, tokens: float, flops_per_second: float) -> list[str]:
    """C = 6PD and the days it takes at a sustained rate."""
    flops = training_flops(parameters, tokens)
    days = training_seconds(parameters, tokens, flops_per_second) / 86400
    return [
        f"C = 6PD = 6 x {_count(parameters)} x {_count(tokens)} = {flops:.2e} FLOPs  [Kaplan et al. 2020 (arXiv:2001.08361)]",
        f"{flops:.2e} / {flops_per_second / 1e15:g}e15 FLOP/s = {days:.0f} days, without interruptions",
    ]


def traffic_lines() -> list[str]:
    """Traffic of one update in units of the parameters' bytes."""
    two, three = STAGES["ddp"].units_sent(), STAGES["zero3"].units_sent()
    return [
        f"ddp: a ring all-reduce is a reduce-scatter and an all-gather: {two:g} units x (N - 1) / N per rank",
        f"zero3: an all-gather in forward, one in backward, a reduce-scatter: {three:g} units x (N - 1) / N per rank",
    ]


def worked_examples() -> list[str]:
    """The examples of the two texts this planner follows, line by line."""
    sections = (
        ("Why one device is not enough", [*state_lines(70e9), *state_lines(7e9)]),
        ("What each stage shards", stage_lines(4)),
        ("70B on 64 devices of 80 GB", shard_lines(70e9, 64, 80 * GB)),
        ("405B on 128 devices", shard_lines(405e9, 128)),
        ("A peak is more than the states", peak_lines(1e9, 4, 20, 3 * GB, 0.5 * GB)),
        ("A large gathered unit", matrix_lines(16384, 65536, 2, 2 * GB, 100 * GB)),
        ("Rows of one update", batch_lines(2, 4, 8)),
        ("Traffic", traffic_lines()),
        ("Training time of 70B on 1.4T tokens at 25 PFLOP/s", training_lines(70e9, 1.4e12, 25e15)),
    )
    lines = []
    for title, body in sections:
        lines += [title, *(f"  {line}" for line in body)]
    return lines

"""Worked examples of the arithmetic of sharding, with the numbers of the published texts: `plan --explain examples`.

The numbers come from functions that the planner itself uses, and from ZeRO's own account of model states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwright.layout.zero import STAGES
from shardwright.planner.reliability import DAY, training_flops
from shardwright.units import GB, TB

ZERO = "Rajbhandari et al. 2019 (arXiv:1910.02054), section 3.1 and figure 1"
KAPLAN = "Kaplan et al. 2020 (arXiv:2001.08361)"


class StateBytes(NamedTuple):
    """Bytes of one rank's model states."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def ideal_states(
    parameters: float, data_parallel: str, degree: int, element_bytes: tuple[float, float, float] = (2, 2, 12)
) -> StateBytes:
    """Model states of a rank by the ZeRO paper's account, sharded over `degree` ranks as `layout/zero.py` says of the kind.

    element_bytes: bytes per parameter of weights, gradients and optimizer states; by default those of mixed-precision Adam.
    """
    stage = STAGES[data_parallel]
    sharded = (stage.shards_parameters, stage.shards_gradients, stage.shards_optimizer)
    return StateBytes(*(parameters * size / (degree if shard else 1) for size, shard in zip(element_bytes, sharded)))


def _size(size_bytes: float, digits: int = 1) -> str:
    unit, name = (TB, "TB") if size_bytes >= TB else (GB, "GB")
    return f"{size_bytes / unit:.{digits}f}".removesuffix(".0") + f" {name}"


def _sum(parts: tuple[float, ...]) -> str:
    return " + ".join(_size(part).removesuffix(" GB") for part in parts)


def _one_device(billions: int) -> str:
    total, n = ideal_states(billions * 1e9, "ddp", 1).total, f"{billions}e9"
    return f"model states = (2 + 2 + 12) x {n} bytes = 16 x {n} = {_size(total, 2 if total >= TB else 1)}  [{ZERO}]"


def _sharded(billions: int, ranks: int) -> Iterator[str]:
    states = ideal_states(billions * 1e9, "zero3", ranks)
    weights, gradients, optimizer = (_size(part) for part in states)
    yield (
        f"zero3, {billions}e9 over {ranks} ranks: weights 2 x {billions}e9 / {ranks} = {weights}, gradients {gradients}, "
        f"optimizer 12 x {billions}e9 / {ranks} = {optimizer}"
    )
    yield f"{_sum(states)} = {_size(states.total)} per rank  [{ZERO}]"


def _peak(parameters: float, ranks: int, blocks: int, activations: float, workspace: float) -> Iterator[str]:
    """The peak in the backward of one block: all in fp32, two Adam moments, no master copy."""
    whole, states = (ideal_states(parameters, "zero3", n, (4, 4, 8)).total for n in (1, ranks))
    block = parameters / blocks * 4
    parts = (states, activations, block, block, workspace)
    yield f"{parameters / 1e9:g}e9 parameters in fp32: (4 + 4 + 8) bytes = {_size(whole)}, over {ranks} ranks {_size(states)}"
    yield f"one of {blocks} blocks gathered: {_size(block)}, and its gradient before the reduce-scatter: {_size(block)}"
    yield f"peak in its backward = states + activations + gathered + gradient + workspace = {_sum(parts)} = {_size(sum(parts))}"


def worked_examples() -> Iterator[str]:
    """The examples of the two texts that this planner follows, line by line."""
    yield "Why one device is not enough"
    yield f"  {_one_device(70)}"
    yield f"  {_one_device(7)}"
    yield "What each stage shards"
    for kind, sums in (("zero1", "2 + 2 + 12 / 4"), ("zero2", "2 + (2 + 12) / 4"), ("zero3", "(2 + 2 + 12) / 4")):
        yield f"  {kind} on 4 ranks: {sums} = {ideal_states(1, kind, 4).total:g}P bytes  [{ZERO}]"
    yield "70B on 64 devices of 80 GB"
    yield from (f"  {line}" for line in _sharded(70, 64))
    states = ideal_states(70e9, "zero3", 64).total
    yield f"  80 GB - {_size(states)} = {_size(80 * GB - states)} left for activations, gathered units and workspace"
    yield "405B on 128 devices"
    yield from (f"  {line}" for line in _sharded(405, 128))
    yield "A peak is more than the states"
    yield from (f"  {line}" for line in _peak(1e9, 4, 20, 3 * GB, 0.5 * GB))
    yield "A large gathered unit"
    yield f"  16,384 x 65,536 x 2 bytes = {_size(16384 * 65536 * 2, 2)}"
    yield f"  2 GB / 100 GB/s = {2 * GB / (100 * GB) * 1e3:.0f} ms at least"
    yield "Rows of one update"
    yield f"  2 ranks x 4 rows x 8 microbatches = {2 * 4 * 8} sequences per update"
    yield "Traffic"
    ddp, zero3 = (STAGES[kind].units_sent() for kind in ("ddp", "zero3"))
    yield f"  ddp: a ring all-reduce is a reduce-scatter and an all-gather: {ddp:g} units x (N - 1) / N per rank"
    yield f"  zero3: an all-gather in forward, one in backward, a reduce-scatter: {zero3:g} units x (N - 1) / N per rank"
    yield "Training time of 70B on 1.4T tokens at 25 PFLOP/s"
    flops = training_flops(70e9, 1.4e12)
    yield f"  C = 6PD = 6 x 70e9 x 1400e9 = {flops:.2e} FLOPs  [{KAPLAN}]"
    yield f"  {flops:.2e} / 25e15 FLOP/s = {flops / 25e15 / DAY:.0f} days, without interruptions"

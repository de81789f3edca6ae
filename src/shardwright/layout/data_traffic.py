"""What one rank sends over the data axes in one update: pure functions for the planner, equal to what the engine sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.layout.traffic import Traffic
from shardwright.layout.zero import ZeroStage


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` works on one pipeline rank.

    axis, degree: the ranks that share the parameters (dp_shard x cp), as `Traffic` calls them. replicas: dp_replicate.
    reshard_after_forward: of units; a number keeps shards on so many ranks. Bytes of the compute and the reduction dtype.
    """

    stage: ZeroStage
    axis: str
    degree: int
    replicas: int
    microbatches: int
    reshard_after_forward: bool | int
    compute_bytes: int
    reduce_bytes: int


def replica_traffic(axis: str, elements: int, ranks: int, reduce_bytes: int) -> tuple[Traffic, ...]:
    """`ddp`: all gradients once per update, in stretches (`parallel/ddp.py`), counted as one here."""
    if ranks == 1:
        return ()
    return (Traffic(axis, "all-reduce", "gradients", ranks, 1, elements * reduce_bytes),)


def shard_traffic(units: Iterable[int], once: Iterable[int], how: Sharding) -> tuple[Traffic, ...]:
    """`zero*`: what the units of a rank gather and reduce; `once`: units that no microbatch gathers twice.

    units, once: elements of the shard of each on a rank with the fullest ones (`fully_shard` pads the others to it).
    """
    found: list[Traffic] = []
    for sizes, reshards in ((units, how.reshard_after_forward), (once, False)):
        for shard, count in sorted(Counter(sizes).items()):
            if shard:
                found += _unit(shard, count, reshards, how)
    return tuple(found)


def _unit(shard: int, count: int, reshards: bool | int, how: Sharding) -> Iterator[Traffic]:
    stage, whole = how.stage, how.degree * shard
    gathers, partly = (how.microbatches if stage.gathers_each_microbatch else 1), 0
    if stage.gathers_each_microbatch and reshards:
        partly = 0 if reshards is True else gathers
        gathers *= 2 if reshards is True else 1
    if how.degree > 1:
        payload = whole * how.compute_bytes
        yield Traffic(how.axis, "all-gather", "parameters", how.degree, gathers * count, payload)
        if partly:
            few = int(reshards)
            yield Traffic(how.axis, "all-gather", "parameters kept on fewer ranks", few, partly * count, payload)
        times = stage.reductions(how.microbatches)
        yield Traffic(how.axis, "reduce-scatter", "gradients", how.degree, times * count, whole * how.reduce_bytes)
    if how.replicas > 1:
        piece = shard * how.reduce_bytes
        yield Traffic("dp_replicate", "all-reduce", "gradient shards", how.replicas, count, piece)

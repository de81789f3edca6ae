"""What one rank sends in one update, by axis: pure functions for the planner, equal to what the engine sends.

Sources: a ring over N ranks sends (N - 1) / N of the whole tensor from each rank for an all-gather or a reduce-scatter, and
twice that for an all-reduce (Rajbhandari et al. 2019, arXiv:1910.02054, section 7). An all-to-all sends as a reduce-scatter;
a broadcast is passed on once by a rank, at most. Context parallelism: Llama 3 (arXiv:2407.21783), section 3.3.2, for
all_gather; Liu et al. 2023 (arXiv:2310.01889) for ring. Tensor parallelism: Shoeybi et al. 2019, arXiv:1909.08053, section 3;
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; embedding, head and loss as in decision 0007.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.layout.pipeline_schedules import rank_stages, stage_rank
from shardwright.layout.size_rules import WHOLE_ATTENTION
from shardwright.layout.zero import ZeroStage

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule

SHARES = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1, "all-reduce": 2}


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of one update on one rank.

    axis: a name of `layout.axes.AXES`. The data axes include cp ranks; a group of cp ranks alone is called `cp`.
    collective: a key of `SHARES`, or `send`.
    what: is sent, in words.
    size: ranks in the group.
    count: calls per update.
    payload_bytes: of one call: the whole tensor, or what a send sends.
    """

    axis: str
    collective: str
    what: str
    size: int
    count: float
    payload_bytes: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in the update."""
        if self.collective == "send":
            return self.count * self.payload_bytes
        return self.count * SHARES[self.collective] * (self.size - 1) / self.size * self.payload_bytes


def pipeline_traffic(
    schedule: Schedule, pp: int, chunks: int, rank: int, *, microbatches: int, hidden_bytes: int, tied_bytes: int = 0
) -> tuple[Traffic, ...]:
    """What pipeline rank `rank` of `pp` with `chunks` stages sends.

    hidden_bytes: hidden states of one microbatch as they are sent (a part of them with sequence parallelism).
    tied_bytes: this rank's part of the gradient of a tied embedding, which first and last stage exchange.
    """
    final = pp * chunks - 1
    own = rank_stages(schedule, pp, chunks, rank)
    holder = [stage_rank(schedule, pp, stage) for stage in range(final + 1)]
    ahead = sum(stage < final and holder[stage + 1] != rank for stage in own)
    back = sum(stage > 0 and holder[stage - 1] != rank for stage in own)
    tied = tied_bytes > 0 and rank in (holder[0], holder[final]) and holder[0] != holder[final]
    every = (
        Traffic("pp", "send", "activations", pp, ahead * microbatches, hidden_bytes),
        Traffic("pp", "send", "gradients of activations", pp, back * microbatches, hidden_bytes),
        Traffic("pp", "send", "gradient of the tied embedding", pp, int(tied), tied_bytes),
    )
    return tuple(t for t in every if pp > 1 and t.count)


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` works on one pipeline rank.

    stage: of ZeRO.
    axis, degree: name and number of the ranks over which parameters are sharded (dp_shard x cp).
    replicas: dp_replicate.
    microbatches: of one rank in an update.
    reshard_after_forward: of units; a number keeps shards on so many ranks.
    compute_bytes, reduce_bytes: of one element in the compute and the reduction dtype.
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
    """`ddp`: all gradients once per update; its buckets (`parallel/ddp.py`) are counted as one call."""
    if ranks == 1:
        return ()
    return (Traffic(axis, "all-reduce", "gradients", ranks, 1, elements * reduce_bytes),)


def shard_traffic(units: Iterable[int], once: Iterable[int], how: Sharding) -> tuple[Traffic, ...]:
    """`zero*`: what the units of a rank gather and reduce.

    units: elements of each unit's shard, on the rank with the largest (`fully_shard` pads the others to its size).
    once: the same of units that no microbatch gathers twice (`ZeroStage.gathers`).
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


def context_traffic(
    attention: str,
    *,
    cp: int,
    blocks: int,
    microbatches: int,
    rows: int,
    length: int,
    kv_width: int,
    width_bytes: int,
    recomputes: int = 0,
) -> tuple[Traffic, ...]:
    """What is sent in one update by each rank of a context-parallel group of `cp`, for the `blocks` on it.

    attention: `all_gather` or `ring`.
    microbatches: of one data rank in an update.
    rows, length: of a microbatch, and tokens of a row over all ranks.
    kv_width: kv heads on this rank x head width.
    width_bytes: of the compute dtype. `ring` sums gradients in float32 at least, since each of its hops would round a bf16
    sum anew; all_gather sends each gradient once and sums at its owner.
    recomputes: how often backward runs forward, with its collectives, again (activation checkpointing).
    """
    if cp == 1:
        return ()
    forwards, backwards = blocks * microbatches * (1 + recomputes), blocks * microbatches
    row = 2 * rows * length * kv_width  # elements of K and V of whole rows
    if attention == "all_gather":
        return (
            Traffic("cp", "all-gather", "keys and values", cp, forwards, row * width_bytes),
            Traffic("cp", "all-to-all", "gradients of keys and values", cp, backwards, row * width_bytes),
        )
    steps, part = cp - 1, row // cp
    wide = part * max(width_bytes, 4)
    return (
        Traffic("cp", "send", "keys and values", cp, (forwards + backwards) * steps, part * width_bytes),
        Traffic("cp", "send", "gradients of keys and values", cp, backwards * steps, wide),
    )


@dataclass(frozen=True)
class TensorWork:
    """What a tensor-parallel rank computes in one update.

    tp: tensor-parallel ranks.
    blocks: on this rank.
    first, last: whether the rank holds the embedding, and the head.
    microbatches: of one data rank in an update.
    rows, length: of a microbatch, and positions of a row on this context-parallel rank.
    hidden: width of hidden states.
    width_bytes: of the compute dtype.
    sequence: sequence parallelism.
    recomputes: how often backward runs a block's forward again.
    keeps_sums: recomputation does not repeat the sums over the group, whose results are kept.
    gathered: widths of the outputs in a block that are gathered whole.
    split: widths of the whole inputs that row-wise layers cut.
    kept_behind: the block keeps a tensor for backward behind its last collective (a norm), so recomputation repeats that too.
    partial: elements on this rank of gradients that are summed over the group.
    master_bytes: of the dtype of stored weights.
    """

    tp: int
    blocks: int
    first: bool
    last: bool
    microbatches: int
    rows: int
    length: int
    hidden: int
    width_bytes: int
    sequence: bool = True
    recomputes: int = 0
    keeps_sums: bool = False
    gathered: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    kept_behind: bool = False
    partial: int = 0
    master_bytes: int = 4

    @property
    def positions(self) -> int:
        """B x T."""
        return self.rows * self.length


def whole_widths(family: str, query: int, key: int, ffn: int, gated: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(`TensorWork.gathered`, `TensorWork.split`) of a block: empty but for the families of `WHOLE_ATTENTION`.

    query, key: widths of all query heads and of all kv heads.
    """
    if family not in WHOLE_ATTENTION:
        return (), ()
    fused = family in ("gpt2", "phi3")
    projections = (query + 2 * key,) if fused else (query, key, key)
    if family == "phi3":
        return (*projections, (2 if gated else 1) * ffn), (query, ffn)
    return projections, (query,)


def tensor_traffic(work: TensorWork) -> tuple[Traffic, ...]:
    """What is sent in one update by each rank of a tensor-parallel group.

    The first update also sends two all-reduces of one number for each whole parameter, to verify it; not counted here.
    """
    return tuple(t for t in (*_blocks(work), *_embedding_and_head(work)) if work.tp > 1 and t.count)


def _blocks(w: TensorWork) -> Iterator[Traffic]:
    """Attention and MLP of each block, in forward, backward and recomputation: one collective before and one behind each."""
    count, payload = w.blocks * w.microbatches, w.positions * w.hidden * w.width_bytes
    # Recomputation ends with the last tensor that backward needs, which is before the collective behind the MLP.
    again = 0 if w.keeps_sums else w.recomputes * (2 if w.kept_behind else 1)
    if w.sequence:
        gathers, scatters = 4 + 2 * w.recomputes, 4 + again
        yield Traffic("tp", "all-gather", "activations", w.tp, gathers * count, payload)
        yield Traffic("tp", "reduce-scatter", "activations", w.tp, scatters * count, payload)
    else:
        yield Traffic("tp", "all-reduce", "activations", w.tp, (4 + again) * count, payload)
    for width in w.gathered:
        size = w.positions * width * w.width_bytes
        yield Traffic("tp", "all-gather", "whole projections", w.tp, (1 + w.recomputes) * count, size)
    for width in w.split:
        size = w.positions * width * w.width_bytes
        yield Traffic("tp", "all-gather", "gradients of whole inputs", w.tp, count, size)


def _embedding_and_head(w: TensorWork) -> Iterator[Traffic]:
    """Embedding, head, loss, the sequence gathered at both ends, and gradients of which each rank computed a part."""
    times, payload = w.microbatches, w.positions * w.hidden * w.width_bytes
    wide = max(w.width_bytes, 4)
    if w.first:
        yield Traffic("tp", "all-reduce", "embedding", w.tp, times, payload)
    if w.sequence:
        yield Traffic("tp", "all-gather", "ends of the blocks", w.tp, times * (w.first + w.last), payload)
    if w.last:
        yield Traffic("tp", "all-reduce", "gradient of the head's input", w.tp, times, payload)
        yield Traffic("tp", "all-reduce", "largest logits", w.tp, times, w.positions * wide)
        yield Traffic("tp", "all-reduce", "sums of the loss", w.tp, times, 2 * w.positions * wide)
    yield Traffic("tp", "all-reduce", "partial gradients", w.tp, int(w.partial > 0), w.partial * w.master_bytes)

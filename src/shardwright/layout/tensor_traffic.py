"""What one tensor-parallel rank sends in one update: a pure function for the planner, equal to what the engine sends.

B rows of a microbatch, T positions of a row on this context-parallel rank, D width of hidden states. A region is an attention
or an MLP: its input is exchanged on entry, its output once behind (Shoeybi et al. 2019, arXiv:1909.08053, section 3;
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The ends are ours: decision 0007.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.layout.rules_tensor import WHOLE_ATTENTION
from shardwright.layout.traffic import Traffic


@dataclass(frozen=True)
class TensorWork:
    """What a tensor-parallel rank computes in one update.

    blocks, first, last: how many it holds, and whether it holds embedding and head. rows, length, hidden: B, T, D.
    width_bytes: of the compute dtype. sequence: sequence parallelism. recomputes: how often backward runs a block's forward
    again. gathered, split: widths of the outputs that are made whole in a block, and of the whole inputs that row-wise
    layers cut. kept_behind: the block keeps something for backward behind its last exchange (a norm), so that
    recomputation runs that exchange too. partial: elements of this rank's parts of the gradients that are summed.
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
    """(widths of outputs made whole, of whole inputs that are cut) in a block; nothing where it is divided by heads.

    query, key: widths of all query heads and all kv heads. These are the families of `WHOLE_ATTENTION`.
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

    Without what the first update alone verifies: two all-reduces of one number for each whole parameter.
    """
    return tuple(t for t in (*_blocks(work), *_ends(work), *_update(work)) if work.tp > 1 and t.count)


def _blocks(w: TensorWork) -> Iterator[Traffic]:
    """The two regions of each block, in forward, backward and recomputation."""
    count, payload = w.blocks * w.microbatches, w.positions * w.hidden * w.width_bytes
    # Recomputation ends with the last tensor that backward needs, which is before the exchange behind the MLP.
    again = w.recomputes * (2 if w.kept_behind else 1)
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


def _ends(w: TensorWork) -> Iterator[Traffic]:
    """Embedding, where sequences are cut and made whole, head, and loss."""
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


def _update(w: TensorWork) -> Iterator[Traffic]:
    """Once per update: gradients of whole parameters of which each rank computed a part."""
    yield Traffic("tp", "all-reduce", "partial gradients", w.tp, int(w.partial > 0), w.partial * w.master_bytes)

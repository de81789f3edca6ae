"""What one context-parallel rank sends in one update: a pure function for the planner, equal to what the engine sends.

B rows of a microbatch, S tokens of a row, K kv heads on this rank, H head width, N context-parallel ranks.
Sources: Llama 3 (arXiv:2407.21783), section 3.3.2, for all_gather; Liu et al. 2023 (arXiv:2310.01889) for ring.
"""

from __future__ import annotations

from shardwright.layout.traffic import Traffic


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

    attention: `all_gather` or `ring`. rows, microbatches: B, and how many per data rank. kv_width: K x H on this rank.
    width_bytes: of the compute dtype; `ring` adds gradients up in float32 at least, since each of its hops would round a
    bf16 sum anew, where all_gather sends each gradient once and sums at its owner. recomputes: how often backward runs
    forward, with its exchanges, again (activation checkpointing, full or selective).
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

"""What one context-parallel rank sends in one update: a pure function for the planner, equal to what the engine sends.

B rows of a microbatch, S tokens of a row, K kv heads on this rank, H head width, N context-parallel ranks.
Sources: Llama 3 (arXiv:2407.21783), section 3.3.2, for all_gather; Liu et al. 2023 (arXiv:2310.01889) for ring.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContextTraffic:
    """One kind of exchange. count: calls per update. payload_bytes: the whole tensor of one call; for a send, what is sent.

    collective: `all-gather`, `reduce-scatter` (carried out as all-to-all and a local sum, which sends the same) or `send`.
    """

    collective: str
    what: str
    size: int
    count: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in the update."""
        if self.collective == "send":
            return self.count * self.payload_bytes
        return self.count * self.payload_bytes * (self.size - 1) // self.size


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
    recompute: bool,
) -> tuple[ContextTraffic, ...]:
    """What is sent in one update by each rank of a context-parallel group of `cp`, for the `blocks` on it.

    attention: `all_gather` or `ring`. rows, microbatches: B, and how many per data rank. kv_width: K x H on this rank.
    width_bytes: of the compute dtype; `ring` adds gradients up in float32 at least. recompute: activation checkpointing,
    full or selective: forward, with its exchanges, runs again in backward.
    """
    if cp == 1:
        return ()
    forwards = blocks * microbatches * (2 if recompute else 1)
    row = 2 * rows * length * kv_width  # elements of K and V of whole rows
    if attention == "all_gather":
        return (
            ContextTraffic("all-gather", "keys and values", cp, forwards, row * width_bytes),
            ContextTraffic(
                "reduce-scatter",
                "gradients of keys and values",
                cp,
                blocks * microbatches,
                row * width_bytes,
            ),
        )
    steps, part = cp - 1, row // cp
    return (
        ContextTraffic(
            "send", "keys and values", cp, (forwards + blocks * microbatches) * steps, part * width_bytes
        ),
        ContextTraffic(
            "send",
            "gradients of keys and values",
            cp,
            blocks * microbatches * steps,
            part * max(width_bytes, 4),
        ),
    )

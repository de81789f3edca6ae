"""Bytes of files sent from rank to rank, a piece of each transfer at a time.

All ranks walk through their own transfers in rounds: the pieces of a round are posted together, and while they travel what
came in the round before is put where it belongs. Nothing waits for a transfer between other ranks, and two pieces of each
transfer are in memory. What cannot be read or taken is skipped and reported, so that no peer waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Span:
    """`length` bytes of `file` from byte `begin`."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Transfer:
    """Spans that `source` reads and `target` takes, ranks both. tag: a number of its own, the same on both."""

    tag: int
    source: int
    target: int
    spans: Sequence[Span]


Use = Callable[[Transfer, Span, Tensor], None]


def exchange(
    group: dist.ProcessGroup, transfers: Sequence[Transfer], read: Use, take: Use
) -> list[tuple[Transfer, str]]:
    """Makes the transfers of this rank; returns those that went wrong here, and why.

    read: fills a span's bytes (uint8) before they are sent. take: is handed the bytes that have come. Both may raise
    `OSError` or `CheckpointError`. Raises `RuntimeError` when a peer is gone.
    """
    rank, problems = dist.get_rank(), []

    def attempt(use: Use, transfer: Transfer, span: Span, data: Tensor) -> None:
        try:
            use(transfer, span, data)
        except (OSError, CheckpointError) as error:
            problems.append((transfer, str(error)))

    buffers = {
        t.tag: torch.empty(2, max(span.length for span in t.spans), dtype=torch.uint8) for t in transfers if t.spans
    }
    came: list[tuple[Transfer, Span, Tensor]] = []
    for number in range(max((len(t.spans) for t in transfers), default=-1) + 1):
        now = [(t, t.spans[number]) for t in transfers if number < len(t.spans)]
        places = [(t, span, buffers[t.tag][number % 2][: span.length]) for t, span in now]
        coming = [(t, span, data) for t, span, data in places if t.target == rank]
        posted = [dist.irecv(data, t.source, group, t.tag) for t, _, data in coming]
        for t, span, data in places:
            if t.source == rank:
                attempt(read, t, span, data)
                posted.append(dist.isend(data, t.target, group, t.tag))
        for t, span, data in came:
            attempt(take, t, span, data)
        for work in posted:
            if work is not None:
                work.wait()
        came = coming
    return problems

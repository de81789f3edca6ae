"""One line of what a rank sends in an update. What each axis sends stands in `*_traffic.py`, equal to what the engine sends.

Sources: a ring over N ranks sends (N - 1) / N of the whole tensor from each rank for an all-gather or a reduce-scatter, and
twice that for an all-reduce (Rajbhandari et al. 2019, arXiv:1910.02054, section 7). An all-to-all sends as a reduce-scatter;
a broadcast is passed on once by a rank, at most.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARES = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1, "all-reduce": 2}


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of one update on one rank.

    axis: `pp`, `dp_replicate`, `dp_shard`, `cp` or `tp`. ddp reduces over `dp_replicate`; both data axes take cp ranks in
    where there are any, and are called `cp` where these are all there are. collective: a key of `SHARES`, or `send`.
    size: ranks in the group. count: calls per update. payload_bytes: of one call, the whole tensor; for a send, what is sent.
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

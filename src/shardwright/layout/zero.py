"""What each data-parallel kind shards, gathers and reduces: the one table that planner and runtime read.

ZeRO stages as in Rajbhandari et al. 2019 (arXiv:1910.02054), section 5: stage 1 shards optimizer states, stage 2 also
gradients, stage 3 also parameters. Here all three are `fully_shard` with other times of gathering and reducing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroStage:
    """One data-parallel kind.

    shards_optimizer, shards_gradients, shards_parameters: which state is divided by the dp_shard size while it rests.
    reshard_after_forward: gathered parameters are dropped after forward and gathered again for backward.
    reduces_each_microbatch: gradients are reduced at every microbatch (then they rest sharded), not once per update.
    gathers_each_microbatch: parameters are gathered again for each microbatch, not once per update.
    """

    name: str
    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool
    reshard_after_forward: bool
    reduces_each_microbatch: bool
    gathers_each_microbatch: bool

    def gathers(self, microbatches: int, once: bool = False) -> int:
        """All-gathers of each unit in one update of so many microbatches.

        once: of a unit that no microbatch gathers twice. The root stays gathered from forward to backward, and so do norm
        and head, with which one ends and the other begins; backward does not read what an embedding looks up in.
        """
        if not self.shards_optimizer:
            return 0
        if not self.gathers_each_microbatch:
            return 1
        return microbatches * (2 if self.reshard_after_forward and not once else 1)

    def reductions(self, microbatches: int) -> int:
        """Reductions (all-reduce for ddp, reduce-scatter otherwise) of each unit in one update."""
        return microbatches if self.reduces_each_microbatch else 1

    def units_sent(self, microbatches: int = 1) -> float:
        """Traffic of one update in units of the parameters' bytes, before the factor (N - 1) / N.

        With one microbatch: 2 for ddp (a ring all-reduce is a reduce-scatter and an all-gather), 2 for zero1 and zero2,
        3 for zero3.
        """
        if not self.shards_optimizer:
            return 2.0 * self.reductions(microbatches)
        return float(self.gathers(microbatches) + self.reductions(microbatches))


STAGES = {
    "ddp": ZeroStage("ddp", False, False, False, False, False, False),
    "zero1": ZeroStage("zero1", True, False, False, False, False, False),
    "zero2": ZeroStage("zero2", True, True, False, False, True, False),
    "zero3": ZeroStage("zero3", True, True, True, True, True, True),
}

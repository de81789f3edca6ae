"""What the planner says of one layout of a problem: memory over an update, traffic and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwright.layout.traffic import Traffic
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.memory_timeline import Moment, Peak, timeline
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.rank_bytes import blocks_per_stage
from shardwright.planner.step_time import Clock, StepTime
from shardwright.planner.traffic import FIRST_SHARD, ShardCoordinates, traffic


@dataclass(frozen=True)
class Estimate:
    """Each part is computed when it is first asked for."""

    problem: Problem
    layout: Layout

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        """Blocks of each pipeline stage."""
        return blocks_per_stage(self.problem.shape, self.layout.axes.pp * self.layout.chunks)

    @cached_property
    def peak(self) -> Peak:
        """The fullest moment of the fullest rank."""
        return short_peak(self.problem, self.layout)

    def timeline(self, rank: int) -> Iterator[Moment]:
        """Every moment of an update on a pipeline rank."""
        return timeline(self.problem, self.layout, rank)

    def traffic(self, rank: int = 0, place: ShardCoordinates = FIRST_SHARD) -> tuple[Traffic, ...]:
        """What a device of a pipeline rank sends in forward and backward."""
        return traffic(self.problem, self.layout, rank, place)

    @cached_property
    def time(self) -> StepTime | None:
        """Seconds of an update with its pipeline played; None where the problem names no device."""
        if self.problem.device is None:
            return None
        return Clock(self.problem).timed(self.layout, self.stage_blocks)


def estimate(problem: Problem, layout: Layout) -> Estimate:
    """What the planner says of `layout`."""
    return Estimate(problem, layout)

"""What one pipeline rank sends in one update: a pure function for the planner, equal to what the engine sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.layout.pipeline_schedules import rank_stages, stage_rank
from shardwright.layout.traffic import Traffic

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule


def pipeline_traffic(
    schedule: Schedule,
    pp: int,
    chunks: int,
    rank: int,
    *,
    microbatches: int,
    hidden_bytes: int,
    tied_bytes: int = 0,
) -> tuple[Traffic, ...]:
    """What pipeline rank `rank` of `pp` with `chunks` stages sends.

    hidden_bytes: of the hidden states of one microbatch as they travel (a piece of them with sequence parallelism).
    tied_bytes: of this rank's part of the gradient of a tied embedding, which first and last stage tell each other.
    """
    final = pp * chunks - 1
    own = rank_stages(schedule, pp, chunks, rank)
    place = [stage_rank(schedule, pp, stage) for stage in range(final + 1)]
    ahead = sum(stage < final and place[stage + 1] != rank for stage in own)
    back = sum(stage > 0 and place[stage - 1] != rank for stage in own)
    tells = tied_bytes > 0 and rank in (place[0], place[final]) and place[0] != place[final]
    every = (
        Traffic("pp", "send", "activations", pp, ahead * microbatches, hidden_bytes),
        Traffic("pp", "send", "gradients of activations", pp, back * microbatches, hidden_bytes),
        Traffic("pp", "send", "gradient of the tied embedding", pp, int(tells), tied_bytes),
    )
    return tuple(t for t in every if pp > 1 and t.count)

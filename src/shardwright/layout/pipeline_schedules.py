"""Pipeline schedules as lists of actions, one list per pipeline rank: what planner, runtime and tests all read.

Words: a stage is a run of blocks; a rank holds `chunks` stages. An action is F (forward), B (the whole backward),
I (backward for the input only) or W (backward for the weights only) of one microbatch on one stage. The lists are those
of torch.distributed.pipelining (torch 2.11 to 2.14) without its idle slots.

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965). 1F1B and interleaving, Narayanan et al. 2021 (arXiv:2104.04473).
Zero bubble (ZB1P) and ZBV, Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardwright.errors import ConfigError

if TYPE_CHECKING:
    from shardwright.config.schema import Schedule

Kind = Literal["F", "B", "I", "W"]
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


class Action(NamedTuple):
    """One step of a pipeline rank: `stage`, what is done, and the microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def chunks_of(schedule: Schedule) -> int:
    """The smallest number of stages per rank that the schedule is made for: 2 for interleaved and zbv, else 1."""
    return 2 if schedule in ("interleaved_1f1b", "zbv") else 1


def stage_rank(schedule: Schedule, pp: int, stage: int) -> int:
    """The pipeline rank that holds `stage`: stages go round, or down and up again for zbv."""
    if schedule == "zbv" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def rank_stages(schedule: Schedule, pp: int, chunks: int, rank: int) -> tuple[int, ...]:
    """The stages that pipeline rank `rank` holds, first to last."""
    if schedule == "zbv":
        return (rank, 2 * pp - 1 - rank)
    return tuple(rank + chunk * pp for chunk in range(chunks))


def legality(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> str:
    """Why torch would refuse this schedule, or an empty string."""
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        return f"{schedule} holds one stage per rank, not {chunks}"
    if schedule == "zbv" and chunks != 2:
        return f"zbv holds two stages per rank, not {chunks}"
    if schedule == "interleaved_1f1b" and chunks < 2:
        return "interleaved_1f1b needs at least two stages per rank"
    if schedule == "1f1b" and microbatches < pp:
        return f"1f1b needs at least as many microbatches as stages: {microbatches} < {pp}"
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        rounds = max(1, microbatches // pp)
        if microbatches % rounds:
            return f"{microbatches} microbatches are not a multiple of the {rounds} rounds of {schedule} on {pp} ranks"
    return ""


@lru_cache(maxsize=4096)
def rank_actions(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The compute actions of one pipeline rank, in order. Raises `ConfigError` where torch would refuse."""
    reason = legality(schedule, pp, chunks, microbatches)
    if reason:
        raise ConfigError(f"pp_schedule = {schedule} cannot run: {reason}.")
    match schedule:
        case "gpipe":
            return tuple(_gpipe(rank, microbatches))
        case "1f1b":
            return tuple(_one_forward_one_backward(rank, pp, microbatches))
        case "zbv":
            return tuple(_zbv(rank, pp, microbatches))
        case _:
            return tuple(_interleaved(rank, pp, chunks, microbatches, split=schedule == "zero_bubble"))


def actions(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The compute actions of every pipeline rank. Raises `ConfigError` where torch would refuse."""
    return tuple(rank_actions(schedule, pp, chunks, microbatches, rank) for rank in range(pp))


def _gpipe(rank: int, microbatches: int) -> list[Action]:
    return [Action(rank, kind, index) for kind in "FB" for index in range(microbatches)]


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> list[Action]:
    ahead = min(microbatches, pp - 1 - rank)
    result = [Action(rank, "F", index) for index in range(ahead)]
    for index in range(ahead, microbatches):
        result += (Action(rank, "F", index), Action(rank, "B", index - ahead))
    return result + [Action(rank, "B", index) for index in range(microbatches - ahead, microbatches)]


def _per_round(pp: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // pp)


def warmup(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> int:
    """Forwards that rank does before its first backward's partner forward, for the interleaved schedules."""
    hops = 1 if schedule == "zero_bubble" else 2
    return min((chunks - 1) * _per_round(pp, microbatches) + hops * (pp - 1 - rank), microbatches * chunks)


def _interleaved(rank: int, pp: int, chunks: int, microbatches: int, *, split: bool) -> list[Action]:
    """Interleaved 1F1B; with `split`, ZB1P: backward for inputs first, weights `rank` backwards later."""
    per_round = _per_round(pp, microbatches)
    ahead = warmup("zero_bubble" if split else "interleaved_1f1b", pp, chunks, microbatches, rank)
    steps = [
        (chunk, index)
        for start in range(0, microbatches, per_round)
        for chunk in range(chunks)
        for index in range(start, start + per_round)
    ]
    last = (chunks - 1) * pp + rank
    forwards = [Action(chunk * pp + rank, "F", index) for chunk, index in steps]
    backwards = [Action(last - chunk * pp, "I" if split else "B", index) for chunk, index in steps]
    weights = [Action(last - chunk * pp, "W", index) for chunk, index in steps] if split else []
    result = forwards[:ahead]
    for step, backward in enumerate(backwards):
        result += forwards[step + ahead : step + ahead + 1]
        result.append(backward)
        if split and step >= rank:
            result.append(weights[step - rank])
    return result + weights[max(len(backwards) - rank, 0) :]


def _zbv(rank: int, pp: int, microbatches: int) -> list[Action]:
    """ZBV: two stages per rank in a V, so that the last stage and the loss are on the first rank."""
    count = max(2 * pp - 1, microbatches)
    down, up = rank, 2 * pp - 1 - rank
    done = {(stage, kind): 0 for stage in (down, up) for kind in "FIW"}
    result: list[Action] = []

    def do(stage: int, kinds: str) -> None:
        for kind in kinds:
            result.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (pp - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(pp - rank):
        do(up, "FIW")
    while done[up, "F"] < done[down, "F"] or done[down, "F"] < count:
        if done[down, "F"] < count:
            do(down, "F")
        do(down, "IW")
        do(up, "FIW")
    for _ in range(rank):
        do(down, "I")
        do(up, "I")
    for _ in range(pp - rank):
        do(down, "IW")
    while done[up, "W"] < done[up, "I"]:
        do(up, "W")
    while done[down, "W"] < done[down, "I"]:
        do(down, "W")
    # Fewer microbatches than the pipeline needs to fill: torch builds the full list and drops what does not exist.
    return [action for action in result if action.microbatch < microbatches]


def communicate(lists: Sequence[Sequence[Action]], rank_of: Callable[[int], int], stages: int) -> list[list[Action]]:
    """The action lists with sends and receives put in, so that blocking sends cannot deadlock.

    A receive enters the receiver's list at the moment its send enters the sender's: every rank's list is then part of
    one global order. Nothing is sent between two stages of one rank. Raises `ValueError` for lists that never finish.
    """
    result: list[list[Action]] = [[] for _ in lists]
    seen: list[set[tuple[int, str, int]]] = [set() for _ in lists]
    position = [0] * len(lists)

    def ready(rank: int, action: Action) -> bool:
        stage, kind, index = action
        if kind == "F":
            return stage == 0 or (stage, "RECV_F", index) in seen[rank] or (stage - 1, "F", index) in seen[rank]
        if kind in "BI":
            later = (stage + 1, "B", index), (stage + 1, "I", index)
            return (
                stage == stages - 1 or (stage, "RECV_B", index) in seen[rank] or any(one in seen[rank] for one in later)
            )
        return True

    def put(rank: int, action: Action) -> None:
        result[rank].append(action)
        seen[rank].add((action.stage, action.kind, action.microbatch))

    while any(at < len(own) for at, own in zip(position, lists)):
        moved = False
        for rank, own in enumerate(lists):
            if position[rank] == len(own) or not ready(rank, own[position[rank]]):
                continue
            action = own[position[rank]]
            put(rank, action)
            step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            target = action.stage + step
            if step and 0 <= target < stages and rank_of(target) != rank:
                letter = "F" if step == 1 else "B"
                put(rank, Action(action.stage, f"SEND_{letter}", action.microbatch))
                put(rank_of(target), Action(target, f"RECV_{letter}", action.microbatch))
            position[rank] += 1
            moved = True
        if not moved:
            stuck = ", ".join(
                f"rank {r} at {own[position[r]]}" for r, own in enumerate(lists) if position[r] < len(own)
            )
            raise ValueError(f"these action lists never finish: {stuck}")
    return result


def deadlock(lists: Sequence[Sequence[Action]], rank_of: Callable[[int], int]) -> str:
    """Where lists with sends and receives stop for ever when every send waits for its receive; empty if they finish.

    Operations run one after the other on each rank. A send and its receive complete together, when both are at the head.
    """
    position = [0] * len(lists)

    def partner(action: Action) -> tuple[int, Action]:
        step = 1 if action.kind.endswith("F") else -1
        if action.kind.startswith("RECV"):
            return rank_of(action.stage - step), Action(
                action.stage - step, action.kind.replace("RECV", "SEND"), action.microbatch
            )
        return rank_of(action.stage + step), Action(
            action.stage + step, action.kind.replace("SEND", "RECV"), action.microbatch
        )

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while position[rank] < len(own):
                action = own[position[rank]]
                if action.kind in TRANSFERS:
                    peer, wanted = partner(action)
                    if position[peer] == len(lists[peer]) or lists[peer][position[peer]] != wanted:
                        break
                    position[peer] += 1
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} waits at {own[position[rank]]}" for rank, own in enumerate(lists) if position[rank] < len(own)
    ]
    return "; ".join(stuck)


@lru_cache(maxsize=4096)
def split_blocks(layers: int, stages: int, head_blocks: float = 1.0) -> tuple[int, ...]:
    """Blocks of each stage, so that the heaviest stage is as light as it can be; each stage has at least one.

    head_blocks: how many blocks the output head weighs on the last stage. Raises `ConfigError` for too few layers.
    """
    if layers < stages:
        raise ConfigError(
            f"{layers} blocks cannot fill {stages} pipeline stages.", "Each stage needs a block.", "Lower pp_size."
        )
    loads = [(1 + head_blocks * (stage == stages - 1), -stage) for stage in range(stages)]
    heapify(loads)
    counts = [1] * stages
    for _ in range(layers - stages):
        load, negative = loads[0]
        counts[-negative] += 1
        heapreplace(loads, (load + 1, negative))
    return tuple(counts)


def head_blocks(block_weights: int, head_weights: int) -> float:
    """How many blocks the output head weighs: the ratio of the weights that multiply every token, so of FLOPs.

    The embedding is a lookup and weighs nothing; attention's products, which have no weights, are left out.
    """
    return head_weights / max(block_weights, 1)

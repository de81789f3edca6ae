"""From the ranks' measurements to the entries of `bench.json`, one for each layout and peer. Plain data, no torch.

An entry: name, kind (layout or peer), proven (None for a peer), step_seconds and targets_per_s of each timed update and their
statistics, mfu, hfu, loss_off (of the last timed update, relative to the first loop's), peak_bytes and memory of the
fullest rank, predicted, traffic by axis, communication, ranks, schedule of a pipeline, verdict (the bottleneck).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from shardwright.layout.axes import Axes
from shardwright.measure.bottleneck import UpdateTimes, find_bottleneck
from shardwright.planner.memory_timeline import walked_actions
from shardwright.planner.problem import Layout
from shardwright.tools.bench.timing import Spread, ratio, slowest
from shardwright.train.anomaly import slow_rank

Json = dict[str, Any]
Ranks = Sequence[Mapping[str, Any]]
_SENT = ("predicted_calls", "recorded_calls", "predicted_bytes", "recorded_bytes")
_PARTS = ("exposed_seconds", "compute_seconds", "products_seconds", "idle_seconds")


def entry(name: str, loop: Mapping[str, Any], proven: bool | None, first: Mapping[str, Any]) -> Json:
    """The entry of one loop. first: the loop of the same start of ranks that all loops are compared with."""
    ranks, counted = loop["ranks"], loop["counted"]
    seconds = _slowest(loop, "seconds")
    rates = [targets / s for targets, s in zip(counted["targets"], seconds)]
    spread = Spread.of(seconds)
    made: Json = {
        "name": name,
        "kind": loop["kind"],
        "proven": proven,
        "n": len(seconds),
        "step_seconds": seconds,
        "step_seconds_p50": spread.p50,
        "step_seconds_p95": spread.p95,
        "step_seconds_max": spread.most,
        "step_seconds_spread": spread.half_width,
        "targets_per_s": rates,
        "targets_per_s_p50": median(rates),
        "targets_per_s_per_device": median(rates) / len(ranks),
        "real_tokens_per_s": median(n / s for n, s in zip(counted["real"], seconds)),
        "slots_per_s": median(n / s for n, s in zip(counted["slots"], seconds)),
        "padding_fraction": 1 - sum(counted["real"]) / sum(counted["slots"]),
        "wait_seconds": median(_slowest(loop, "waited")),
        "collected_seconds": median(_slowest(loop, "collected")),
        "first_seconds": loop["first_seconds"],
        "speed": ratio(seconds, _slowest(first, "seconds")),
        "loss": loop["loss"],
        "loss_off": abs(loop["loss"] / first["loss"] - 1),
        **_utilisation(loop, seconds),
        "ranks": [_rank(rank, spread.p50) for rank in ranks],
    }
    if loop["kind"] == "layout":
        made |= _layout_part(loop, made)
    return made


def _utilisation(loop: Mapping[str, Any], seconds: Sequence[float]) -> Json:
    """`mfu` and `hfu` by `arch.flops.UTILISATION`, medians over the updates; None where no peak is known."""
    peak, ranks = loop["peak"], loop["ranks"]
    if peak is None:
        return {"mfu": None, "hfu": None, "peak_flops": None}
    every = peak["flops"] * len(ranks)
    of_updates = list(zip(seconds, *(rank["flops"] for rank in ranks)))
    useful = [sum(own for own, _ in flops) / s / every for s, *flops in of_updates]
    again = [sum(own for _, own in flops) / s / every for s, *flops in of_updates]
    return {"mfu": median(useful), "hfu": median(map(sum, zip(useful, again))), "peak_flops": peak["flops"]}


def _slowest(loop: Mapping[str, Any], key: str) -> list[float]:
    return slowest([_each(rank, key) for rank in loop["ranks"]])


def _each(rank: Mapping[str, Any], key: str) -> list[float]:
    return [float(turn[key]) for turn in rank["turns"]]


def _rank(rank: Mapping[str, Any], step_seconds: float) -> Json:
    """Times of own work and of waits of a rank, which show stragglers; scaled as in `_communication`."""
    traced = rank["traced"]
    scale = step_seconds / traced["seconds"] if traced else 0.0
    return {
        "step_seconds": median(_each(rank, "seconds")),
        "own_seconds": median(_each(rank, "busy")),
        "compute_seconds": traced["compute_seconds"] * scale if traced else None,
        "exposed_seconds": traced["exposed_seconds"] * scale if traced else None,
        "peak_bytes": rank["memory"].get("bytes"),
    }


def _layout_part(loop: Mapping[str, Any], made: Mapping[str, Any]) -> Json:
    ranks, planned = loop["ranks"], loop["planned"]
    fullest = max((rank["memory"] for rank in ranks), key=lambda memory: memory["bytes"])
    predicted = planned and {
        "peak_bytes": planned["peak_bytes"],
        "composition": planned["composition"],
        "moment": planned["moment"],
        "step_seconds": planned["seconds"],
        "step_parts": planned["parts"],
        "pipeline_idle": planned["idle"],
    }
    part: Json = {
        "axes": loop["axes"],
        "peak_bytes": fullest["bytes"],
        "memory": fullest,
        "predicted": predicted,
        "traffic": _traffic(ranks),
        "communication": _communication(ranks, made["step_seconds_p50"]),
        "build_seconds": loop["build_seconds"],
    }
    return part | {"verdict": asdict(find_bottleneck(_times(made, part)))}


def _traffic(ranks: Ranks) -> Json:
    """{axis: {collective: calls and bytes of the rank that sends most, and whether all ranks send what was predicted}}."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for rank in ranks for row in rank["traffic"]):
        most = found.setdefault(row["axis"], {}).setdefault(row["collective"], dict.fromkeys(_SENT, 0.0))
        for key in _SENT:
            most[key] = max(most[key], row[key])
        known, before = row["equal"], most.get("equal", True)
        most["equal"] = None if known is None or before is None else before and known
    return found


def _communication(ranks: Ranks, step_seconds: float) -> Json:
    """{axis: seconds and exposed seconds of an update by collective}, and of all axes together; the mean over ranks.

    A profiler slows an update, so the traced seconds are scaled to the update as timed without it.
    """
    traces = [rank["traced"] for rank in ranks]
    length = mean(traced["seconds"] for traced in traces)
    share = step_seconds / length / len(traces)
    found: dict[str, dict[str, Any]] = {}
    exposed: dict[str, float] = {}
    for traced in traces:
        for one in traced["by_axis"]:
            sums = found.setdefault(one["axis"], {}).setdefault(
                one["collective"], {"seconds": 0.0, "exposed_seconds": 0.0}
            )
            for key in sums:
                sums[key] += one[key] * share
        for axis, seconds in traced["exposed_axes"].items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds * share
    parts = {key: sum(traced[key] for traced in traces) * share for key in _PARTS}
    return {"by_axis": found, "exposed_axes": exposed, "window_seconds": length, **parts}


def _times(made: Mapping[str, Any], part: Mapping[str, Any]) -> UpdateTimes:
    axes, communication, predicted = Axes(**part["axes"]), part["communication"], part["predicted"]
    stages = [axes.coordinates(rank)["pp"] for rank in range(axes.world_size)]
    slow, factor = slow_rank([rank["own_seconds"] for rank in made["ranks"]], stages)
    return UpdateTimes(
        made["step_seconds_p50"],
        made["wait_seconds"],
        made["padding_fraction"],
        communication["exposed_axes"],
        communication["idle_seconds"],
        communication["compute_seconds"],
        communication["products_seconds"],
        slow if factor > 1 else None,
        factor,
        predicted["pipeline_idle"] if predicted and axes.pp > 1 else None,
    )


def schedule_of(layout: Layout, microbatches: int) -> list[list[list[Any]]]:
    """The pipeline's action lists, rank by rank: [stage, F B I or W, microbatch]; empty without a pipeline."""
    if layout.axes.pp == 1:
        return []
    lists = (walked_actions(layout, microbatches, rank) for rank in range(layout.axes.pp))
    return [[[a.stage, a.kind, a.microbatch] for a in own] for own in lists]

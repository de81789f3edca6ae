"""What a rank gives to collectives while a block of code runs: kind, axis and bytes of each call, seen where torch dispatches.

Functional collectives, those of `torch.distributed` (DDP's and fully_shard's among them) and sends are all seen, in forward
and backward; code inside a `torch.compile` region is seen too, graph by graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from shardwright.layout.traffic import Traffic
from shardwright.torch_private import COLLECTIVE_NAMESPACES, TorchDispatchMode, group_in_operator

KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}
"""What the name of an operator holds -> the kind of collective, as `layout/traffic.py` spells it."""

MARK = "communication:"
"""How a mark in a trace begins; axis and kind of the call follow, joined by a slash."""

UNCOUNTED = ("wait", "recv", "barrier", "monitored")
"""Operators that send nothing, or whose sending is another rank's: a receive."""


@dataclass(frozen=True, order=True)
class Call:
    """One kind of call. axis: as the recorder was told, or the name of the group. size: ranks of the group.

    payload_bytes: the whole tensor; for a send, what is sent.
    """

    axis: str
    collective: str
    size: int
    payload_bytes: int


class CommunicationRecorder(TorchDispatchMode):
    """A context in which this rank's collectives are counted in `calls`: how often each kind of call was made.

    axes: name of a process group -> axis (`parallel.mesh.axis_of_groups`). annotate: leave a mark around each call in the
    trace of a profiler that is running, receives included.
    """

    def __init__(self, axes: Mapping[str, str], annotate: bool = False) -> None:
        super().__init__()
        self.axes, self.calls, self._annotate = axes, Counter[Call](), annotate

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in COLLECTIVE_NAMESPACES or "wait" in func.__name__:
            return func(*args, **(kwargs or {}))
        group, kind = group_in_operator(args), _kind(func.__name__)
        axis = self.axes.get(group.group_name, group.group_name)
        with record_function(f"{MARK}{axis}/{kind}") if self._annotate else nullcontext():
            result = func(*args, **(kwargs or {}))
        if not any(word in func.__name__ for word in UNCOUNTED):
            # gathered or not yet scattered: whichever side is the whole tensor
            payload = max(*(_bytes(arg) for arg in args), _bytes(result))
            self.calls[Call(axis, kind, group.size(), payload)] += 1
        return result

    def traffic(self) -> tuple[Traffic, ...]:
        """What was recorded as the planner writes it, by axis and collective; groups of one rank left out."""
        return tuple(
            Traffic(call.axis, call.collective, "", call.size, count, call.payload_bytes)
            for call, count in sorted(self.calls.items())
            if call.size > 1
        )


def _kind(name: str) -> str:
    if "recv" in name:
        return "receive"
    return next((kind for word, kind in KINDS.items() if word in name), name)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


@dataclass(frozen=True)
class Comparison:
    """Predicted and recorded traffic of one axis and collective: calls, and bytes that the rank sends.

    calls_count: the number of calls is predicted too (of ddp's buckets it is not).
    """

    axis: str
    collective: str
    predicted_calls: float
    recorded_calls: float
    predicted_bytes: float
    recorded_bytes: float
    calls_count: bool = True

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        same = not self.calls_count or self.predicted_calls == self.recorded_calls
        return same and self.predicted_bytes == self.recorded_bytes


def compare(predicted: Iterable[Traffic], recorded: Iterable[Traffic], buckets: bool) -> list[Comparison]:
    """Both sides by axis and collective. `buckets`: the data-parallel kind reduces in buckets (ddp).

    An all-to-all counts as the reduce-scatter that it is: on gloo, pieces are exchanged and then summed
    (`backends/gloo/reductions.py`).
    """
    sides: list[dict[tuple[str, str], list[float]]] = []
    for side in (predicted, recorded):
        sums: dict[tuple[str, str], list[float]] = {}
        for one in side:
            collective = "reduce-scatter" if one.collective == "all-to-all" else one.collective
            entry = sums.setdefault((one.axis, collective), [0.0, 0.0])
            entry[0] += one.count
            entry[1] += one.sent_bytes
        sides.append(sums)
    none = [0.0, 0.0]
    return [
        Comparison(
            *key,
            sides[0].get(key, none)[0],
            sides[1].get(key, none)[0],
            sides[0].get(key, none)[1],
            sides[1].get(key, none)[1],
            not (buckets and key in (("dp_replicate", "all-reduce"), ("cp", "all-reduce"))),
        )
        for key in sorted({*sides[0], *sides[1]})
    ]

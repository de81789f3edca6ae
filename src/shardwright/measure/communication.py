"""Collectives that a rank calls while a block of code runs: kind, axis and bytes of each call, seen where torch dispatches.

Functional collectives, those of `torch.distributed` (DDP's and fully_shard's among them) and sends are all seen, in forward
and backward, and inside of `torch.compile` regions too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from shardwright.layout.axes import ROW_AXES
from shardwright.layout.traffic import Traffic
from shardwright.torch_private import COLLECTIVE_NAMESPACES, OWN_OPERATORS, TorchDispatchMode, group_in_operator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send")
"""The kinds of calls that are counted, as `layout/traffic.py` spells them."""

MARK = "communication:"
"""The beginning of a mark in a trace; axis and kind of the call follow, joined by a slash."""

UNCOUNTED = ("wait", "recv", "barrier", "monitored")
"""Parts of the names of operators that send nothing; the sending rank counts a transfer."""


def collective_kind(name: str) -> str:
    """The kind of call in a name as torch, gloo and NCCL spell it: `_allgather_base`, `ncclDevKernel_AllGather`."""
    plain = name.lower().replace("_", "")
    if "recv" in plain:
        return "receive"
    return next((kind for kind in COLLECTIVES if kind.replace("-", "") in plain), name)


class CommunicationRecorder(TorchDispatchMode):
    """A context in which this rank's collectives are counted: how often each kind of call was made.

    axes: name of a process group -> axis (`mesh.device_mesh.axis_of_groups`). annotate: leave a mark around each call,
    receives included, in the trace of a running profiler.
    """

    def __init__(self, axes: Mapping[str, str], annotate: bool = False) -> None:
        super().__init__()
        self.axes, self._annotate = axes, annotate
        self._calls: Counter[tuple[str, str, int, int]] = Counter()  # axis, kind, ranks, bytes of the whole tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OWN_OPERATORS:
            with self:
                return OWN_OPERATORS[func](*args, **(kwargs or {}))
        if func.namespace not in COLLECTIVE_NAMESPACES or "wait" in func.__name__:
            return func(*args, **(kwargs or {}))
        group, kind = group_in_operator(args), collective_kind(func.__name__)
        axis = self.axes.get(group.group_name, group.group_name)
        with record_function(f"{MARK}{axis}/{kind}") if self._annotate else nullcontext():
            result = func(*args, **(kwargs or {}))
        if not any(word in func.__name__ for word in UNCOUNTED):
            # the gathered tensor, or the tensor before it is scattered: the larger side is the whole
            payload = max(*(_bytes(arg) for arg in args), _bytes(result))
            self._calls[axis, kind, group.size(), payload] += 1
        return result

    def traffic(self) -> tuple[Traffic, ...]:
        """What was recorded, in the planner's form; groups of one rank are left out."""
        return tuple(
            Traffic(axis, kind, "", ranks, count, payload)
            for (axis, kind, ranks, payload), count in sorted(self._calls.items())
            if ranks > 1
        )


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


@dataclass(frozen=True)
class TrafficComparison:
    """Predicted and recorded traffic of one axis and collective: calls, and bytes that the rank sends."""

    axis: str
    collective: str
    predicted_calls: float
    recorded_calls: float
    predicted_bytes: float
    recorded_bytes: float
    calls_count: bool = True
    """Whether the number of calls is predicted too; the number of ddp's buckets is not."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        same = not self.calls_count or self.predicted_calls == self.recorded_calls
        return same and self.predicted_bytes == self.recorded_bytes


def compare_traffic(
    predicted: Iterable[Traffic], recorded: Iterable[Traffic], buckets: bool
) -> list[TrafficComparison]:
    """Both sides by axis and collective. `buckets`: the data-parallel kind reduces in buckets (ddp).

    An all-to-all counts as a reduce-scatter: on gloo, pieces are exchanged and then summed (`backends/gloo/reductions.py`).
    """
    calls: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    sent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, lines in enumerate((predicted, recorded)):
        for line in lines:
            key = (line.axis, "reduce-scatter" if line.collective == "all-to-all" else line.collective)
            calls[key][side] += line.count
            sent[key][side] += line.sent_bytes
    in_buckets = [(axis, "all-reduce") for axis in ("dp_replicate", *ROW_AXES)] if buckets else []
    return [
        TrafficComparison(*key, calls[key][0], calls[key][1], sent[key][0], sent[key][1], key not in in_buckets)
        for key in sorted(calls)
    ]

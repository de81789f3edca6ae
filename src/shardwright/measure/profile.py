"""Seconds of communication by axis in profiled updates, and the seconds that no compute covered (exposed).

Read from the trace that torch's profiler writes (Chrome's format), for NCCL and gloo alike:

- With kernels of a device in the trace, they decide: kernels with `nccl` in their name are communication of the axis of their
  process group, all others are compute, on whatever stream. Copies between host and device (offload, batches) and fills are a
  third kind: they cover nothing, and the device is not idle in them.
- Without, operators of the host decide. Communication: the `gloo:*` spans, and the calls themselves (`c10d::*`, and
  `_c10d_functional::*`), in which a rank waits when they are synchronous. Compute: other operators with a namespace,
  except those on gloo's own threads, which sum and copy inside of a `gloo:*` span.

A trace does not say which group a gloo call belongs to. `CommunicationRecorder(annotate=True)` writes a mark of the axis around
each call, which lies within the call's operator or around it; a `gloo:*` span belongs to the earliest call of its kind that
has none yet.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.measure.communication import MARK, CommunicationRecorder, collective_kind
from shardwright.torch_private import COLLECTIVE_NAMESPACES, OWN_NAMESPACE

Span = tuple[float, float]
"""(start, end), in any one unit of time."""

MATRIX_PRODUCTS = ("mm", "bmm", "matmul", "linear", "attention", "gemm", "conv", "cutlass", "einsum")
"""Parts of the names of operators and kernels that are bound by arithmetic, when large."""

_DONE_AS = {"all-reduce": ("all-reduce", "reduce-scatter")}
"""Name of a span of gloo -> the calls that have such a span: gloo runs a reduce-scatter as an all-reduce."""
_COPIES = ("gpu_memcpy", "gpu_memset")
_NO_COMPUTE = (*COLLECTIVE_NAMESPACES, OWN_NAMESPACE, "autograd", "profiler")


class Event(NamedTuple):
    """A complete event of a trace. Times in microseconds; `thread` is a stream for a kernel."""

    category: str
    name: str
    thread: Any
    start: float
    end: float
    arguments: Mapping[str, Any]

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds that collectives of one axis and kind ran, and of these the seconds that no compute covered."""

    axis: str
    collective: str
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class TraceTimes:
    """What one rank did in a trace, in seconds."""

    seconds: float
    """Length of the trace."""
    compute_seconds: float
    """Some operator or kernel ran."""
    products_seconds: float
    """Of the compute: matrix products and attention."""
    exposed_seconds: float
    """Some communication ran and no compute."""
    idle_seconds: float
    """None of these ran, nor a copy: on a CPU the interpreter worked, on a GPU the host was late."""
    copied_seconds: float = 0.0
    """On a GPU: a copy or a fill ran, and neither compute nor communication."""
    by_axis: tuple[CollectiveTime, ...] = field(default=())
    """Longest exposed first; a span in which two axes communicate counts for both."""
    exposed_axes: Mapping[str, float] = field(default_factory=dict)
    """Exposed seconds of each axis; a span in which several of its collectives run counts once."""


@contextmanager
def profiled(
    device: torch.device, groups: Mapping[str, str], updates: int = 1, keep: Path | None = None
) -> Iterator[list[TraceTimes]]:
    """Runs its block of `updates` updates under torch's profiler; the yielded list holds the times of one update afterwards.

    groups: name of a process group -> axis (`mesh.device_mesh.all_groups`). keep: where the trace stays, for Perfetto.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    found: list[TraceTimes] = []
    with torch.profiler.profile(activities=activities) as profiler:
        with CommunicationRecorder(groups, annotate=True):
            yield found
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as scratch:
        path = keep or Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.append(trace_times(json.loads(path.read_text(encoding="utf-8")), groups, updates))


def trace_times(trace: Mapping[str, Any], axes: Mapping[str, str] | None = None, updates: int = 1) -> TraceTimes:
    """The times of one of the `updates` updates in a trace of one rank. axes: name of a process group -> axis, for NCCL."""
    events = [
        Event(e.get("cat", ""), e["name"], e.get("tid"), float(e["ts"]), float(e["ts"] + e["dur"]), e.get("args", {}))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "cpu_op", "user_annotation", *_COPIES)
    ]
    kernels = [event for event in events if event.category == "kernel"]
    calls = list(_kernel_calls(kernels, axes or {}) if kernels else _host_calls(events))
    compute = _device_compute(kernels) if kernels else _host_compute(events, [span for _, _, span in calls])
    copies = [event.span for event in events if kernels and event.category in _COPIES]
    return _times(events, calls, compute, copies, 1e-6 / updates)


def _times(
    events: list[Event],
    calls: list[tuple[str, str, Span]],
    compute: list[tuple[str, Span]],
    copies: list[Span],
    unit: float,
) -> TraceTimes:
    """unit: seconds of one update in a microsecond of the trace."""
    computed = union(span for _, span in compute)
    grouped: dict[tuple[str, str], list[Span]] = defaultdict(list)
    of_axis: dict[str, list[Span]] = defaultdict(list)
    for axis, kind, span in calls:
        grouped[axis, kind].append(span)
        of_axis[axis].append(span)
    every = [span for _, _, span in calls]
    whole = (min(e.start for e in events), max(e.end for e in events)) if events else (0.0, 0.0)

    def exposed(spans: list[Span]) -> float:
        return length(difference(spans, computed)) * unit

    by_axis = [CollectiveTime(*key, length(spans) * unit, exposed(spans)) for key, spans in grouped.items()]
    return TraceTimes(
        length([whole]) * unit,
        length(computed) * unit,
        length(span for name, span in compute if _is_product(name)) * unit,
        exposed(every),
        length(difference([whole], [*computed, *every, *copies])) * unit,
        length(difference(copies, [*computed, *every])) * unit,
        tuple(sorted(by_axis, key=lambda one: -one.exposed_seconds)),
        {axis: exposed(spans) for axis, spans in of_axis.items()},
    )


def _is_product(name: str) -> bool:
    return any(word in name.lower() for word in MATRIX_PRODUCTS)


# Kernels of a device


def _kernel_calls(kernels: Iterable[Event], axes: Mapping[str, str]) -> Iterator[tuple[str, str, Span]]:
    for kernel in kernels:
        if "nccl" in kernel.name.lower():
            group = str(kernel.arguments.get("Process Group Name", ""))
            name = str(kernel.arguments.get("Collective name", kernel.name))
            yield axes.get(group, group or "unknown"), collective_kind(name), kernel.span


def _device_compute(kernels: Iterable[Event]) -> list[tuple[str, Span]]:
    return [(kernel.name, kernel.span) for kernel in kernels if "nccl" not in kernel.name.lower()]


# Operators of the host


def _host_calls(events: Iterable[Event]) -> Iterator[tuple[str, str, Span]]:
    """Each collective call, and each span in which gloo worked on one, with the axis and kind of its mark."""
    marks: list[tuple[str, str, Event]] = []
    gloo: list[Event] = []
    calls: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith(MARK):
            axis, _, kind = event.name.removeprefix(MARK).partition("/")
            marks.append((axis, kind, event))
        elif event.name.startswith("gloo:"):
            gloo.append(event)
        elif event.category == "cpu_op" and event.name.partition("::")[0] in COLLECTIVE_NAMESPACES:
            calls[event.thread].append(event)
    for thread, own in calls.items():
        for event in _outermost(own):
            mark = next((m for m in marks if m[2].thread == thread and _overlap(m[2], event)), None)
            if mark is not None:
                yield mark[0], mark[1], event.span
            elif "wait" not in event.name:
                yield "unknown", collective_kind(event.name), event.span
    waiting = list(marks)
    for event in gloo:
        kinds = _DONE_AS.get(collective_kind(event.name), (collective_kind(event.name),))
        mark = next((m for m in waiting if m[1] in kinds and m[2].start <= event.start), None)
        if mark is not None:
            waiting.remove(mark)
            yield mark[0], mark[1], event.span
        else:
            yield "unknown", kinds[0], event.span


def _overlap(a: Event, b: Event) -> bool:
    return a.start < b.end and b.start < a.end


def _host_compute(events: list[Event], communication: list[Span]) -> list[tuple[str, Span]]:
    """Operators that compute, without the waits inside of the operators."""
    gloo: dict[Any, list[Span]] = defaultdict(list)
    operators: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.name.startswith("gloo:"):
            gloo[event.thread].append(event.span)
        elif event.category == "cpu_op" and "::" in event.name:
            operators[event.thread].append(event)
    found: list[tuple[str, Span]] = []
    for thread, own in operators.items():
        if gloo[thread] and not difference([event.span for event in own], gloo[thread]):
            continue  # a thread of gloo
        called = union(e.span for e in own if e.name.partition("::")[0] in COLLECTIVE_NAMESPACES)
        for event in _outermost(e for e in own if e.name.partition("::")[0] not in _NO_COMPUTE):
            found += [(event.name, span) for span in difference([event.span], called)]
    return found


def _outermost(events: Iterable[Event]) -> Iterator[Event]:
    """The operators of one thread that are not called by another of them."""
    end = float("-inf")
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if event.end > end:
            yield event
            end = event.end


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not touch, in order."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def difference(spans: Iterable[Span], covered: Iterable[Span]) -> list[Span]:
    """The part of `spans` that no span of `covered` covers, as a union."""
    left: list[Span] = []
    covers, at = union(covered), 0
    for start, end in union(spans):
        while at < len(covers) and covers[at][1] <= start:
            at += 1
        here = at
        while here < len(covers) and covers[here][0] < end:
            if covers[here][0] > start:
                left.append((start, covers[here][0]))
            start = max(start, covers[here][1])
            here += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Iterable[Span]) -> float:
    """How long the spans are together, moments in several of them counted once."""
    return sum(end - start for start, end in union(spans))

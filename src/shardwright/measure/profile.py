"""How long communication of each axis took in a window of updates, and how much of it no compute covered.

Read from the trace that torch's profiler writes (Chrome's format), for NCCL and gloo alike:

- With kernels of a device in the trace, they decide: kernels with `nccl` in their name are communication of the axis of their
  process group, all others are compute, on whatever stream.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.measure.communication import KINDS, MARK, CommunicationRecorder
from shardwright.measure.spans import Span, difference, length, union
from shardwright.torch_private import COLLECTIVE_NAMESPACES

MATRIX_PRODUCTS = ("mm", "bmm", "matmul", "linear", "attention", "gemm", "conv", "cutlass", "einsum")
"""What the names of operators and kernels hold that are bound by arithmetic, when large."""

_DONE_AS = {"all-reduce": ("all-reduce", "reduce-scatter")}
"""What gloo says it does -> the calls that it does so: its reduce-scatter is an all-reduce."""
_NO_COMPUTE = (*COLLECTIVE_NAMESPACES, "autograd", "profiler")


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
class Communicated:
    """Seconds that collectives of one axis and kind ran, and of these the seconds that no compute covered."""

    axis: str
    collective: str
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Window:
    """One rank's window of a trace, in seconds.

    seconds: its length. compute: some operator or kernel ran. products: of that, matrix products and attention.
    exposed: some communication ran and no compute. idle: neither: on a CPU the interpreter, on a GPU the host is late.
    by_axis: longest exposed first; spans of two axes at once count for both. exposed_axes: exposed seconds of each axis,
    moments in which several of its collectives run counted once.
    """

    seconds: float
    compute_seconds: float
    products_seconds: float
    exposed_seconds: float
    idle_seconds: float
    by_axis: tuple[Communicated, ...] = field(default=())
    exposed_axes: Mapping[str, float] = field(default_factory=dict)

    def per(self, updates: int) -> Window:
        """The same, of one of `updates` updates."""
        parts = (
            replace(one, seconds=one.seconds / updates, exposed_seconds=one.exposed_seconds / updates)
            for one in self.by_axis
        )
        return Window(
            self.seconds / updates,
            self.compute_seconds / updates,
            self.products_seconds / updates,
            self.exposed_seconds / updates,
            self.idle_seconds / updates,
            tuple(parts),
            {axis: seconds / updates for axis, seconds in self.exposed_axes.items()},
        )


@contextmanager
def profiled(device: torch.device, groups: Mapping[str, str], keep: Path | None = None) -> Iterator[list[Window]]:
    """Runs its block under torch's profiler; the list that it gives holds the window afterwards.

    groups: name of a process group -> axis (`parallel.mesh.axis_of_groups`). keep: where the trace stays, for Perfetto.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    found: list[Window] = []
    with torch.profiler.profile(activities=activities) as profiler:
        with CommunicationRecorder(groups, annotate=True):
            yield found
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as scratch:
        path = keep or Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.append(read_trace(path, groups))


def read_trace(path: Path, axes: Mapping[str, str] | None = None) -> Window:
    """`window_of` the trace in the file at `path`."""
    return window_of(json.loads(path.read_text(encoding="utf-8")), axes)


def window_of(trace: Mapping[str, Any], axes: Mapping[str, str] | None = None) -> Window:
    """What a trace of one rank holds. axes: name of a process group -> axis (`parallel.mesh.axis_of_groups`), for NCCL."""
    events = [
        Event(
            e.get("cat", ""),
            e["name"],
            e.get("tid"),
            float(e["ts"]),
            float(e["ts"]) + float(e["dur"]),
            e.get("args", {}),
        )
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "cpu_op", "user_annotation", "gpu_memcpy")
    ]
    kernels = [event for event in events if event.category == "kernel"]
    calls = list(_kernel_calls(kernels, axes or {}) if kernels else _host_calls(events))
    compute = _device_compute(kernels) if kernels else _host_compute(events, [span for _, _, span in calls])
    return _window(events, calls, compute)


def _window(events: list[Event], calls: list[tuple[str, str, Span]], compute: list[tuple[str, Span]]) -> Window:
    computed = union(span for _, span in compute)
    products = [span for name, span in compute if _is_product(name)]
    grouped: dict[tuple[str, str], list[Span]] = defaultdict(list)
    of_axis: dict[str, list[Span]] = defaultdict(list)
    for axis, kind, span in calls:
        grouped[axis, kind].append(span)
        of_axis[axis].append(span)
    every = [span for _, _, span in calls]
    whole = (min(e.start for e in events), max(e.end for e in events)) if events else (0.0, 0.0)
    by_axis = [
        Communicated(axis, kind, length(spans) * 1e-6, length(difference(spans, computed)) * 1e-6)
        for (axis, kind), spans in grouped.items()
    ]
    return Window(
        length([whole]) * 1e-6,
        length(computed) * 1e-6,
        length(products) * 1e-6,
        length(difference(every, computed)) * 1e-6,
        length(difference([whole], [*computed, *every])) * 1e-6,
        tuple(sorted(by_axis, key=lambda one: -one.exposed_seconds)),
        {axis: length(difference(spans, computed)) * 1e-6 for axis, spans in of_axis.items()},
    )


def _is_product(name: str) -> bool:
    return any(word in name.lower() for word in MATRIX_PRODUCTS)


# Kernels of a device


def _kernel_calls(kernels: Iterable[Event], axes: Mapping[str, str]) -> Iterator[tuple[str, str, Span]]:
    for kernel in kernels:
        if "nccl" in kernel.name.lower():
            group = str(kernel.arguments.get("Process Group Name", ""))
            text = str(kernel.arguments.get("Collective name", kernel.name)).lower()
            yield axes.get(group, group or "unknown"), _kind_of(text), kernel.span


def _device_compute(kernels: Iterable[Event]) -> list[tuple[str, Span]]:
    return [(kernel.name, kernel.span) for kernel in kernels if "nccl" not in kernel.name.lower()]


def _kind_of(text: str) -> str:
    """The collective in a name as different places spell it: `_allgather_base`, `ncclDevKernel_AllGather`."""
    if "recv" in text:
        return "receive"
    plain = text.replace("_", "")
    return next((kind for word, kind in KINDS.items() if word.replace("_", "") in plain), text)


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
                yield "unknown", _kind_of(event.name), event.span
    waiting = list(marks)
    for event in gloo:
        kinds = _DONE_AS.get(_kind_of(event.name), (_kind_of(event.name),))
        mark = next((m for m in waiting if m[1] in kinds and m[2].start <= event.start), None)
        if mark is not None:
            waiting.remove(mark)
            yield mark[0], mark[1], event.span
        else:
            yield "unknown", kinds[0], event.span


def _overlap(a: Event, b: Event) -> bool:
    return a.start < b.end and b.start < a.end


def _host_compute(events: list[Event], communication: list[Span]) -> list[tuple[str, Span]]:
    """Operators that compute, without what waits inside of them."""
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

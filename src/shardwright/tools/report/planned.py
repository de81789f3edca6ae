"""The figures of the planner's predictions for a run: memory, pipeline and traffic, beside the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwright.layout.axes import AXES
from shardwright.layout.traffic import Traffic
from shardwright.measure import metric_names as names
from shardwright.planner.memory_timeline import PARTS
from shardwright.planner.traffic import sent_by_axis
from shardwright.tools.report.charts import STYLES, Bar, Series, gantt, idle_seconds, stacked
from shardwright.tools.report.figure import (
    NA,
    Figure,
    Section,
    Table,
    absent,
    bar_figure,
    duration,
    short_duration,
    size,
)
from shardwright.tools.report.predict import SECONDS, Forecast, Schedule, played_lists
from shardwright.tools.report.read import Measured, RunDirectory

Subject = tuple[RunDirectory, Forecast | str]

HOST_ONLY = "on the CPU torch's allocator keeps no count"
KINDS = {"all-gather": "k0", "reduce-scatter": "k1", "all-reduce": "k2", "all-to-all": "k3", "send": "k4"}
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}


def slug(part: str) -> str:
    return part.replace(" ", "-")


# Memory


def memory_section(subjects: Sequence[Subject], measured: Figure) -> Section:
    """The planner's memory timeline of each run on its fullest rank, then the figure of the measurements."""
    lead = (
        "Tensors alive on the fullest rank from the first forward of an update to the optimizer step, as planned; the "
        "measured peak is a line, where there is a measurement."
    )
    figures = tuple(
        _peaks(i, directory) if directory.benched else _memory(i, directory, found)
        for i, (directory, found) in enumerate(subjects)
    )
    return Section("memory", "Memory", lead, (*figures, measured))


def _memory(index: int, directory: RunDirectory, found: Forecast | str) -> Figure:
    identity, title = f"memory-{index}", "Memory over one update"
    if isinstance(found, str):
        return absent(identity, title, _sentence(found), directory.name)
    fullest = max(found.moments, key=lambda moment: moment.total)
    used = [i for i in range(len(PARTS)) if any(moment.alive[i] for moment in found.moments)]
    series = [Series(PARTS[i], slug(PARTS[i]), [moment.alive[i] for moment in found.moments]) for i in used]
    measured = directory.largest(names.PEAK_ALLOCATED)
    rows = [(PARTS[i], size(fullest.alive[i]), f"{fullest.alive[i] / fullest.total:.1%}") for i in used]
    where = f" of pipeline rank {found.pipeline_rank}" if found.schedule else ""
    draw = partial(
        stacked,
        series=series,
        label=size,
        title="moments of one update, in order",
        peak=f"peak {size(fullest.total)}",
        moments=[f"{moment.label}: {size(moment.total)}" for moment in found.moments],
        line=("measured", measured) if measured else None,
    )
    return Figure(
        identity,
        title,
        f"Planned peak {size(found.peak_bytes)}{where}, at: {fullest.label}.",
        draw,
        of=directory.name,
        legend=tuple((one.style, one.name) for one in reversed(series)),
        table=Table(("alive at the peak", "bytes", "share"), (*rows, ("all", size(fullest.total), "100.0%"))),
        note=_measured_memory(directory, measured),
    )


def _peaks(index: int, directory: RunDirectory) -> Figure:
    """Tensors alive at the peak of each benched layout, predicted and measured."""
    identity, title = f"memory-{index}", "Memory at the peak"
    sides = [
        (f"{layout.name}, {side}", parts)
        for layout in directory.benched
        for side, parts in (("planned", layout.predicted.get("composition")), ("measured", layout.composition))
        if parts
    ]
    if not sides:
        return absent(identity, title, "bench.json does not say what was alive.", directory.name)
    used = [part for part in PARTS if any(parts.get(part) for _, parts in sides)]
    rows = [
        Bar(
            name,
            [(slug(part), parts[part], f"{part} {size(parts[part])}") for part in used if parts.get(part)],
            size(sum(parts.values())),
        )
        for name, parts in sides
    ]
    cells = tuple(
        (name, *(size(parts.get(part, 0.0)) for part in used), size(sum(parts.values()))) for name, parts in sides
    )
    caption = "Tensors alive at the peak of the fullest rank of each layout."
    legend = tuple((slug(part), part) for part in used)
    table = Table(("layout", *used, "all"), cells)
    return bar_figure(identity, title, caption, rows, size, "bytes", table, of=directory.name, legend=legend)


def _measured_memory(directory: RunDirectory, measured: float | None) -> str:
    if measured:
        reserved = directory.largest(names.PEAK_RESERVED)
        more = f", {size(reserved)} reserved" if reserved else ""
        return f"Measured: {size(measured)} allocated{more}, the maximum over ranks and updates."
    host = directory.largest(names.PEAK_HOST)
    rest = f" The process held {size(host)} at most, Python and libraries among them." if host else ""
    why = HOST_ONLY if host else directory.missing.get("metrics.jsonl", "the run recorded none")
    return f"Measured: {NA}, {why}.{rest}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else text + "."


# Pipeline


def pipeline_section(subjects: Sequence[Subject]) -> Section:
    """The pipeline schedule of each run, simulated."""
    lead = "The actions of each pipeline rank over time; gray gaps are waits. Numbers are microbatches."
    figures: list[Figure] = []
    for directory, found in subjects:
        if directory.benched:
            played = [(layout.name, played_lists(layout.schedule)) for layout in directory.benched if layout.schedule]
            figures += [_played(f"pipeline-{len(figures) + i}", *one) for i, one in enumerate(played)]
            missing = "" if played else "no layout of bench.json has a pipeline."
        elif isinstance(found, str):
            missing = _sentence(found)
        elif found.schedule is None:
            missing = "pp_size is 1: there is no pipeline."
        else:
            missing = ""
            figures.append(_played(f"pipeline-{len(figures)}", directory.name, found.schedule))
        if missing:
            figures.append(absent(f"pipeline-{len(figures)}", "Pipeline schedule", missing, directory.name))
    return Section("pipeline", "Pipeline", lead, tuple(figures))


def _played(identity: str, name: str, schedule: Schedule) -> Figure:
    timed = schedule.unit == SECONDS
    label = duration if timed else lambda value: f"{value:.3g}"
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for span in schedule.spans)]
    waits = idle_seconds(schedule.spans, schedule.ranks)
    rows = tuple(
        (f"rank {rank}", label(busy), label(wait), f"{wait / schedule.played.total:.1%}")
        for rank, (busy, wait) in enumerate(zip(schedule.played.busy, waits))
    )
    note = f"Played with {schedule.microbatches} microbatches, sends taken as free."
    if not timed:
        note += " Seconds are not known: a forward counts 1, a backward 2."
    return Figure(
        identity,
        "Pipeline schedule",
        f"The ranks wait {schedule.idle:.1%} of the time: {label(min(waits))} to {label(max(waits))} of "
        f"{label(schedule.played.total)} each.",
        partial(
            gantt,
            spans=schedule.spans,
            ranks=schedule.ranks,
            label=short_duration if timed else label,
            title=schedule.unit,
        ),
        of=name,
        legend=(*((STYLES[kind], ACTIONS[kind]) for kind in kinds), ("idle", "idle")),
        table=Table(("rank", "busy", "idle", "idle share"), rows),
        note=note,
    )


# Traffic


def traffic_section(subjects: Sequence[Subject]) -> Section:
    """Bytes that a rank sends in one update by axis, as planned, and as recorded where there is a record."""
    lead = "Bytes that one rank sends in one update, by mesh axis and collective; of the pipeline rank that sends most."
    figures = tuple(_traffic(i, directory, found) for i, (directory, found) in enumerate(subjects))
    return Section("traffic", "Traffic by axis", lead, figures)


def _traffic(index: int, directory: RunDirectory, found: Forecast | str) -> Figure:
    identity, title = f"traffic-{index}", "Sent in one update"
    if directory.benched:
        return _recorded(identity, title, directory.name, directory.benched)
    if isinstance(found, str):
        return absent(identity, title, _sentence(found), directory.name)
    if not found.traffic:
        return absent(identity, title, "one rank sends nothing.", directory.name)
    by_axis = sent_by_axis(found.traffic)
    planned = ", ".join(f"{axis} {size(sent)}" for axis, sent in by_axis.items())
    headers = ("axis", "collective", "what", "ranks", "calls", "of one call", "sent")
    return bar_figure(
        identity,
        title,
        f"{found.layout}: {planned} planned.",
        [Bar(axis, _parts(found.traffic, axis), size(sent)) for axis, sent in by_axis.items()],
        size,
        "bytes sent by a rank",
        Table(headers, tuple(map(_row, found.traffic))),
        of=directory.name,
        legend=tuple((KINDS[k], k) for k in KINDS if any(one.collective == k for one in found.traffic)),
        note=f"Recorded: {NA}, a training run does not record its collectives; shardwright bench does.",
    )


def _parts(traffic: Sequence[Traffic], axis: str) -> list[tuple[str, float, str]]:
    """One stretch of a bar for each collective of an axis."""
    sums = {
        kind: sum(one.sent_bytes for one in traffic if one.axis == axis and one.collective == kind) for kind in KINDS
    }
    return [(KINDS[kind], sent, f"{kind} {size(sent)}") for kind, sent in sums.items() if sent]


def _row(one: Traffic) -> tuple[str, ...]:
    numbers = (f"{one.size}", f"{one.count:,.0f}", size(one.payload_bytes), size(one.sent_bytes))
    return one.axis, one.collective, one.what, *numbers


def _recorded(identity: str, title: str, name: str, layouts: Sequence[Measured]) -> Figure:
    sent = [layout for layout in layouts if layout.traffic]
    if not sent:
        return absent(identity, title, "bench.json holds no recorded traffic.", name)
    rows = [
        Bar(
            layout.name,
            [(f"axis-{axis}", own, f"{axis} {size(own)}") for axis, own in layout.by_axis.items()],
            size(sum(layout.by_axis.values())),
        )
        for layout in sent
    ]
    lines = [(layout.name, one) for layout in sent for one in layout.traffic]
    exact = sum(one.predicted_bytes == one.recorded_bytes for _, one in lines)
    cells = tuple(
        (layout, one.axis, one.collective, size(one.predicted_bytes), size(one.recorded_bytes)) for layout, one in lines
    )
    return bar_figure(
        identity,
        "Recorded in one update",
        f"Of {len(lines)} kinds of calls {exact} sent exactly the predicted bytes.",
        rows,
        size,
        "bytes sent by a rank",
        Table(("layout", "axis", "collective", "predicted", "recorded"), cells),
        of=name,
        legend=tuple((f"axis-{axis}", axis) for axis in AXES if any(axis in layout.by_axis for layout in sent)),
    )

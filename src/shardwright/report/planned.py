"""The figures of what the planner says of a run: memory, pipeline and traffic, with what was measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwright.layout.traffic import Traffic
from shardwright.plan.memory import PARTS
from shardwright.plan.traffic import sent_by_axis
from shardwright.report.charts import STYLES, Bar, Series, bars, gantt, idle_seconds, stacked
from shardwright.report.figure import NA, Figure, Section, Table, duration, size
from shardwright.report.predict import Forecast, Schedule
from shardwright.report.read import Directory, Measured

Subject = tuple[Directory, Forecast | str]

HOST_ONLY = "on the CPU torch's allocator keeps no count"
KINDS = {"all-gather": "k0", "reduce-scatter": "k1", "all-reduce": "k2", "all-to-all": "k3", "send": "k4"}
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}


def slug(part: str) -> str:
    return part.replace(" ", "-")


# Memory


def memory_section(subjects: Sequence[Subject]) -> Section:
    """The planner's memory timeline of each run on its fullest rank."""
    lead = (
        "What is alive on the fullest rank from the first forward of an update to the optimizer step, as planned; "
        "the greatest that was measured as a line where there is a measurement."
    )
    figures = tuple(_memory(i, *subject) for i, subject in enumerate(subjects))
    return Section("memory", "Memory", lead, figures)


def _memory(index: int, directory: Directory, found: Forecast | str) -> Figure:
    identity, title = f"memory-{index}", "Memory over one update"
    if isinstance(found, str):
        return Figure(identity, title, "", of=directory.name, missing=_sentence(found))
    fullest = max(found.moments, key=lambda moment: moment.total)
    used = [i for i in range(len(PARTS)) if any(moment.alive[i] for moment in found.moments)]
    series = [Series(PARTS[i], slug(PARTS[i]), [moment.alive[i] for moment in found.moments]) for i in used]
    measured = directory.largest("mem/peak_allocated_bytes")
    rows = [(PARTS[i], size(fullest.alive[i]), f"{fullest.alive[i] / fullest.total:.1%}") for i in used]
    where = f" of pipeline rank {found.pipeline_rank}" if found.schedule else ""
    return Figure(
        identity,
        title,
        f"Planned peak {size(found.peak_bytes)}{where}, at: {fullest.label}.",
        partial(
            stacked, series=series, label=size, title="moments of one update, in order", peak=f"peak {size(fullest.total)}",
            moments=[f"{moment.label}: {size(moment.total)}" for moment in found.moments],
            line=("measured", measured) if measured else None,
        ),
        of=directory.name,
        legend=tuple((one.style, one.name) for one in reversed(series)),
        table=Table(("alive at the peak", "bytes", "share"), (*rows, ("all", size(fullest.total), "100.0%"))),
        note=_measured_memory(directory, measured),
    )  # fmt: skip


def _measured_memory(directory: Directory, measured: float | None) -> str:
    if measured:
        reserved = directory.largest("mem/peak_reserved_bytes")
        more = f", {size(reserved)} reserved" if reserved else ""
        return f"Measured: {size(measured)} allocated{more}, the maximum over ranks and updates."
    host = directory.largest("mem/peak_host_bytes")
    rest = f" The process held {size(host)} at most, Python and libraries among them." if host else ""
    why = HOST_ONLY if host else directory.missing.get("metrics.jsonl", "the run recorded none")
    return f"Measured: {NA}, {why}.{rest}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else text + "."


# Pipeline


def pipeline_section(subjects: Sequence[Subject]) -> Section:
    """The pipeline schedule of each run, played."""
    lead = "What each pipeline rank does when, and where it waits. Numbers are microbatches."
    figures = tuple(_pipeline(i, *subject) for i, subject in enumerate(subjects))
    return Section("pipeline", "Pipeline", lead, figures)


def _pipeline(index: int, directory: Directory, found: Forecast | str) -> Figure:
    identity, title = f"pipeline-{index}", "Pipeline schedule"
    if isinstance(found, str):
        return Figure(identity, title, "", of=directory.name, missing=_sentence(found))
    if found.schedule is None:
        return Figure(identity, title, "", of=directory.name, missing="pp_size is 1: there is no pipeline.")
    schedule = found.schedule
    label = duration if schedule.seconds else lambda value: f"{value:.3g}"
    unit = "planned seconds" if schedule.seconds else "forwards of one block"
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for span in schedule.spans)]
    waits = idle_seconds(schedule.spans, schedule.ranks)
    rows = tuple(
        (str(rank), label(busy), label(wait), f"{wait / schedule.played.total:.1%}")
        for rank, (busy, wait) in enumerate(zip(schedule.played.busy, waits))
    )
    return Figure(
        identity,
        title,
        f"{found.layout}: the ranks wait {schedule.idle:.1%} of the time, {label(min(waits))} to {label(max(waits))} of "
        f"{label(schedule.played.total)}.",
        partial(gantt, spans=schedule.spans, ranks=schedule.ranks, label=label, title=unit),
        of=directory.name,
        legend=(*((STYLES[kind], ACTIONS[kind]) for kind in kinds), ("idle", "idle")),
        table=Table(("rank", "busy", "idle", "idle share"), rows),
        note=_how(schedule, directory),
    )


def _how(schedule: Schedule, directory: Directory) -> str:
    parts = [f"Played with {schedule.microbatches} microbatches, sends taken as free."]
    if not schedule.seconds:
        parts.append("The device's speed is not known: a block's forward counts 1, its backward 2.")
    return " ".join(parts)


# Traffic


def traffic_section(subjects: Sequence[Subject]) -> Section:
    """What a rank sends in one update by axis, as planned, and as recorded where it was."""
    lead = "Bytes that one rank sends in one update, by mesh axis and collective; of the pipeline rank that sends most."
    figures: list[Figure] = []
    for i, (directory, found) in enumerate(subjects):
        figures.append(_traffic(i, directory, found))
    return Section("traffic", "Traffic by axis", lead, tuple(figures))


def _traffic(index: int, directory: Directory, found: Forecast | str) -> Figure:
    identity, title = f"traffic-{index}", "Sent in one update"
    if directory.benched:
        return _recorded(identity, title, directory.name, directory.benched)
    if isinstance(found, str):
        return Figure(identity, title, "", of=directory.name, missing=_sentence(found))
    if not found.traffic:
        return Figure(identity, title, "", of=directory.name, missing="one rank sends nothing.")
    by_axis = sent_by_axis(found.traffic)
    rows = [Bar(axis, _parts(found.traffic, axis), size(sent)) for axis, sent in by_axis.items()]
    used = [kind for kind in KINDS if any(one.collective == kind for one in found.traffic)]
    return Figure(
        identity,
        title,
        f"{found.layout}: "
        + ", ".join(f"{axis} {size(sent)}" for axis, sent in by_axis.items())
        + " planned.",
        partial(bars, rows=rows, label=size, title="bytes sent by a rank"),
        of=directory.name,
        legend=tuple((KINDS[kind], kind) for kind in used),
        table=Table(
            ("axis", "collective", "what", "ranks", "calls", "of one call", "sent"),
            tuple(_row(one) for one in found.traffic),
        ),
        note=f"Recorded: {NA}, a training run does not record its collectives; shardwright bench does.",
    )


def _parts(traffic: Sequence[Traffic], axis: str) -> list[tuple[str, float, str]]:
    """One stretch of a bar for each collective of an axis."""
    sums = {
        kind: sum(one.sent_bytes for one in traffic if one.axis == axis and one.collective == kind)
        for kind in KINDS
    }
    return [(KINDS[kind], sent, f"{kind} {size(sent)}") for kind, sent in sums.items() if sent]


def _row(one: Traffic) -> tuple[str, ...]:
    numbers = (f"{one.size}", f"{one.count:,.0f}", size(one.payload_bytes), size(one.sent_bytes))
    return one.axis, one.collective, one.what, *numbers


def _recorded(identity: str, title: str, name: str, layouts: Sequence[Measured]) -> Figure:
    sent = [layout for layout in layouts if layout.traffic]
    if not sent:
        return Figure(identity, title, "", of=name, missing="bench.json holds no recorded traffic.")
    axes = sorted({axis for layout in sent for axis in layout.traffic})
    rows = [
        Bar(
            layout.name,
            [
                (f"axis-{axis}", layout.traffic[axis], f"{axis} {size(layout.traffic[axis])}")
                for axis in layout.traffic
            ],
            size(sum(layout.traffic.values())),
        )
        for layout in sent
    ]
    return Figure(
        identity,
        "Recorded in one update",
        "Recorded: " + ", ".join(f"{row.name} {row.value}" for row in rows) + ".",
        partial(bars, rows=rows, label=size, title="bytes sent by a rank"),
        of=name,
        legend=tuple((f"axis-{axis}", axis) for axis in axes),
        table=Table(
            ("layout", *axes),
            tuple((layout.name, *(size(layout.traffic.get(axis, 0.0)) for axis in axes)) for layout in sent),
        ),
    )

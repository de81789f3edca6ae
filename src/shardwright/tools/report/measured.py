"""The figures of measured speed and memory: MFU and HFU, communication that no compute covers, memory by phase."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shardwright.arch.flops import UTILISATION
from shardwright.measure.metric_names import GROUPS, PHASES
from shardwright.tools.report.charts import Bar
from shardwright.tools.report.figure import (
    NA,
    Figure,
    Section,
    Table,
    absent,
    bar_figure,
    duration,
    known,
    short_duration,
    size,
)
from shardwright.tools.report.read import Measured


def utilisation_section(measured: Sequence[Measured]) -> Section:
    """The used share of the devices' peak, and the communication of an update that no compute covers."""
    lead = "The share of the devices' peak that an update uses, and the time in which only communication runs."
    return Section("utilisation", "Utilisation", lead, (_utilised(measured), _exposed(measured)))


def _utilised(measured: Sequence[Measured]) -> Figure:
    identity, title, share = "utilisation-mfu", "MFU and HFU", "{:.1%}".format
    found = [(one, one.mfu, one.hfu if one.hfu is not None else one.mfu) for one in measured if one.mfu is not None]
    if not found:
        why = "the peak of the device was not known: shardwright doctor measures the peak, bench --device FILE uses the file."
        return absent(identity, title, why)
    rows = [
        Bar(
            one.name,
            [("c0", mfu, f"MFU {share(mfu)}"), *([("c1", hfu - mfu, "recomputed")] if hfu > mfu else [])],
            share(mfu) if hfu <= mfu else f"{share(mfu)}, {share(hfu)}",
        )
        for one, mfu, hfu in found
    ]
    low, high = min(mfu for _, mfu, _ in found), max(mfu for _, mfu, _ in found)
    return bar_figure(
        identity,
        title,
        f"MFU {share(high)}." if low == high else f"MFU from {share(low)} to {share(high)}.",
        rows,
        lambda v: f"{100 * v:.3g}%" if v else "0",
        "share of the devices' peak",
        Table(("of", "MFU", "HFU"), tuple((one.name, share(mfu), share(hfu)) for one, mfu, hfu in found)),
        legend=(("c0", "MFU"), ("c1", "recomputed, in HFU alone")) if any(hfu > mfu for _, mfu, hfu in found) else (),
        note=UTILISATION,
    )


def _exposed(measured: Sequence[Measured]) -> Figure:
    identity, title = "utilisation-exposed", "Communication that no compute covers"
    found = [one for one in measured if one.exposed]
    if not found:
        why = "no update was profiled: set logging.profile_steps, or use shardwright bench."
        return absent(identity, title, why)
    rows, cells = [], []
    for one in found:
        total = sum(one.exposed.values())
        own = [(group, one.exposed[group]) for group in GROUPS if group in one.exposed]
        share = f" ({total / median(one.step_seconds):.0%})" if one.step_seconds else ""
        parts = [(f"axis-{group}", seconds, f"{group} {duration(seconds)}") for group, seconds in own]
        rows.append(Bar(one.name, parts, f"{duration(total)}{share}"))
        cells += [(one.name, group, "all", NA, duration(seconds)) for group, seconds in one.exposed.items()]
    for one in found:
        cells += [
            (one.name, axis, kind, duration(running), duration(exposed))
            for axis, kind, running, exposed in one.communication
        ]
    least, most = min(rows, key=lambda row: row.length), max(rows, key=lambda row: row.length)
    caption = f"From {least.value} ({least.name}) to {most.value} ({most.name}) of an update."
    return bar_figure(
        identity,
        title,
        f"{most.value} of an update." if len(rows) == 1 else caption,
        rows,
        short_duration,
        "time of an update, exposed",
        Table(("of", "axis", "collective", "running", "exposed"), tuple(cells)),
        legend=tuple((f"axis-{group}", group) for group in GROUPS if any(group in one.exposed for one in found)),
        note="From a trace of few updates, scaled to the update as timed: of a bench the mean over ranks, of a run the slowest "
        "rank's. Axes at the same time count for each. On pp a rank waits for other stages.",
    )


def phase_figure(measured: Sequence[Measured]) -> Figure:
    """The peak of the tensors in each phase, on the fullest rank."""
    identity, title = "memory-phases", "Memory by phase"
    found = [one for one in measured if one.phases]
    if not found:
        why = "no update's memory was measured by phase: set logging.profile_steps, or use shardwright bench."
        return absent(identity, title, why)
    phases = [phase for phase in PHASES if any(phase in one.phases for one in found)]
    rows = [
        Bar(f"{one.name}, {phase}", [(f"phase-{phase}", one.phases[phase], phase)], size(one.phases[phase]))
        for one in found
        for phase in phases
        if phase in one.phases
    ]
    fullest = max(rows, key=lambda row: row.length)
    cells = tuple((one.name, *(known(one.phases.get(phase), size) for phase in phases)) for one in found)
    return bar_figure(
        identity,
        title,
        f"The most is {fullest.value} ({fullest.name}).",
        rows,
        size,
        "most bytes of tensors",
        Table(("of", *phases), cells),
        legend=tuple((f"phase-{phase}", phase) for phase in phases),
        note="The fullest rank. Tensors as torch's dispatcher sees them, the same on CPU and GPU; parameters and optimizer "
        "states among them.",
    )

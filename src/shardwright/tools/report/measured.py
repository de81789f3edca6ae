"""The figures of what was measured of speed and memory: MFU and HFU, communication that nothing covers, memory by phase."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from shardwright.arch.flops import UTILISATION
from shardwright.measure.metric_names import GROUPS, PHASES
from shardwright.tools.report.charts import Bar, bars
from shardwright.tools.report.figure import NA, Figure, Section, Table, duration, known, short_duration, size
from shardwright.tools.report.read import Measured


def utilisation_section(measured: Sequence[Measured]) -> Section:
    """What of the devices' peak is used, and what of an update is communication that no compute covers."""
    lead = "How much of what the devices can do an update uses, and the time in which only communication runs."
    return Section("utilisation", "Utilisation", lead, (_utilised(measured), _exposed(measured)))


def _share(value: float) -> str:
    return f"{value:.1%}"


def _utilised(measured: Sequence[Measured]) -> Figure:
    found = [(one, one.mfu, one.hfu if one.hfu is not None else one.mfu) for one in measured if one.mfu is not None]
    if not found:
        why = "the peak of the device was not known: shardwright doctor measures it; bench --device FILE uses it."
        return Figure("utilisation-mfu", "MFU and HFU", "", missing=why)
    rows = [
        Bar(
            one.name,
            [("c0", mfu, f"MFU {_share(mfu)}"), *([("c1", hfu - mfu, "recomputed")] if hfu > mfu else [])],
            _share(mfu) if hfu <= mfu else f"{_share(mfu)}, {_share(hfu)}",
        )
        for one, mfu, hfu in found
    ]
    recomputes = any(hfu > mfu for _, mfu, hfu in found)
    table = Table(("of", "MFU", "HFU"), tuple((one.name, _share(mfu), _share(hfu)) for one, mfu, hfu in found))
    low, high = min(mfu for _, mfu, _ in found), max(mfu for _, mfu, _ in found)
    return Figure(
        "utilisation-mfu",
        "MFU and HFU",
        f"MFU {_share(high)}." if low == high else f"MFU from {_share(low)} to {_share(high)}.",
        partial(
            bars,
            rows=rows,
            label=lambda v: f"{100 * v:.3g}%" if v else "0",
            title="share of the devices' peak",
        ),
        legend=(("c0", "MFU"), ("c1", "recomputed, in HFU alone")) if recomputes else (),
        table=table,
        note=UTILISATION,
    )


def _exposed(measured: Sequence[Measured]) -> Figure:
    title = "Communication that no compute covers"
    found = [one for one in measured if one.exposed]
    if not found:
        why = "no update was profiled: set logging.profile_steps, or use shardwright bench."
        return Figure("utilisation-exposed", title, "", missing=why)
    rows, used = [], set[str]()
    for one in found:
        exposed, total = one.exposed, sum(one.exposed.values())
        used |= exposed.keys()
        parts = [
            (f"axis-{axis}", exposed[axis], f"{axis} {duration(exposed[axis])}") for axis in GROUPS if axis in exposed
        ]
        share = f" ({total / median(one.step_seconds):.0%})" if one.step_seconds else ""
        rows.append(Bar(one.name, parts, f"{duration(total)}{share}"))
    ordered = sorted(rows, key=lambda row: row.length)
    least, most = ordered[0], ordered[-1]
    kinds = [
        (one.name, axis, kind, duration(running), duration(exposed))
        for one in found
        for axis, kind, running, exposed in one.communication
    ]
    whole = [(one.name, axis, "all", NA, duration(exposed)) for one in found for axis, exposed in one.exposed.items()]
    table = Table(("of", "axis", "collective", "running", "exposed"), (*whole, *kinds))
    return Figure(
        "utilisation-exposed",
        title,
        f"{most.value} of an update."
        if least is most
        else f"From {least.value} ({least.name}) to {most.value} ({most.name}) of an update.",
        partial(bars, rows=rows, label=short_duration, title="time of an update, exposed"),
        legend=tuple((f"axis-{axis}", axis) for axis in GROUPS if axis in used),
        table=table,
        note="From a trace of few updates, scaled to the update as timed: of a bench the mean over ranks, of a run the slowest "
        "rank's. Axes at the same time count for each. On pp it is waiting for other stages.",
    )


def phase_figure(measured: Sequence[Measured]) -> Figure:
    """What tensors take at most in each phase, of the fullest rank."""
    title = "Memory by phase"
    found = [one for one in measured if one.phases]
    if not found:
        why = "no update's memory was measured by phase: set logging.profile_steps, or use shardwright bench."
        return Figure("memory-phases", title, "", missing=why)
    phases = [phase for phase in PHASES if any(phase in one.phases for one in found)]
    rows = [
        Bar(f"{one.name}, {phase}", [(f"phase-{phase}", one.phases[phase], phase)], size(one.phases[phase]))
        for one in found
        for phase in phases
        if phase in one.phases
    ]
    fullest = max(rows, key=lambda row: row.length)
    return Figure(
        "memory-phases",
        title,
        f"The most is {fullest.value} ({fullest.name}).",
        partial(bars, rows=rows, label=size, title="most bytes of tensors"),
        legend=tuple((f"phase-{phase}", phase) for phase in phases),
        table=Table(
            ("of", *phases),
            tuple((one.name, *(known(one.phases.get(phase), size) for phase in phases)) for one in found),
        ),
        note="The fullest rank. Tensors as torch's dispatcher sees them, the same on CPU and GPU; parameters and optimizer "
        "states among them.",
    )

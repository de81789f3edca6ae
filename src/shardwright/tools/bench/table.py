"""The table of a bench, and the lines below the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from shardwright.arch.flops import UTILISATION
from shardwright.console import show_table
from shardwright.tools.bench.timing import Spread
from shardwright.units import format_bytes, format_flops, format_seconds

Result = Mapping[str, Any]
NOT_AVAILABLE = "n/a"


def show(console: Console, entries: Sequence[Result]) -> None:
    """Prints a row for each layout and peer."""
    rows = [_cells(entry) for entry in entries]
    show_table(console, list(rows[0]), [list(row.values()) for row in rows], right=list(rows[0])[1:])


def _cells(entry: Result) -> dict[str, str]:
    predicted, peak, p50 = entry.get("predicted") or {}, entry.get("peak_bytes"), entry["step_seconds_p50"]
    sent, as_planned = _sent(entry.get("traffic"))
    return {
        "layout": entry["name"],
        "target tokens/s": f"{entry['targets_per_s_p50']:,.0f}{_half_width(entry['step_seconds_spread'])}",
        "a device": f"{entry['targets_per_s_per_device']:,.0f}",
        "speed": f"{entry['speed']:.2f}",
        "p50": format_seconds(p50),
        "p95": _known(entry["step_seconds_p95"], format_seconds),
        "max": format_seconds(entry["step_seconds_max"]),
        "MFU": _known(entry["mfu"], "{:.1%}".format),
        "HFU": _known(entry["hfu"], "{:.1%}".format),
        "planned step": _planned(predicted.get("step_seconds"), p50, format_seconds),
        "peak memory": _known(peak, format_bytes),
        "planned": _planned(predicted.get("peak_bytes"), peak, format_bytes),
        "sent": sent,
        "as planned": as_planned,
        "exposed": _known(entry.get("communication", {}).get("exposed_seconds"), format_seconds),
        "loss off": f"{entry['loss_off']:.0e}",
    }


def _half_width(spread: float | None) -> str:
    return "" if spread is None else f" ±{spread:.0%}"


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return NOT_AVAILABLE if value is None else text(value)


def _planned(predicted: float | None, measured: float | None, text: Callable[[float], str]) -> str:
    """The prediction, and its distance from the measurement."""
    if predicted is None or not measured:
        return NOT_AVAILABLE
    return f"{text(predicted)} ({predicted / measured - 1:+.0%})"


def _sent(traffic: Mapping[str, Any] | None) -> tuple[str, str]:
    """(bytes that a rank sends in an update, whether calls and bytes are as planned)."""
    if traffic is None:
        return NOT_AVAILABLE, NOT_AVAILABLE
    rows = [row for kinds in traffic.values() for row in kinds.values()]
    known = [row["equal"] for row in rows]
    equal = NOT_AVAILABLE if None in known else "equal" if all(known) else "DIFFERS"
    return format_bytes(sum(row["recorded_bytes"] for row in rows)), equal


def lines_below(entries: Sequence[Result], measuring: Sequence[float], peak: Mapping[str, Any] | None) -> Iterator[str]:
    """What the table leaves out: warm-up, data, garbage collection, collectives, stragglers, the cost of measuring."""
    for entry in entries:
        yield (
            f"{entry['name']}: real tokens/s {entry['real_tokens_per_s']:,.0f}, slots/s {entry['slots_per_s']:,.0f}, padding "
            f"{entry['padding_fraction']:.0%}, data wait {format_seconds(entry['wait_seconds'])}, garbage collection "
            f"{format_seconds(entry['collected_seconds'])} an update; warm-up, not counted: "
            f"{format_seconds(max(entry['first_seconds']))} at most."
        )
    for entry in entries:
        for axis, kinds in entry.get("communication", {}).get("by_axis", {}).items():
            for kind, one in kinds.items():
                yield (
                    f"{entry['name']}: {kind} over {axis} {format_seconds(one['seconds'])} an update, "
                    f"{format_seconds(one['exposed_seconds'])} exposed."
                )
    for entry in entries:
        if entry["kind"] == "layout" and len(entry["ranks"]) > 1:
            own = "  ".join(
                f"{number}: {format_seconds(rank['own_seconds'])} + {_known(rank['exposed_seconds'], format_seconds)}"
                for number, rank in enumerate(entry["ranks"])
            )
            yield f"{entry['name']}: own work + waits in collectives, by rank: {own}"
    spread, step = Spread.of(measuring), min(entry["step_seconds_p50"] for entry in entries)
    yield (
        f"Measuring takes train {format_seconds(spread.p50)}{_half_width(spread.half_width)} an update (n={spread.n}), "
        f"{spread.p50 / step:.2%} of the shortest step."
    )
    if peak is None:
        yield (
            f"MFU and HFU: {NOT_AVAILABLE}, the peak of this device is not known. `shardwright doctor` measures the peak; give "
            "its file as --device."
        )
    else:
        yield f"{UTILISATION} Peak {format_flops(peak['flops'])}/s a device: {peak['source']}."

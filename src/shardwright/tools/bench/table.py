"""The table of a bench, and the lines below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.arch.flops import UTILISATION
from shardwright.console import say
from shardwright.tools.bench.turns import Spread
from shardwright.units import format_bytes, format_flops, format_seconds

COLUMNS = (
    "layout",
    "target tokens/s",
    "a device",
    "speed",
    "p50",
    "p95",
    "max",
    "MFU",
    "HFU",
    "planned step",
    "peak memory",
    "planned",
    "sent",
    "as planned",
    "exposed",
    "loss off",
)
NOT_AVAILABLE = "n/a"


def show(console: Console, entries: Sequence[dict[str, Any]]) -> None:
    """Prints a line for each layout and peer: a table on a terminal, columns of plain text elsewhere."""
    rows = [_cells(entry) for entry in entries]
    if console.is_terminal:
        table = Table(show_edge=False, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "layout" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows)]
    for line in (COLUMNS, *rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        say(console, text)


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    width, predicted = entry["step_seconds_spread"], entry.get("predicted") or {}
    spread = "" if width is None else f" ±{width:.0%}"
    return (
        entry["name"],
        f"{entry['targets_per_s_p50']:,.0f}{spread}",
        f"{entry['targets_per_s_per_device']:,.0f}",
        f"{entry['speed']:.2f}",
        format_seconds(entry["step_seconds_p50"]),
        _or_not(entry["step_seconds_p95"], format_seconds),
        format_seconds(entry["step_seconds_max"]),
        _or_not(entry["mfu"], "{:.1%}".format),
        _or_not(entry["hfu"], "{:.1%}".format),
        _beside(predicted.get("step_seconds"), entry["step_seconds_p50"], format_seconds),
        _or_not(entry.get("peak_bytes"), format_bytes),
        _beside(predicted.get("peak_bytes"), entry.get("peak_bytes"), format_bytes),
        *_sent(entry.get("traffic")),
        _or_not(entry.get("communication", {}).get("exposed_seconds"), format_seconds),
        f"{entry['loss_off']:.0e}",
    )


def _or_not(value: float | None, text: Callable[[float], str]) -> str:
    return NOT_AVAILABLE if value is None else text(value)


def _beside(predicted: float | None, measured: float | None, text: Callable[[float], str]) -> str:
    """The prediction, and how far it is from what was measured."""
    if predicted is None or not measured:
        return NOT_AVAILABLE
    return f"{text(predicted)} ({predicted / measured - 1:+.0%})"


def _sent(traffic: dict[str, Any] | None) -> tuple[str, str]:
    """(bytes that a rank sends in an update, whether calls and bytes are as planned)."""
    if traffic is None:
        return NOT_AVAILABLE, NOT_AVAILABLE
    rows = [row for kinds in traffic.values() for row in kinds.values()]
    known = [row["equal"] for row in rows]
    verdict = NOT_AVAILABLE if None in known else "equal" if all(known) else "DIFFERS"
    return format_bytes(sum(row["recorded_bytes"] for row in rows)), verdict


def lines_below(
    entries: Sequence[dict[str, Any]], measuring: Sequence[float], peak: Mapping[str, Any] | None
) -> list[str]:
    """What a table does not hold: warm-up, data, garbage collection, losses, the cost of measuring, verdicts."""
    lines = []
    for entry in entries:
        first = max(entry["first_seconds"])
        lines.append(
            f"{entry['name']}: real tokens/s {entry['real_tokens_per_s']:,.0f}, slots/s {entry['slots_per_s']:,.0f}, padding "
            f"{entry['padding_fraction']:.0%}, data wait {format_seconds(entry['wait_seconds'])}, garbage collection "
            f"{format_seconds(entry['collected_seconds'])} an update; warm-up, not counted: {format_seconds(first)} at most."
        )
    for entry in entries:
        for axis, kinds in entry.get("communication", {}).get("by_axis", {}).items():
            for kind, one in kinds.items():
                lines.append(
                    f"{entry['name']}: {kind} over {axis} {format_seconds(one['seconds'])} an update, "
                    f"{format_seconds(one['exposed_seconds'])} of it exposed."
                )
    for entry in entries:
        lines += _stragglers(entry)
    return [*lines, _measuring(entries, measuring), _convention(peak)]


def _measuring(entries: Sequence[dict[str, Any]], seconds: Sequence[float]) -> str:
    """What recording costs `train`, which it does not pay in these times."""
    spread, step = Spread.of(seconds), min(entry["step_seconds_p50"] for entry in entries)
    width = "" if spread.half_width is None else f" ±{spread.half_width:.0%}"
    return (
        f"Measuring takes train {format_seconds(spread.p50)}{width} an update (n={spread.n}), "
        f"{spread.p50 / step:.2%} of the shortest step."
    )


def _convention(peak: Mapping[str, Any] | None) -> str:
    """How MFU and HFU are counted, or why they are not known."""
    if peak is None:
        return (
            f"MFU and HFU: {NOT_AVAILABLE}, the peak of this device is not known. `shardwright doctor` measures it; give its "
            "file as --device."
        )
    return f"{UTILISATION} Peak {format_flops(peak['flops'])}/s a device: {peak['source']}."


def _stragglers(entry: dict[str, Any]) -> list[str]:
    ranks = entry["ranks"]
    if entry["kind"] != "layout" or len(ranks) == 1:
        return []
    own = "  ".join(
        f"{number}: {format_seconds(rank['own_seconds'])} + {_or_not(rank['exposed_seconds'], format_seconds)}"
        for number, rank in enumerate(ranks)
    )
    return [f"{entry['name']}: what a rank does itself + waits in collectives, by rank: {own}"]

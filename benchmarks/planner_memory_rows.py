"""Published peak memory as (problem, layout, program, measured bytes), one row each, and the table of errors.

Rows are split into a calibration and a validation half by a hash of their settings, as step times are. Only
`Program.fragmentation` is fitted, on the calibration half, as the smallest value (at least 0.05) at which no calibration row
is under-estimated by more than 10%, neither with it in the fit nor with it left out; the rest of a program's memory is what it
is known to keep.

Two settings of nanotron are not recorded with its runs: whether gathered inputs of tensor-parallel products are kept. Where
that changes the prediction by more than 10%, a row is not an error but a bracket: it is inside or outside.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner_rows import nanotron, torchtitan
from published_programs import MEGATRON, NANOTRON, TORCHTITAN, TORCHTITAN_COMPILED

from shardwright.arch.known_models import known_shape
from shardwright.layout.axes import Axes
from shardwright.planner.hardware import find_device
from shardwright.planner.memory_timeline import Peak, peak
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.program import Program

REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "reference"
GIB = 2**30


@dataclass(frozen=True)
class MemoryRow:
    """One published peak. kind: `allocated` by tensors, or `reserved` by the allocator. ranks: pipeline ranks measured.

    other: the same program with the setting that is not recorded the other way.
    """

    source: str
    label: str
    problem: Problem
    layout: Layout
    program: Program
    measured: float
    kind: str
    stage_blocks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    excluded: str = ""
    other: Program | None = None

    @property
    def validation(self) -> bool:
        """Whether the row is in the validation half: the first hex digit of the SHA-256 of its settings is 8 or more."""
        return int(hashlib.sha256(f"{self.source}|{self.label}".encode()).hexdigest()[0], 16) >= 8

    def peak(self, program: Program | None = None) -> Peak:
        """The predicted peak of the ranks that were measured; as many microbatches as reach the steady state do."""
        problem, layout = replace(self.problem, program=program or self.program), self.layout
        if layout.schedule != "gpipe":
            few = min(layout.microbatches(problem), 2 * layout.axes.pp + 2)
            problem = replace(problem, global_batch_size=layout.microbatch_rows * layout.axes.data_ranks * few)
        return peak(problem, layout, ranks=self.ranks, stage_blocks=self.stage_blocks)

    def predicted(self, program: Program | None = None) -> float:
        """The prediction of the kind that was measured, in bytes."""
        found = self.peak(program)
        return found.reserved if self.kind == "reserved" else found.allocated

    def bracket(self) -> tuple[float, float] | None:
        """The predictions of both settings where they differ by more than 10%, else None."""
        if self.other is None:
            return None
        ends = sorted((self.predicted(), self.predicted(self.other)))
        return (ends[0], ends[1]) if ends[1] > 1.1 * ends[0] else None


def _read(name: str) -> Iterator[dict[str, str]]:
    with (REFERENCE / name).open(newline="") as file:
        yield from csv.DictReader(file)


def nanotron_rows() -> Iterator[MemoryRow]:
    """Rank 0 of each run; GB of the source are GiB (its logger divides by 1024 cubed)."""
    for r, row in zip(_read("nanotron.csv"), nanotron()):
        layout = row.layout
        if layout.microbatches(row.problem) < layout.axes.pp:
            # Its 1F1B runs with fewer microbatches than stages: all forwards, then all backwards.
            layout = replace(layout, schedule="gpipe")
        yield MemoryRow(
            "nanotron",
            row.label,
            row.problem,
            layout,
            NANOTRON,
            float(r["memory_gb_rank0"]) * GIB,
            "reserved",
            row.stage_blocks,
            (0,),
            "TP = 32 over four nodes: the data's README says some are off by 2 to 3 times"
            if layout.axes.tp == 32
            else "",
            replace(NANOTRON, keeps_gathered=False) if layout.axes.tp > 1 else None,
        )


def torchtitan_rows() -> Iterator[MemoryRow]:
    for r, row in zip(_read("torchtitan.csv"), torchtitan()):
        if not r["peak_memory"] or r["peak_memory"] == "OOM":
            continue
        compiled = r["compile"] == "yes"
        excluded = ""
        if r["precision"] == "float8":
            excluded = "float8: its weight and activation copies are not planned"
        elif not r["local_batch"]:
            excluded = "local batch not stated"
        problem, layout = row.problem, row.layout
        if layout.axes.pp > 1:
            # torchtitan cuts the local batch into microbatches of one row.
            layout = replace(layout, microbatch_rows=1)
        yield MemoryRow(
            "torchtitan",
            row.label,
            problem,
            layout,
            TORCHTITAN_COMPILED if compiled else TORCHTITAN,
            float(r["peak_memory"]) * GIB,
            "reserved",
            row.stage_blocks,
            excluded=excluded,
        )


def out_of_memory_rows() -> Iterator[tuple[str, float, float]]:
    """(label, predicted bytes on the device, bytes that it has) of torchtitan runs that ran out of memory."""
    for r, row in zip(_read("torchtitan.csv"), torchtitan()):
        if r["peak_memory"] == "OOM":
            found = peak(replace(row.problem, program=TORCHTITAN), row.layout, stage_blocks=row.stage_blocks)
            yield row.label, found.device, find_device(row.device).memory_bytes


def simumax_rows() -> Iterator[MemoryRow]:
    """Megatron-LM with Transformer Engine on 8 x B200: bf16, distributed optimizer, one row per microbatch, fused loss."""
    for r in _read("simumax.csv"):
        shape = replace(known_shape(r["model"]), layers=int(r["layers"]))
        tp, pp, cp, dp, k = (int(r[key]) for key in ("tp", "pp", "cp", "dp", "microbatches"))
        problem = Problem(shape, int(r["seq"]), dp * k, "bf16", "fp32", "fp32")
        layout = Layout(Axes(pp=pp, dp_shard=dp, cp=cp, tp=tp), "zero1", 1, "1f1b" if pp > 1 else None)
        label = f"{r['model']} {shape.layers} blocks tp{tp} pp{pp} cp{cp} dp{dp} x {k} s{r['seq']}"
        blocks = tuple([shape.layers // pp] * pp)
        yield MemoryRow(
            "simumax", label, problem, layout, MEGATRON, float(r["allocated_gib"]) * GIB, "allocated", blocks
        )


def all_memory_rows() -> list[MemoryRow]:
    """Every published row that has a peak, excluded ones too."""
    return [*nanotron_rows(), *torchtitan_rows(), *simumax_rows()]


@dataclass(frozen=True)
class Error:
    """One row's outcome: relative error of the prediction, or whether the measurement is in the bracket (within 10%)."""

    row: MemoryRow
    predicted: float
    error: float | None
    inside: bool | None


def errors(rows: list[MemoryRow]) -> list[Error]:
    """The outcome of every row that is not excluded."""
    found = []
    for row in rows:
        if row.excluded:
            continue
        ends = row.bracket()
        if ends is None:
            predicted = row.predicted()
            found.append(Error(row, predicted, predicted / row.measured - 1, None))
        else:
            found.append(Error(row, ends[1], None, ends[0] / 1.1 <= row.measured <= ends[1] * 1.1))
    return found


def fitted_fragmentation(rows: list[MemoryRow], program: Program) -> tuple[float, float]:
    """(the smallest fragmentation, in steps of 0.01, that puts no calibration row below by more than a margin, the margin).

    The margin is the widest, 10% or less, at which a calibration row that is left out of the fit is not under-estimated by
    more than 10% either. Fitting the lowest row to 10% exactly would leave the lowest row of the other half below it in one
    case of two.
    """
    own = [
        row
        for row in rows
        if row.program == program and not row.validation and not row.excluded and row.bracket() is None
    ]
    steps = range(5, 60)
    lowest = [
        sorted(
            (row.predicted(replace(program, fragmentation=step / 100)) / row.measured - 1, index)
            for index, row in enumerate(own)
        )[:2]
        for step in steps
    ]

    def fit(margin: float, left_out: int | None = None) -> int:
        for place, errors_of in enumerate(lowest):
            if all(error >= -margin for error, index in errors_of if index != left_out):
                return place
        raise ValueError(f"no fragmentation explains {program.name}")

    def holds(margin: float) -> bool:
        return all(
            error >= -0.1
            for row in {index for errors_of in lowest for _, index in errors_of}
            for error, index in lowest[fit(margin, row)]
            if index == row
        )

    margin = next(half / 200 for half in range(20, 0, -1) if holds(half / 200))
    return steps[fit(margin)] / 100, margin


def memory_table(every_row: bool) -> str:
    """Errors of the validation half by source, the outcome of every row if asked for, and what is left out and why."""
    outcomes, lines = errors(all_memory_rows()), []
    lines.append(
        f"{'source':<12}{'half':<14}{'rows':>5}{'median |error|':>16}{'90th':>8}{'lowest':>9}{'highest':>9}{'in bracket':>13}"
    )
    for validation, half in ((False, "calibration"), (True, "validation")):
        chosen = [one for one in outcomes if one.row.validation == validation]
        for source in (*dict.fromkeys(one.row.source for one in chosen), "all"):
            own = [one for one in chosen if source in (one.row.source, "all")]
            plain = sorted(one.error for one in own if one.error is not None)
            size = sorted(abs(error) for error in plain)
            inside = [one.inside for one in own if one.inside is not None]
            lines.append(
                f"{source:<12}{half:<14}{len(plain):>5}{size[len(size) // 2]:>15.1%}{size[int(0.9 * (len(size) - 1))]:>8.1%}"
                f"{plain[0]:>9.1%}{plain[-1]:>9.1%}" + (f"{sum(inside):>8} of {len(inside)}" if inside else "")
            )
    if every_row:
        for one in outcomes:
            outcome = f"{one.error:+.1%}" if one.error is not None else ("in bracket" if one.inside else "outside")
            half = "validation" if one.row.validation else "calibration"
            lines.append(
                f"{one.row.source} | {one.row.label} | {half} | {one.row.kind} "
                f"{one.row.measured / GIB:.2f} GiB | predicted {one.predicted / GIB:.2f} | {outcome}"
            )
    reasons: dict[str, int] = {}
    for row in all_memory_rows():
        if row.excluded:
            reasons[row.excluded] = reasons.get(row.excluded, 0) + 1
    lines += [
        f"ran out of memory at {capacity / GIB:.0f} GiB, predicted {needed / GIB:.0f} GiB: {label[:60]}"
        for label, needed, capacity in out_of_memory_rows()
    ]
    lines += [f"left out: {count} rows: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)


def memory_tables(write: Callable[[str], None], every_row: bool = False) -> None:
    """Writes the table line by line."""
    for line in memory_table(every_row).splitlines():
        write(line)


if __name__ == "__main__":
    print(memory_table("--rows" in sys.argv))
    if "--fit" in sys.argv:
        for program in (NANOTRON, TORCHTITAN, TORCHTITAN_COMPILED):
            value, margin = fitted_fragmentation(all_memory_rows(), program)
            print(f"fragmentation of {program.name}: {value}, no calibration row more than {margin:.1%} below")

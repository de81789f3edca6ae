"""The fastest layout of every family, by branch and bound over all legal layouts.

A shell, then a cell, has a lower bound of its time: kernels and pipeline without any data-parallel cost. Shells and cells are
visited in the order of their bounds, and left as soon as the bound is above the best time that their families already have.
So each family's best layout is the best of all its legal layouts, though few are timed one by one. Memory is bounded the
same way: one microbatch row, everything recomputed, and the finest sharding need least.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log
from typing import TYPE_CHECKING, NamedTuple

from shardwright.arch.inventory import counts
from shardwright.layout.schedule import split_blocks
from shardwright.plan.job import DTYPE_BYTES, Job, Layout
from shardwright.plan.peak import PeakModel
from shardwright.plan.program import SHARDWRIGHT, Program
from shardwright.plan.rank_bytes import block_bytes
from shardwright.plan.space import (
    ON_DEVICE,
    PREFETCH,
    RECOMPUTE,
    SPLIT_WEIGHTS,
    UNITS,
    Cell,
    Shell,
    cells,
    count_layouts,
    kinds_of,
    shells,
    variants,
)
from shardwright.plan.step_time import Clock, StepTime, idle_rounds

if TYPE_CHECKING:
    from shardwright.plan.hardware import Device
    from shardwright.plan.kernels import Software

BAND = 1.02
"""Layouts whose times differ by less than 2% are ranked by simplicity: no prediction is that sharp."""
REFINED = 3
FAR = 1.25
"""Once a family has a layout that fits, its slower ones are searched only up to this multiple of the best of all."""


class Choice(NamedTuple):
    """A layout that fits, with its time and peak (allocated, and with fragmentation and context)."""

    family: str
    layout: Layout
    stage_blocks: tuple[int, ...]
    time: StepTime
    allocated_bytes: float
    device_bytes: float

    @property
    def seconds(self) -> float:
        return self.time.total


class Rejection(NamedTuple):
    """A family in which nothing fits: the layout that needs least, and what it needs."""

    family: str
    layout: Layout | None
    device_bytes: float


@dataclass
class Found:
    """What the search found. considered: legal layouts in the space; timed: those asked for time and memory one by one."""

    best: dict[str, Choice] = field(default_factory=dict)
    rejected: dict[str, Rejection] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    considered: int = 0
    timed: int = 0

    def ranked(self) -> list[Choice]:
        """The best of each family, by time in bands of 2%, then by simplicity."""
        if not self.best:
            return []
        fastest = min(choice.seconds for choice in self.best.values())
        return sorted(
            self.best.values(),
            key=lambda c: (int(log(c.seconds / fastest) / log(BAND)), complexity(c.layout), c.seconds),
        )


def complexity(layout: Layout) -> int:
    """How much there is to understand and to go wrong: each axis in use, then the memory choices."""
    a = layout.axes
    score = 4 * sum(size > 1 for size in (a.pp, a.cp, a.tp, a.dp_replicate))
    score += {"ddp": 0, "zero1": 2, "zero2": 2, "zero3": 2}[layout.data_parallel]
    score += 2 * (layout.schedule in ("zero_bubble", "zbv")) + (layout.schedule == "interleaved_1f1b")
    score += (layout.recompute != "none") + (layout.unit != "block") + (layout.prefetch != 1)
    return score + 6 * (layout.offload != "none")


class Search:
    """Searches the layouts of a job on a number of equal devices."""

    def __init__(
        self,
        job: Job,
        device: Device,
        devices: int,
        software: Software,
        program: Program = SHARDWRIGHT,
        kinds: tuple[str, ...] = ON_DEVICE,
    ) -> None:
        self.job, self.device, self.devices, self.program, self.kinds = job, device, devices, program, kinds
        self.clock = Clock(job, device, software)
        self.peaks = PeakModel(job, program)
        self.capacity = device.memory_bytes
        self._total, self._block = counts(job.shape).total, counts(job.shape).block_split
        self._fastest = float("inf")
        self._lean: dict[tuple[object, ...], bool] = {}
        self._blocks: dict[tuple[object, ...], int] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        self._probes: dict[tuple[Shell, int, str], Layout] = {}
        self.found = Found()

    # ---- memory

    def stage_blocks(self, cell: Cell) -> tuple[int, ...]:
        """Blocks of each pipeline stage of the cell."""
        return split_blocks(self.job.shape.layers, cell.shell.pp * cell.chunks)

    def needs(self, layout: Layout) -> tuple[float, float]:
        """(allocated, with fragmentation and context) bytes at the peak of the fullest rank."""
        self.found.timed += 1
        allocated, reserved = self.peaks.peak_bytes(layout)
        return allocated, reserved + self.program.context_bytes

    def _states(self, shell: Shell, kind: str) -> float:
        """Bytes of model states that every layout of the family keeps, a lower bound: even parts, nothing else."""
        m, r = DTYPE_BYTES[self.job.master_dtype], DTYPE_BYTES[self.job.reduce_dtype]
        part = self._total / (shell.tp * shell.pp)
        shard = shell.data * shell.cp
        if kind == "ddp":
            # `_kept` counts gathered parameters and whole gradients under a pipeline for every kind: not twice.
            twice = (
                (DTYPE_BYTES[self.job.param_dtype] + r) * (1 + self.program.fragmentation)
                if shell.pp > 1
                else 0.0
            )
            return max(4 * m - twice, 0.0) * part
        if kind == "offload":
            return 0.0
        # Parameters and moments are shards for every zero*; gradients too once they are reduced.
        return (3 * m + min(m, r)) * part / shard

    def _kept(self, cell: Cell) -> float:
        """Bytes of activations that the first pipeline rank keeps, a lower bound: microbatches in flight at its fullest."""
        s = cell.shell
        key = (s.tp, s.cp, cell.microbatch_rows, s.tp > 1, cell.recompute, s.pp > 1)
        saved = self._saved.get(key)
        if saved is None:
            saved = self._saved[key] = block_bytes(self.job, self.program, key).saved
        flight: float = min(s.pp, cell.microbatches)
        if cell.schedule == "gpipe":
            flight = cell.microbatches
        elif cell.schedule == "interleaved_1f1b":
            flight = min(flight * (cell.chunks + 1) / cell.chunks - 1, cell.microbatches)
        blocks = self._first_blocks(cell)
        kept = saved * blocks * flight
        if (
            s.pp > 1
            and self.program.pipeline_keeps_gathered
            and cell.schedule not in SPLIT_WEIGHTS
            and s.data * s.cp > 1
        ):
            # Under a pipeline gathered parameters stay, and gradients stay whole until the last microbatch. (ddp keeps
            # whole parameters and gradients anyway, in wider dtypes.)
            job = self.job
            width = DTYPE_BYTES[job.param_dtype] + (
                DTYPE_BYTES[job.reduce_dtype] if cell.microbatches > 1 else 0
            )
            kept += width * blocks * self._block / s.tp
        return kept * (1 + self.program.fragmentation)

    def _first_blocks(self, cell: Cell) -> int:
        """Blocks of pipeline rank 0."""
        key = (cell.shell.pp, cell.schedule, cell.chunks)
        found = self._blocks.get(key)
        if found is None:
            stages, pp = self.stage_blocks(cell), cell.shell.pp
            found = stages[0] + stages[-1] if cell.schedule == "zbv" else sum(stages[::pp])
            self._blocks[key] = found
        return found

    def least(self, shell: Shell, kind: str) -> tuple[Layout, float] | None:
        """The layout of the family that needs least on this shell, and what it needs; None when the family is empty.

        One row a microbatch and everything recomputed; or all rows in one microbatch, which keeps no unreduced gradients.
        """
        rows = self.job.global_batch_size // shell.data
        best: tuple[Layout, float] | None = None
        for microbatch in {1, rows}:
            count = rows // microbatch
            schedule = None if shell.pp == 1 else "1f1b" if count >= shell.pp else "gpipe"
            cell = Cell(shell, schedule, 1, microbatch, count, "full")  # type: ignore[arg-type]
            # For every kind the first variant shards most, and drops parameters after forward where there is a choice.
            layout = next(iter(variants(cell, kind)), None) if kind in kinds_of(cell) else None
            if layout is not None:
                needed = self.needs(layout)[1]
                if best is None or needed < best[1]:
                    best = (layout, needed)
        return best

    # ---- bounds

    def _cell_bound(self, cell: Cell) -> float:
        """Seconds that no layout of the cell goes below: kernels and pipeline, without any data-parallel cost."""
        shell, layers = cell.shell, self.job.shape.layers
        b = self.clock.block(self._probe(shell, cell.microbatch_rows, cell.recompute))
        one = (b.forward + b.backward) * layers / shell.pp
        idle = 0.0
        if shell.pp > 1:
            if cell.schedule == "zbv":
                idle = (b.backward - b.weights) * layers / shell.pp * (shell.pp - 1) / 2
            elif cell.schedule == "zero_bubble":
                idle = (one - 2 * b.weights * layers / shell.pp) * (shell.pp - 1)
            else:
                idle = one * (
                    (shell.pp - 1) / cell.chunks + idle_rounds(shell.pp, cell.chunks, cell.microbatches)
                )
        return cell.microbatches * one + max(idle, 0.0) * (1 - shell.pp / layers)

    def _shell_bound(self, shell: Shell) -> float:
        """The smallest bound of its cells: nothing recomputed, no idle time, the best microbatch."""
        rows = self.job.global_batch_size // shell.data
        layers = self.job.shape.layers
        best = float("inf")
        microbatch = 1
        while microbatch <= rows:
            if rows % microbatch == 0:
                b = self.clock.block(self._probe(shell, microbatch, "none"))
                best = min(best, (b.forward + b.backward) * layers / shell.pp * (rows // microbatch))
            microbatch *= 2
        return best * 0.97  # microbatches that are no powers of two may be a little better

    def _probe(self, shell: Shell, microbatch: int, recompute: str) -> Layout:
        key = (shell, microbatch, recompute)
        found = self._probes.get(key)
        if found is None:
            cell = Cell(shell, "1f1b" if shell.pp > 1 else None, 1, microbatch, 1, recompute)  # type: ignore[arg-type]
            found = self._probes[key] = next(iter(variants(cell, "ddp")))
        return found

    # ---- the search

    def run(self) -> Found:
        """Fills `found` and returns it."""
        found, layers = self.found, self.job.shape.layers
        legal, found.refused = shells(self.job, self.devices)
        alive: list[tuple[float, Shell, list[str]]] = []
        for shell in legal:
            rows = self.job.global_batch_size // shell.data
            found.considered += count_layouts(rows, shell.data, shell.cp, shell.pp, layers)
            kinds = [kind for kind in self.kinds if self._fits_at_least(shell, kind)]
            if kinds:
                alive.append((self._shell_bound(shell), shell, kinds))
        alive.sort(key=lambda entry: entry[0])
        for bound, shell, kinds in alive:
            open_kinds = [kind for kind in kinds if bound < self._limit(shell, kind)]
            if open_kinds:
                self._shell(shell, open_kinds)
        for family in [family for family in found.rejected if family in found.best]:
            del found.rejected[family]
        played: set[str] = set()
        while True:
            # Playing a pipeline changes its time a little, so others may come to the top: until the top has been played.
            rest = [choice for choice in found.ranked()[:REFINED] if choice.family not in played]
            if not rest:
                return found
            played.add(rest[0].family)
            found.best[rest[0].family] = self.refine(rest[0])

    def _family(self, shell: Shell, kind: str) -> str:
        return f"{kind}+{shell.family}" if shell.family else kind

    def _limit(self, shell: Shell, kind: str) -> float:
        """Seconds above which a layout of this family is of no interest: its own best, or far above the best of all."""
        best = self.found.best.get(self._family(shell, kind))
        return min(best.seconds, FAR * self._fastest) if best else float("inf")

    def _fits_at_least(self, shell: Shell, kind: str) -> bool:
        """Whether the family's leanest layout fits; if not, it is noted when it is the leanest of its family so far."""
        family = self._family(shell, kind)
        known = self.found.rejected.get(family)
        states = self._states(shell, kind) + self.program.context_bytes
        if states > self.capacity and known is not None and known.device_bytes <= states:
            return False
        least = self.least(shell, kind)
        if least is None:
            return False
        layout, needed = least
        if needed <= self.capacity:
            return True
        if known is None or needed < known.device_bytes:
            self.found.rejected[family] = Rejection(family, layout, needed)
        return False

    def _shell(self, shell: Shell, kinds: list[str]) -> None:
        # GPipe idles as long as 1F1B and keeps more: where both run, it cannot be the better of the two.
        room = {
            kind: self.capacity - self._states(shell, kind) + self.program.context_bytes for kind in kinds
        }
        most = max(room.values())
        bounded = []
        for cell in cells(self.job, shell):
            kept = self._kept(cell)
            if kept <= most and not (cell.schedule == "gpipe" and cell.microbatches >= shell.pp):
                bounded.append((self._cell_bound(cell), kept, cell))
        bounded.sort(key=lambda entry: entry[0])
        too_many: dict[tuple[object, ...], int] = {}
        for bound, kept, cell in bounded:
            open_kinds = [kind for kind in kinds if bound < self._limit(shell, kind)]
            if not open_kinds:
                break
            open_kinds = [kind for kind in open_kinds if kept <= room[kind]]
            allowed = kinds_of(cell)
            for kind in open_kinds:
                # What does not fit with fewer rows, or with more recomputed, does not fit with more; as long as there are
                # more microbatches than ranks, so that the pipeline is full.
                key = (kind, cell.schedule, cell.chunks, cell.recompute)
                hopeless = cell.microbatches > shell.pp and cell.microbatch_rows >= too_many.get(key, 1 << 60)
                if (
                    kind in allowed
                    and not hopeless
                    and not self._cell(cell, kind)
                    and cell.microbatches > shell.pp
                ):
                    for recompute in RECOMPUTE[: RECOMPUTE.index(cell.recompute) + 1]:
                        key = (kind, cell.schedule, cell.chunks, recompute)
                        too_many[key] = min(too_many.get(key, 1 << 60), cell.microbatch_rows)

    def only(
        self, tp: int, cp: int, pp: int, kind: str, replicate: int | None = None, schedule: str | None = None
    ) -> Choice | None:
        """The fastest layout that fits with these axes and this data-parallel family (and schedule, and replicas)."""
        data = self.devices // (tp * cp * pp)
        shell = Shell(tp, cp, pp, data)
        best: Choice | None = None
        for bound, cell in sorted((self._cell_bound(cell), cell) for cell in cells(self.job, shell)):
            if (
                (best and bound >= best.seconds)
                or (schedule and cell.schedule != schedule)
                or kind not in kinds_of(cell)
            ):
                continue
            if not self._lean_fits(cell, kind):
                continue
            stage_blocks = self.stage_blocks(cell)
            for layout in variants(cell, kind):
                time = self.clock.step(layout, stage_blocks)
                if (replicate and layout.axes.dp_replicate != replicate) or (
                    best and time.total >= best.seconds
                ):
                    continue
                allocated, device = self.needs(layout)
                if device <= self.capacity:
                    best = Choice(self._family(shell, kind), layout, stage_blocks, time, allocated, device)
        return best and self.refine(best)

    def _lean_fits(self, cell: Cell, kind: str) -> bool:
        """Whether the leanest layout of the cell fits: finest sharding, parameters dropped after forward.

        zero3 needs least of all kinds on the device; asking it first settles most cells.
        """
        if (
            kind not in ("zero3", "offload")
            and "zero3" in kinds_of(cell)
            and not self._lean_fits(cell, "zero3")
        ):
            return False
        key = (*cell, kind)
        known = self._lean.get(key)
        if known is None:
            layout = next(iter(variants(cell, kind)), None)
            known = self._lean[key] = layout is not None and self.needs(layout)[1] <= self.capacity
        return known

    def _cell(self, cell: Cell, kind: str) -> bool:
        """Times the layouts of a cell; False when its leanest one does not fit."""
        if not self._lean_fits(cell, kind):
            return False
        family = self._family(cell.shell, kind)
        stage_blocks = self.stage_blocks(cell)
        best = self._limit(cell.shell, kind)
        for layout in variants(cell, kind):
            time = self.clock.step(layout, stage_blocks)
            if time.total >= best:
                continue
            allocated, device = self.needs(layout)
            if device <= self.capacity:
                best = time.total
                self._fastest = min(self._fastest, best)
                self.found.best[family] = Choice(family, layout, stage_blocks, time, allocated, device)
        return True

    def refine(self, choice: Choice) -> Choice:
        """Units and prefetch of a layout found, and its pipeline played instead of the closed form."""
        best = choice
        if choice.layout.data_parallel == "zero3":
            for unit in UNITS:
                for prefetch in PREFETCH:
                    layout = replace(choice.layout, unit=unit, prefetch=prefetch)  # type: ignore[arg-type]
                    time = self.clock.step(layout, choice.stage_blocks)
                    if time.total < best.seconds / BAND:
                        allocated, device = self.needs(layout)
                        if device <= self.capacity:
                            best = Choice(choice.family, layout, choice.stage_blocks, time, allocated, device)
        return best._replace(time=self.clock.timed(best.layout, best.stage_blocks))

"""Bounds of time and memory that whole shells and cells share, so that the search can leave them out at
once.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from shardwright.arch.inventory import counts
from shardwright.plan.block_bytes import block_bytes
from shardwright.plan.job import DTYPE_BYTES, Job, Layout, Recompute
from shardwright.plan.peak import PeakModel
from shardwright.plan.program import SHARDWRIGHT, Program
from shardwright.plan.rank_bytes import planned_stages
from shardwright.plan.space import Cell, Shell, kinds_of, variants
from shardwright.plan.step_time import Clock, idle_rounds

if TYPE_CHECKING:
    from shardwright.plan.device import Device
    from shardwright.plan.kernels import Software
    from shardwright.plan.rank_time import BlockSeconds


class Bounds:
    """Lower bounds, and exact needs, of the layouts of a job on a number of equal devices.

    asked: layouts whose exact peak was asked for.
    """

    def __init__(
        self, job: Job, device: Device, devices: int, software: Software, program: Program = SHARDWRIGHT
    ) -> None:
        self.job, self.device, self.devices, self.program = job, device, devices, program
        self.clock = Clock(job, device, software)
        self.peaks = PeakModel(job, program)
        self.capacity = device.memory_bytes
        self.asked = 0
        self._total = counts(job.shape).total
        self._blocks: dict[tuple[object, ...], int] = {}
        self._stages: dict[int, tuple[int, ...]] = {}
        self._saved: dict[tuple[object, ...], float] = {}

    def stage_blocks(self, cell: Cell) -> tuple[int, ...]:
        """Blocks of each pipeline stage of the cell."""
        stages = cell.shell.pp * cell.chunks
        found = self._stages.get(stages)
        if found is None:
            found = self._stages[stages] = planned_stages(self.job.shape, stages)
        return found

    def needs(self, layout: Layout, limit: float = inf) -> tuple[float, float]:
        """(allocated, with fragmentation and context) bytes at the peak of the fullest rank.

        Of a layout that needs more than `limit`: some number above it; the first such rank settles it.
        """
        self.asked += 1
        context = self.program.context_bytes
        allocated, reserved = self.peaks.peak_bytes(layout, limit - context)
        return allocated, reserved + context

    def fits(self, layout: Layout) -> bool:
        """Whether `needs` says that the layout fits."""
        return self.needs(layout, self.capacity)[1] <= self.capacity

    def states(self, shell: Shell, kind: str) -> float:
        """Bytes of model states that every layout of the family keeps, a lower bound: even parts."""
        m, c = DTYPE_BYTES[self.job.master_dtype], DTYPE_BYTES[self.job.param_dtype]
        part = self._total / (shell.tp * shell.pp)
        if kind == "ddp":
            return 4 * m * part
        if kind == "offload":
            return 0.0
        # Parameters, moments and reduced gradients are shards for every zero*; zero1 and zero2 hold all gathered.
        gathered = c * (1 + self.program.fragmentation) if kind in ("zero1", "zero2") else 0.0
        return (4 * m / (shell.data * shell.cp) + gathered) * part

    def kept(self, cell: Cell) -> float:
        """Bytes of activations that pipeline rank 0 keeps, a lower bound: microbatches in flight at most."""
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
        return saved * blocks * flight * (1 + self.program.fragmentation)

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
        """The layout of the family that needs least on this shell, and what it needs; None for an empty
        family. Where one fits, the first that does.

        One row a microbatch and everything recomputed; or all rows in one microbatch, which keeps no
        unreduced gradients.
        """
        rows = self.job.global_batch_size // shell.data
        best: tuple[Layout, float] | None = None
        for microbatch in {1, rows}:
            if best is not None and best[1] <= self.capacity:
                break
            count = rows // microbatch
            schedule = None if shell.pp == 1 else "1f1b" if count >= shell.pp else "gpipe"
            cell = Cell(shell, schedule, 1, microbatch, count, "full")  # type: ignore[arg-type]
            # For every kind the first variant shards most, and drops parameters after forward where there is
            # a choice.
            layout = next(iter(variants(cell, kind)), None) if kind in kinds_of(cell) else None
            if layout is not None:
                needed = self.needs(layout)[1]
                if best is None or needed < best[1]:
                    best = (layout, needed)
        return best

    def cell_bound(self, cell: Cell) -> float:
        """Seconds that no layout of the cell goes below: kernels and pipeline, no data-parallel cost."""
        shell, layers = cell.shell, self.job.shape.layers
        b = self._block(shell, cell.microbatch_rows, cell.recompute)
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

    def shell_bound(self, shell: Shell) -> float:
        """The smallest bound of its cells: nothing recomputed, no idle time, the best microbatch."""
        rows = self.job.global_batch_size // shell.data
        layers = self.job.shape.layers
        best = float("inf")
        microbatch = 1
        while microbatch <= rows:
            if rows % microbatch == 0:
                b = self._block(shell, microbatch, "none")
                best = min(best, (b.forward + b.backward) * layers / shell.pp * (rows // microbatch))
            microbatch *= 2
        return best * 0.97  # microbatches that are no powers of two may be a little better

    def _block(self, shell: Shell, rows: int, recompute: Recompute) -> BlockSeconds:
        return self.clock.block_at(shell.tp, shell.cp, shell.pp, self.devices, rows, recompute)

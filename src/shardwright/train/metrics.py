"""The metrics of a run, update by update: reduced over all ranks at once, and named as in `metrics.jsonl`.

The reduction of an update runs beside the next update; its results are read when they are there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median, quantiles
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.data.loader import UpdateBatch
from shardwright.measure import clock
from shardwright.measure import metric_names as names
from shardwright.measure.bottleneck import Bottleneck, UpdateTimes, find_bottleneck
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.measure.profile import TraceTimes, profiled
from shardwright.mesh.device_mesh import all_groups
from shardwright.train.anomaly import slow_rank
from shardwright.train.decision import UpdateResult
from shardwright.train.update import UpdateEngine
from shardwright.train.utilisation import make_utilisation

WARMUP_UPDATES = 2
"""Updates after a start that count for no speed: allocators, caches and compilation settle."""
RECENT_UPDATES = 1000
"""Percentiles are of so many of the newest updates."""

PHASES = names.PHASES[:3]
"""Phases of an update whose memory is measured now and then (`train/phase_memory.py`)."""

Values = dict[str, float | int | None]


class Recent:
    """The newest times, kept in order of size, so that percentiles cost little however long a run is."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, seconds: float) -> None:
        """Adds a time, and drops the oldest of more than `RECENT_UPDATES`."""
        if len(self._newest) == RECENT_UPDATES:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(seconds)
        insort(self._ordered, seconds)

    def percentiles(self) -> tuple[float | None, float | None, float | None]:
        """(p50, p95, largest); None where there are too few."""
        own = self._ordered
        p95 = quantiles(own, n=20)[18] if len(own) > 1 else None
        return (median(own), p95, own[-1]) if own else (None, None, None)


class Pending(NamedTuple):
    """The entry of one update whose reduction may still run. done: whether it has ended. values: waits for the entry."""

    done: Callable[[], bool]
    values: Callable[[], Values]


class Metrics:
    """What one rank has measured of its updates. epoch: update -> epoch in which its rows end; None for a stream."""

    def __init__(self, engine: UpdateEngine, epoch: Callable[[int], float | None]) -> None:
        self._engine, self._epoch = engine, epoch
        self._utilisation = make_utilisation(engine.run, engine.axes, engine.device)
        self._stages = [engine.axes.coordinates(rank)["pp"] for rank in range(dist.get_world_size())]
        self._recent = Recent()
        self.seconds: list[float] = []
        self._waited = self._waited_since = 0.0
        self._busy_since, self._logged_at = math.nan, 0
        self._slowest: tuple[int, float] = (0, 1.0)
        self._waits: list[float] = []
        self._real = self._slots = 0
        self._window: TraceTimes | None = None
        self._exposed = math.nan
        self._exposed_of: Mapping[str, float] = {}
        self._memory: Mapping[str, int] = {}

    def add(
        self,
        seconds: float,
        waited: float,
        batch: UpdateBatch,
        window: TraceTimes | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        """Adds an update that took `seconds`, of which the rank waited for data for `waited`.

        window: what `profile` gave. memory: {phase: peak bytes}, where they were measured.
        """
        self._exposed = window.exposed_seconds if window else math.nan
        self._exposed_of = window.exposed_axes if window else {}
        self._memory = memory or {}
        self._window = window or self._window
        if len(self.seconds) >= WARMUP_UPDATES:
            self._recent.add(seconds)
        self.seconds.append(seconds)
        self._waited = waited
        self._waits.append(waited)
        self._waited_since += waited
        self._real, self._slots = self._real + batch.real_tokens, self._slots + batch.slots

    def profile(self) -> AbstractContextManager[list[TraceTimes]]:
        """A context that profiles one update; its result is for `add`. Collective."""
        return profiled(self._engine.device, all_groups(self._engine.mesh))

    @property
    def steady(self) -> list[float]:
        """Seconds of the updates after the warm-up, or of all where there are none."""
        return self.seconds[WARMUP_UPDATES:] or self.seconds

    @property
    def usual_seconds(self) -> float:
        """Median seconds of the newest updates after the warm-up, or of the last one."""
        return self._recent.percentiles()[0] or self.seconds[-1]

    def begin(self, result: UpdateResult, batch: UpdateBatch, target_tokens: int) -> Pending:
        """Starts the reduction for the entry of the update that was added last. Collective; waits for no other rank.

        target_tokens: of the run up to this update.
        """
        device, ranks = self._engine.device, dist.get_world_size()
        useful, again = self._utilisation.flops(batch) if self._utilisation else (0.0, 0.0)
        own = {
            "seconds": self.seconds[-1],
            "waited": self._waited,
            "own": self._own_seconds(),
            "exposed": self._exposed,
            **{where: self._exposed_of.get(where, 0.0) for where in names.GROUPS},
            "useful": useful,
            "again": again,
            "host": float(peak_host_bytes()),
            **dict(zip(("allocated", "reserved"), peak_device_bytes(device) or (0, 0))),
            **{phase: self._memory.get(phase, 0) for phase in PHASES},
        }
        rows = torch.zeros(ranks, len(own), dtype=torch.float64)
        rows[dist.get_rank()] = torch.tensor(list(own.values()), dtype=torch.float64)
        work = dist.all_reduce(rows, async_op=True)  # on the host, beside NCCL: no GPU has to be waited for
        percentiles = self._recent.percentiles()

        def read() -> Values:
            work.wait()
            columns = dict(zip(own, rows.T.tolist()))
            self._slowest = slow_rank(columns["own"], self._stages)
            return {
                **self._of_update(result, batch, target_tokens),
                **self._of_speed(columns, batch, percentiles),
                **self._of_memory(columns),
                names.DATA_WAIT: max(columns["waited"]),
                names.PADDING: 1 - batch.real_tokens / batch.slots,
                names.REAL_TOKENS: batch.real_tokens,
                names.SLOTS: batch.slots,
                names.TARGET_TOKENS: batch.target_tokens,
            }

        return Pending(work.is_completed, read)

    def _of_update(self, result: UpdateResult, batch: UpdateBatch, target_tokens: int) -> Values:
        return {
            names.LOSS: result.loss,
            names.GRAD_NORM: result.grad_norm,
            names.CLIP_COEFFICIENT: result.clip_coefficient,
            names.LEARNING_RATE: result.learning_rate,
            names.SKIPPED: int(result.skipped),
            names.EPOCH: self._epoch(result.update + 1),
            names.TARGETS_SO_FAR: target_tokens,
        }

    def _of_speed(
        self,
        columns: Mapping[str, list[float]],
        batch: UpdateBatch,
        percentiles: tuple[float | None, float | None, float | None],
    ) -> Values:
        seconds, (slowest, factor) = max(columns["seconds"]), self._slowest
        rate, (p50, p95, most) = batch.target_tokens / seconds, percentiles
        useful, again = sum(columns["useful"]), sum(columns["again"])
        share = self._utilisation.share if self._utilisation else None
        exposed = [value for value in columns["exposed"] if math.isfinite(value)]
        return {
            names.TARGETS_PER_SECOND: rate,
            names.TARGETS_PER_SECOND_PER_DEVICE: rate / len(columns["seconds"]),
            names.STEP_SECONDS: seconds,
            names.STEP_P50: p50,
            names.STEP_P95: p95,
            names.STEP_MAX: most,
            names.SLOWEST_RANK: slowest if factor > 1 else None,
            names.SLOWEST_FACTOR: factor if factor > 1 else None,
            names.MFU: share(useful, seconds) if share else None,
            names.HFU: share(useful + again, seconds) if share else None,
            names.EXPOSED: max(exposed) if exposed else None,
            **{names.EXPOSED_OF[where]: most for where in names.GROUPS if (most := max(columns[where])) > 0},
        }

    @staticmethod
    def _of_memory(columns: Mapping[str, list[float]]) -> Values:
        """The maximum over ranks; phases only where they were measured."""
        kinds = {"allocated": names.PEAK_ALLOCATED, "reserved": names.PEAK_RESERVED, "host": names.PEAK_HOST}
        found: Values = {name: int(max(columns[kind])) or None for kind, name in kinds.items()}
        phases = {phase: int(max(columns[phase])) for phase in PHASES}
        return found | {names.PHASE_PEAK[phase]: most for phase, most in phases.items() if most}

    def verdict(self) -> Bottleneck | None:
        """What limited the run, as this rank has seen it; None before an update is done."""
        if not self.seconds:
            return None
        step, window = median(self.steady), self._window
        scale = step / window.seconds if window else 0.0
        slowest, factor = self._slowest
        return find_bottleneck(
            UpdateTimes(
                step,
                median(self._waits[WARMUP_UPDATES:] or self._waits),
                1 - self._real / self._slots,
                {axis: s * scale for axis, s in window.exposed_axes.items()} if window else None,
                window.idle_seconds * scale if window else None,
                window.compute_seconds * scale if window else None,
                window.products_seconds * scale if window else None,
                slowest if factor > 1 else None,
                factor,
            )
        )

    def _own_seconds(self) -> float:
        """Seconds per update since the last call, for data and this rank's own work, without waiting for other ranks.

        These are times of the host: on a GPU they show a slow host, not a slow device.
        """
        busy, updates = clock.busy(), len(self.seconds) - self._logged_at
        own = (busy - self._busy_since + self._waited_since) / max(1, updates)
        self._busy_since, self._waited_since, self._logged_at = busy, 0.0, len(self.seconds)
        return own if math.isfinite(own) else 0.0

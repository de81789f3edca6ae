"""The metrics of a run, update by update: agreed on by all ranks in one reduction, named as `metrics.jsonl` holds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median, quantiles

import torch
import torch.distributed as dist

from shardwright.data.loader import UpdateBatch
from shardwright.measure import clock
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.measure.profile import Window, profiled
from shardwright.measure.verdict import Figures, Verdict, what_limits
from shardwright.parallel.mesh import all_groups
from shardwright.train.anomaly import slow_rank
from shardwright.train.update import Engine, UpdateResult
from shardwright.train.utilisation import make_utilisation

WARMUP_UPDATES = 2
"""Updates after a start that no speed is taken from: allocators, caches and compilation settle."""

Values = dict[str, float | int | None]


class Metrics:
    """What one rank has seen of its updates. `epoch`: the epoch in which an update's rows end, None for a stream."""

    def __init__(self, engine: Engine, epoch: Callable[[int], float | None]) -> None:
        self._engine, self._epoch = engine, epoch
        self._utilisation = make_utilisation(engine.run, engine.axes, engine.device)
        self._stages = [engine.axes.coordinates(rank)["pp"] for rank in range(dist.get_world_size())]
        self.seconds: list[float] = []
        self._waited = self._waited_since = 0.0
        self._busy_since, self._logged_at = math.nan, 0
        self._slowest: tuple[int, float] = (0, 1.0)
        self._waits: list[float] = []
        self._real = self._slots = 0
        self._window: Window | None = None
        self._exposed = math.nan

    def add(self, seconds: float, waited: float, batch: UpdateBatch, window: Window | None = None) -> None:
        """An update that took so many seconds, of which it waited for data; `window`: what `profile` saw of it."""
        self._exposed = window.exposed_seconds if window else math.nan
        self._window = window or self._window
        self.seconds.append(seconds)
        self._waited = waited
        self._waits.append(waited)
        self._waited_since += waited
        self._real, self._slots = self._real + batch.real_tokens, self._slots + batch.slots

    def profile(self) -> AbstractContextManager[list[Window]]:
        """A context for one update; the window that it gives is for `add`. Collective."""
        return profiled(self._engine.device, all_groups(self._engine.mesh))

    @property
    def steady(self) -> list[float]:
        """Seconds of the updates after the warm-up, or of all where there are none."""
        return self.seconds[WARMUP_UPDATES:] or self.seconds

    def values(self, result: UpdateResult, batch: UpdateBatch, target_tokens: int) -> Values:
        """The metrics of one update; memory and waits are the maximum over ranks (collective).

        target_tokens: of the run so far.
        """
        device = self._engine.device
        on_device = peak_device_bytes(device) or (0, 0)
        own = self._own_seconds()
        of_ranks = [own if rank == dist.get_rank() else 0.0 for rank in range(dist.get_world_size())]
        worst = torch.tensor(
            [*on_device, peak_host_bytes(), self.seconds[-1], self._waited, self._exposed, *of_ranks],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        allocated, reserved, host, seconds, waited, exposed, *of_ranks = worst.tolist()
        slowest, factor = self._slowest = slow_rank(of_ranks, self._stages)
        steady = self.seconds[WARMUP_UPDATES:][-1000:]
        cuts = quantiles(steady, n=20) if len(steady) > 1 else []
        rate = batch.target_tokens / seconds
        mfu, hfu = self._utilisation(batch, seconds) if self._utilisation else (None, None)
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/clip_coefficient": result.clip_coefficient,
            "train/lr": result.learning_rate,
            "train/skipped": int(result.skipped),
            "train/epoch": self._epoch(result.update + 1),
            "train/target_tokens": target_tokens,
            "perf/target_tokens_per_s": rate,
            "perf/target_tokens_per_s_per_device": rate / dist.get_world_size(),
            "perf/step_seconds": seconds,
            "perf/step_seconds_p50": median(steady) if steady else None,
            "perf/step_seconds_p95": cuts[18] if cuts else None,
            "perf/step_seconds_max": max(steady) if steady else None,
            "perf/slowest_rank": slowest if factor > 1 else None,
            "perf/slowest_rank_factor": factor if factor > 1 else None,
            "perf/mfu": mfu,
            "perf/hfu": hfu,
            "mem/peak_allocated_bytes": int(allocated) or None,
            "mem/peak_reserved_bytes": int(reserved) or None,
            "mem/peak_host_bytes": int(host),
            "comm/exposed_seconds": exposed if math.isfinite(exposed) else None,
            "data/wait_seconds": waited,
            "data/padding_fraction": 1 - batch.real_tokens / batch.slots,
            "data/real_tokens": batch.real_tokens,
            "data/slots": batch.slots,
            "data/target_tokens": batch.target_tokens,
        }

    def verdict(self) -> Verdict | None:
        """What limited the run, as this rank has seen it; None before an update is done."""
        if not self.seconds:
            return None
        step, window = median(self.steady), self._window
        scale = step / window.seconds if window else 0.0
        slowest, factor = self._slowest
        return what_limits(
            Figures(
                step,
                median(self._waits[WARMUP_UPDATES:] or self._waits),
                1 - self._real / self._slots,
                {axis: s * scale for axis, s in window.exposed_of().items()} if window else None,
                window.idle_seconds * scale if window else None,
                window.compute_seconds * scale if window else None,
                window.products_seconds * scale if window else None,
                slowest if factor > 1 else None,
                factor,
            )
        )

    def _own_seconds(self) -> float:
        """Seconds an update since the last call, without waiting for other ranks: data, and what this rank computed.

        Of the host: on a GPU it shows a host that is late, not a device that is slow.
        """
        busy, updates = clock.busy(), len(self.seconds) - self._logged_at
        own = (busy - self._busy_since + self._waited_since) / max(1, updates)
        self._busy_since, self._waited_since, self._logged_at = busy, 0.0, len(self.seconds)
        return own if math.isfinite(own) else 0.0

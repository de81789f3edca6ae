"""The metrics of a run, update by update: agreed on by all ranks in one reduction, named as `metrics.jsonl` holds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist

from shardwright.data.loader import UpdateBatch
from shardwright.measure import clock
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.train.anomaly import slow_rank
from shardwright.train.update import Engine, UpdateResult
from shardwright.train.utilisation import make_utilisation

WARMUP_UPDATES = 2
"""Updates after a start that no speed is taken from: allocators, caches and compilation settle."""

Values = dict[str, float | int | None]


class Metrics:
    """What one rank has seen of its updates. `epoch`: the epoch in which an update's rows end."""

    def __init__(self, engine: Engine, epoch: Callable[[int], float]) -> None:
        self._engine, self._epoch = engine, epoch
        self._utilisation = make_utilisation(engine.run, engine.axes, engine.device)
        self._stages = [engine.axes.coordinates(rank)["pp"] for rank in range(dist.get_world_size())]
        self.seconds: list[float] = []
        self._waited = self._waited_since = 0.0
        self._busy_since, self._logged_at = math.nan, 0
        self.measuring_seconds = 0.0

    def add(self, seconds: float, waited: float) -> None:
        """An update that took so many seconds, of which it waited for data."""
        self.seconds.append(seconds)
        self._waited = waited
        self._waited_since += waited

    @property
    def steady(self) -> list[float]:
        """Seconds of the updates after the warm-up, or of all where there are none."""
        return self.seconds[WARMUP_UPDATES:] or self.seconds

    def values(self, result: UpdateResult, batch: UpdateBatch, target_tokens: int) -> Values:
        """The metrics of one update; memory and waits are the maximum over ranks (collective).

        target_tokens: of the run so far.
        """
        device, started = self._engine.device, clock.now()
        on_device = peak_device_bytes(device) or (0, 0)
        own = self._own_seconds()
        of_ranks = [own if rank == dist.get_rank() else 0.0 for rank in range(dist.get_world_size())]
        worst = torch.tensor(
            [*on_device, peak_host_bytes(), self.seconds[-1], self._waited, *of_ranks],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        allocated, reserved, host, seconds, waited, *of_ranks = worst.tolist()
        slowest, factor = slow_rank(of_ranks, self._stages)
        steady = self.seconds[WARMUP_UPDATES:][-1000:]
        cuts = quantiles(steady, n=20) if len(steady) > 1 else []
        rate = batch.target_tokens / seconds
        mfu, hfu = self._utilisation(batch, seconds) if self._utilisation else (None, None)
        found: Values = {
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
            "data/wait_seconds": waited,
            "data/padding_fraction": 1 - batch.real_tokens / batch.slots,
            "data/real_tokens": batch.real_tokens,
            "data/slots": batch.slots,
            "data/target_tokens": batch.target_tokens,
        }
        self.measuring_seconds += clock.now() - started
        return found

    def _own_seconds(self) -> float:
        """Seconds an update since the last call, without waiting for other ranks: data, and what this rank computed.

        Of the host: on a GPU it shows a host that is late, not a device that is slow.
        """
        busy, updates = clock.busy(), len(self.seconds) - self._logged_at
        own = (busy - self._busy_since + self._waited_since) / max(1, updates)
        self._busy_since, self._waited_since, self._logged_at = busy, 0.0, len(self.seconds)
        return own if math.isfinite(own) else 0.0

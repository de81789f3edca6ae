"""What a run writes and prints while it trains: entries of metrics.jsonl, and the progress line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from shardwright.data.loader import UpdateBatch
from shardwright.measure import metric_names as names
from shardwright.measure.metrics_log import MetricsLog, Progress
from shardwright.train.anomaly import SlowRanks
from shardwright.train.decision import UpdateResult
from shardwright.train.metrics import Metrics, Pending, Values

AT_ONCE_SECONDS = 0.5
"""An update of at least so many seconds is logged as soon as it is done; a shorter one while the next update runs."""


class Log:
    """Rank 0 writes and prints; other ranks take part in reductions. Entries come in the order of updates.

    first_update: see `MetricsLog`. updates: of the whole run.
    """

    def __init__(
        self,
        metrics: Metrics,
        console: Console,
        output_dir: Path,
        report_to: list[Any],
        first_update: int,
        updates: int,
    ) -> None:
        first = dist.get_rank() == 0
        self._metrics, self._updates = metrics, updates
        self._progress = progress = Progress(console, updates) if first else None
        self._record = MetricsLog(output_dir, report_to, first_update, progress.say) if progress else None
        self._slow = SlowRanks()
        self._pending: tuple[UpdateResult, Pending] | None = None

    def update(self, result: UpdateResult, batch: UpdateBatch, target_tokens: int) -> None:
        """Starts the entry of an update, and writes that of the update before. Collective; waits for no other rank."""
        self.flush()
        self._pending = (result, self._metrics.begin(result, batch, target_tokens))
        if self._metrics.seconds[-1] >= AT_ONCE_SECONDS or result.skipped:
            self.flush()

    def flush(self) -> None:
        """Writes and prints the update that is still pending."""
        if self._pending is None:
            return
        (result, pending), self._pending = self._pending, None
        values = pending.values()
        if self._record is None or self._progress is None:
            return
        self._record.log(result.update, values)
        if slow := self._slow.look(values[names.SLOWEST_RANK], values[names.SLOWEST_FACTOR]):
            self._progress.say(slow)
        left = self._metrics.usual_seconds * (self._updates - result.update - 1)
        self._progress.show(result.update, values, left)
        if result.skipped:
            self._progress.say(f"Update {result.update} skipped on all ranks: its loss or gradient is not finite.")

    def entry(self, update: int, values: Values) -> None:
        """Writes a further entry for `update`, counted from 0."""
        self.flush()
        if self._record is not None:
            self._record.log(update, values)

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        self.flush()
        if self._progress is not None:
            self._progress.say(text)

    def close(self) -> None:
        """Ends the progress line and the file. An update whose numbers a lost rank has not sent is left out."""
        if self._pending is not None and self._pending[1].done():
            self.flush()
        if self._progress is not None:
            self._progress.close()
        if self._record is not None:
            self._record.close()

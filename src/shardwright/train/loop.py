"""The training loop: data, updates, evaluation, records, checkpoints, and stopping on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.data.loader import UpdateBatch
from shardwright.errors import ExitCode, NonFiniteError, SpikeError
from shardwright.launch import Pulse
from shardwright.measure import clock
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.measure.record import Progress, Record
from shardwright.train.anomaly import SlowRanks, Spikes, slow_rank
from shardwright.train.checkpoints import Checkpoints, Progression
from shardwright.train.run_data import RunData
from shardwright.train.signals import StopFlag
from shardwright.train.update import Engine, UpdateResult
from shardwright.train.utilisation import make_utilisation

WARMUP_UPDATES = 2
"""Updates after a start that no speed is taken from: allocators, caches and compilation settle."""


class Trainer:
    """One rank of a run. Collective throughout."""

    def __init__(
        self, loaded: Loaded, engine: Engine, data: RunData, console: Console, pulse: Pulse | None = None
    ) -> None:
        self.loaded, self.run, self.engine, self.data = loaded, loaded.run, engine, data
        self.pulse = pulse or Pulse()
        engine.enter = self.pulse.enter
        self.output_dir = Path(self.run.checkpoint.output_dir)
        self.first = dist.get_rank() == 0
        self.at = Progression()
        self._console = console
        self._utilisation = make_utilisation(self.run, engine.axes, engine.device)
        self._seconds: list[float] = []
        self._waited = 0.0
        self._busy_since, self._waited_since, self._logged_at = math.nan, 0.0, 0
        self._stages = [engine.axes.coordinates(rank)["pp"] for rank in range(dist.get_world_size())]
        self._progress: Progress | None = None
        self.checkpoints = Checkpoints(loaded, engine, data.fingerprint, self.at, self._say)
        self._spikes = Spikes(self.run.training.on_spike)
        self._slow = SlowRanks()

    def save(self) -> Path:
        """Writes a checkpoint of the state between updates and waits for it; returns its directory."""
        return self.checkpoints.save()

    def resume(self, restarted: bool = False) -> Path | None:
        """Restores the checkpoint that `checkpoint.resume` names; see `Checkpoints.resume`."""
        return self.checkpoints.resume(restarted)

    # The loop

    def train(self, stop: StopFlag, restarted: bool = False) -> int:
        """Runs to the end, or until a rank is asked to stop; returns the exit code."""
        total, run, pulse = self.engine.updates, self.run, self.pulse
        if resumed := self.resume(restarted):
            self._say(f"Resumed from {resumed} at update {self.at.update} of {total}.")
        if self._asked_before_the_first_update(stop):
            self._say("Asked to stop before the first update: there is nothing to save.")
            return ExitCode.STOPPED_AND_SAVED
        pulse.begin(self.at.update)
        record = Record(self.output_dir, list(run.logging.report_to), self.at.update) if self.first else None
        self._progress = progress = Progress(self._console, total) if self.first else None
        batches = self.data.updates_from(self.at.update, self.engine.device)
        code = ExitCode.DONE
        try:
            while self.at.update < total:
                result = self._update(batches, stop)
                done = self.at.update
                pulse.enter("log")
                if spike := self._spikes.look(result):
                    self._say(spike)
                if done % run.logging.log_steps == 0 or done == total or result.skipped:
                    self._log(record, progress, result)
                if done == total or (run.training.eval_steps and done % run.training.eval_steps == 0):
                    self._evaluate(record, progress)
                due = bool(run.checkpoint.save_steps) and done % (run.checkpoint.save_steps or 1) == 0
                pulse.enter("save")
                self.checkpoints.between_updates(due=due, last=bool(result.stop) or done == total)
                if result.stop:
                    code = ExitCode.STOPPED_AND_SAVED if done < total else ExitCode.DONE
                    break
            if total == 0 and not resumed:
                self.checkpoints.between_updates(due=True, last=True)
            pulse.enter("end")
        except (NonFiniteError, SpikeError):  # raised by all ranks alike, after the same update
            self.checkpoints.saver.finish()
            raise
        finally:
            self._progress = None
            if progress is not None:
                progress.close()
            if record is not None:
                record.close()
        return code

    def _asked_before_the_first_update(self, stop: StopFlag) -> bool:
        asked = torch.tensor(float(stop.requested), device=self.engine.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def _update(self, batches: Iterator[UpdateBatch], stop: StopFlag) -> UpdateResult:
        start = clock.now()
        self.pulse.enter("data")
        batch = next(batches)
        self._waited = clock.now() - start
        self._waited_since += self._waited
        self.pulse.enter("forward_backward")
        self.engine.forward_backward(batch)
        self.checkpoints.saver.before_step()
        result = self.engine.step(stop=stop.requested)
        self._seconds.append(clock.now() - start)
        self._batch = batch
        self.at.update += 1
        self.at.eval_loss = None
        self.pulse.update = self.at.update
        self.at.target_tokens += batch.target_tokens
        return result

    def _log(self, record: Record | None, progress: Progress | None, result: UpdateResult) -> None:
        values = self._values(result, self._batch)
        if record is None or progress is None:
            return
        record.log(result.update, values)
        steady = self._seconds[WARMUP_UPDATES:] or self._seconds
        if slow := self._slow.look(values["perf/slowest_rank"], values["perf/slowest_rank_factor"]):
            progress.say(slow)
        progress.show(result.update, values, median(steady) * (self.engine.updates - self.at.update))
        if result.skipped:
            progress.say(f"Update {result.update} skipped on all ranks: its loss or gradient is not finite.")

    def _values(self, result: UpdateResult, batch: UpdateBatch) -> dict[str, float | int | None]:
        """The metrics of one update; memory and waits are the maximum over ranks (collective)."""
        device = self.engine.device
        on_device = peak_device_bytes(device) or (0, 0)
        own = self._own_seconds()
        of_ranks = [own if rank == dist.get_rank() else 0.0 for rank in range(dist.get_world_size())]
        worst = torch.tensor(
            [*on_device, peak_host_bytes(), self._seconds[-1], self._waited, *of_ranks],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        allocated, reserved, host, seconds, waited, *of_ranks = worst.tolist()
        slowest, factor = slow_rank(of_ranks, self._stages)
        steady = self._seconds[WARMUP_UPDATES:][-1000:]
        cuts = quantiles(steady, n=20) if len(steady) > 1 else []
        rate = batch.target_tokens / seconds
        mfu, hfu = self._utilisation(batch, seconds) if self._utilisation else (None, None)
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/clip_coefficient": result.clip_coefficient,
            "train/lr": result.learning_rate,
            "train/skipped": int(result.skipped),
            "train/epoch": self.data.order.epoch(result.update + 1),
            "train/target_tokens": self.at.target_tokens,
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

    def _own_seconds(self) -> float:
        """Seconds an update since the last call, without waiting for other ranks: data, and what this rank computed.

        Of the host: on a GPU it shows a host that is late, not a device that is slow.
        """
        busy, updates = clock.busy(), self.at.update - self._logged_at
        own = (busy - self._busy_since + self._waited_since) / max(1, updates)
        self._busy_since, self._waited_since, self._logged_at = busy, 0.0, self.at.update
        return own if math.isfinite(own) else 0.0

    def _evaluate(self, record: Record | None, progress: Progress | None) -> None:
        if self.data.validation is None:
            return
        self.pulse.enter("evaluate")
        loss, targets = self.engine.evaluate(self._beating(self.data.validation))
        if math.isfinite(loss):
            self.at.evaluated(loss)
        if record is not None and progress is not None:
            record.log(
                self.at.update - 1,
                {
                    "eval/loss": loss,
                    "eval/perplexity": math.exp(min(loss, 700)),
                    "eval/target_tokens": targets,
                },
            )
            progress.say(
                f"Evaluation after update {self.at.update}: loss {loss:.4f} over {targets:,} targets."
            )

    def _beating(self, batches: Iterable[UpdateBatch]) -> Iterator[UpdateBatch]:
        for batch in batches:
            self.pulse.beat()
            yield batch

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.say(text)
        elif self.first:
            self._console.print(text, highlight=False, soft_wrap=True)

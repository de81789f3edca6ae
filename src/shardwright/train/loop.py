"""The training loop: data, updates, evaluation, records, checkpoints, and stopping on request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.checkpoint import store
from shardwright.checkpoint.restore import current_state, restore
from shardwright.config.load import Loaded
from shardwright.data.loader import UpdateBatch
from shardwright.errors import CheckpointError, ExitCode
from shardwright.measure import clock
from shardwright.measure.memory import peak_device_bytes, peak_host_bytes
from shardwright.measure.record import Progress, Record
from shardwright.train.run_data import RunData
from shardwright.train.signals import StopFlag
from shardwright.train.update import Engine, UpdateResult
from shardwright.train.utilisation import make_utilisation

WARMUP_UPDATES = 2
"""Updates after a start that no speed is taken from: allocators, caches and compilation settle."""


@dataclass
class Progression:
    """How far the run is: what a checkpoint restores beside tensors."""

    update: int = 0
    target_tokens: int = 0


class Trainer:
    """One rank of a run. Collective throughout."""

    def __init__(self, loaded: Loaded, engine: Engine, data: RunData, console: Console) -> None:
        self.loaded, self.run, self.engine, self.data = loaded, loaded.run, engine, data
        self.output_dir = Path(self.run.checkpoint.output_dir)
        self.first = dist.get_rank() == 0
        self.at = Progression()
        self._console = console
        self._utilisation = make_utilisation(self.run, engine.axes, engine.device)
        self._seconds: list[float] = []
        self._waited = 0.0

    # Checkpoints

    def _state(self) -> dict[str, torch.Tensor]:
        return current_state(self.engine.module, self.engine.optimizer, self.engine.locals)

    def _row_order(self) -> str:
        t, data = self.run.training, self.run.data
        order = f"global_batch_size {t.global_batch_size}, seed {t.seed}, shuffle {str(data.shuffle).lower()}"
        return order if data.bucket_updates == 1 else f"{order}, bucket_updates {data.bucket_updates}"

    def save(self) -> Path:
        """Writes a checkpoint of the state between updates."""
        manifest = store.Manifest(
            update=self.at.update,
            target_tokens=self.at.target_tokens,
            data_fingerprint=self.data.fingerprint,
            row_order=self._row_order(),
            world_size=dist.get_world_size(),
            layout=f"{self.run.parallelism.data_parallel} {self.engine.axes}",
            torch_version=store.torch_version(),
        )
        return store.save(
            self.output_dir,
            self._state(),
            manifest,
            self.loaded.to_yaml(),
            self.run.checkpoint.save_total_limit,
        )

    def resume(self) -> Path | None:
        """Restores the checkpoint that `checkpoint.resume` names, if there is one; returns its directory."""
        chosen: list[Any] = [store.find(self.output_dir, self.run.checkpoint.resume) if self.first else None]
        dist.broadcast_object_list(chosen)
        path: Path | None = chosen[0]
        if path is None:
            return None
        manifest = store.read_manifest(path)
        if manifest.data_fingerprint != self.data.fingerprint:
            raise CheckpointError(
                f"{path} was trained on other data, tokenizer or data settings than this run file names.",
                "Its position in the data would mean other rows.",
                "Restore the data, or start anew with --checkpoint.resume never and another output_dir.",
            )
        if manifest.row_order != self._row_order():
            raise CheckpointError(
                f"{path} was trained with {manifest.row_order}; this run has {self._row_order()}.",
                f"Update {manifest.update} would hold other rows than it would have held.",
                "Restore these values, or start anew with another checkpoint.output_dir.",
            )
        restore(path, self.engine.module, self.engine.optimizer, self.engine.locals)
        self.at = Progression(manifest.update, manifest.target_tokens)
        return path

    # The loop

    def train(self, stop: StopFlag) -> int:
        """Runs to the end, or until a rank is asked to stop; returns the exit code."""
        total, run = self.engine.updates, self.run
        if resumed := self.resume():
            self._say(f"Resumed from {resumed} at update {self.at.update} of {total}.")
        record = Record(self.output_dir, list(run.logging.report_to), self.at.update) if self.first else None
        progress = Progress(self._console, total) if self.first else None
        batches = self.data.updates_from(self.at.update, self.engine.device)
        code, saved_at = ExitCode.DONE, self.at.update if resumed else -1
        try:
            while self.at.update < total:
                result = self._update(batches, stop)
                done = self.at.update
                if done % run.logging.log_steps == 0 or done == total or result.skipped:
                    self._log(record, progress, result)
                if done == total or (run.training.eval_steps and done % run.training.eval_steps == 0):
                    self._evaluate(record, progress)
                due = run.checkpoint.save_steps and done % run.checkpoint.save_steps == 0
                if due or result.stop or done == total:
                    path, saved_at = self.save(), done
                    self._say(f"Saved {path}.", progress)
                if result.stop:
                    code = ExitCode.STOPPED_AND_SAVED if done < total else ExitCode.DONE
                    break
            if saved_at < 0:
                self.save()
        finally:
            if progress is not None:
                progress.close()
            if record is not None:
                record.close()
        return code

    def _update(self, batches: Iterator[UpdateBatch], stop: StopFlag) -> UpdateResult:
        start = clock.now()
        batch = next(batches)
        self._waited = clock.now() - start
        self.engine.forward_backward(batch)
        result = self.engine.step(stop=stop.requested)
        self._seconds.append(clock.now() - start)
        self._batch = batch
        self.at.update += 1
        self.at.target_tokens += batch.target_tokens
        return result

    def _log(self, record: Record | None, progress: Progress | None, result: UpdateResult) -> None:
        values = self._values(result, self._batch)
        if record is None or progress is None:
            return
        record.log(result.update, values)
        steady = self._seconds[WARMUP_UPDATES:] or self._seconds
        progress.show(result.update, values, median(steady) * (self.engine.updates - self.at.update))
        if result.skipped:
            progress.say(f"Update {result.update} skipped on all ranks: its loss or gradient is not finite.")

    def _values(self, result: UpdateResult, batch: UpdateBatch) -> dict[str, float | int | None]:
        """The metrics of one update; memory and waits are the maximum over ranks (collective)."""
        device = self.engine.device
        on_device = peak_device_bytes(device) or (0, 0)
        worst = torch.tensor(
            [*on_device, peak_host_bytes(), self._seconds[-1], self._waited],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        allocated, reserved, host, seconds, waited = worst.tolist()
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

    def _evaluate(self, record: Record | None, progress: Progress | None) -> None:
        if self.data.validation is None:
            return
        loss, targets = self.engine.evaluate(self.data.validation)
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

    def _say(self, text: str, progress: Progress | None = None) -> None:
        if progress is not None:
            progress.say(text)
        elif self.first:
            self._console.print(text, highlight=False, soft_wrap=True)

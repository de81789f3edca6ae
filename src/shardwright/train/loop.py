"""The training loop: data, updates, evaluation, records, checkpoints, and stopping on request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.console import say
from shardwright.data.loader import UpdateBatch
from shardwright.errors import ExitCode, NonFiniteError, SpikeError
from shardwright.launch import Heartbeat
from shardwright.measure import clock
from shardwright.measure import metric_names as names
from shardwright.measure.profile import TraceTimes
from shardwright.mesh.cluster_environment import Job
from shardwright.train.anomaly import Spikes
from shardwright.train.checkpoints import Checkpoints, Progression
from shardwright.train.decision import PendingResult, UpdateResult
from shardwright.train.garbage import collecting_every
from shardwright.train.log import Log
from shardwright.train.metrics import WARMUP_UPDATES, Metrics
from shardwright.train.phase_memory import PhaseMemory
from shardwright.train.run_data import RunData
from shardwright.train.signals import StopFlag
from shardwright.train.update import UpdateEngine
from shardwright.units import format_seconds


@dataclass
class Launched:
    """An update that runs. waited: seconds for its data. target_tokens: of the run up to it. window, memory: if measured."""

    batch: UpdateBatch
    waited: float
    pending: PendingResult | None = None
    target_tokens: int = 0
    window: TraceTimes | None = None
    memory: dict[str, int] | None = None

    @property
    def known(self) -> bool:
        return self.pending is not None and self.pending.known

    def result(self) -> UpdateResult:
        assert self.pending is not None, "an update is launched with its result"
        return self.pending.result()


class Ended(NamedTuple):
    """An update with its result. seconds: that it took."""

    launched: Launched
    result: UpdateResult
    seconds: float


class Trainer:
    """One rank of a run. Collective throughout."""

    def __init__(
        self, loaded: Loaded, engine: UpdateEngine, data: RunData, console: Console, heartbeat: Heartbeat | None = None
    ) -> None:
        self.loaded, self.run, self.engine, self.data = loaded, loaded.run, engine, data
        self.heartbeat = heartbeat or Heartbeat()
        engine.hooks.on_phase = self.heartbeat.enter
        self.output_dir = Path(self.run.checkpoint.output_dir)
        self.first = dist.get_rank() == 0
        self.at = Progression()
        self._console = console
        self._metrics = Metrics(engine, data.order.epoch)
        self.memory = PhaseMemory(engine)
        self._log: Log | None = None
        self.checkpoints = Checkpoints(loaded, engine, data.fingerprint, self.at, self._say, data.eval_fingerprint)
        self._spikes = Spikes(self.run.training.on_spike)
        self._updates = 0  # launched since this start
        self._launched: deque[Launched] = deque()  # whose results are not read yet
        self._since = self._unread = 0.0
        """When the last result came; seconds of training since then that belong to no update yet."""

    def save(self) -> Path:
        """Writes a checkpoint of the state between updates and waits for it; returns its directory."""
        return self.checkpoints.save()

    def resume(self, job: Job | None = None) -> Path | None:
        """Restores the checkpoint that `checkpoint.resume` names; see `Checkpoints.resume`."""
        found = self.checkpoints.resume(job)
        if self.checkpoints.saved_position is not None:
            for line in self.data.resume_rows(self.checkpoints.saved_position):
                self._say(line)
        self.engine.set_length(self.data.updates)
        return found

    # The loop

    def train(self, stop: StopFlag, job: Job | None = None) -> int:
        """Runs to the end, or until a rank is asked to stop; returns the exit code. job: see `resume`."""
        run, heartbeat = self.run, self.heartbeat
        resumed = self.resume(job)
        total = self.engine.updates
        if resumed:
            self._say(f"Resumed from {resumed} at update {self.at.update} of {total}.")
        if self._asked_before_the_first_update(stop):
            self._say("Asked to stop before the first update: there is nothing to save.")
            return ExitCode.STOPPED_AND_SAVED
        heartbeat.begin(self.at.update)
        report_to = list(run.logging.report_to)
        self._log = log = Log(self._metrics, self._console, self.output_dir, report_to, self.at.update, total)
        batches = self.data.updates_from(self.at.update, self.engine.device, self.engine.inputs.ready)
        code = ExitCode.DONE
        collector = ExitStack()
        collect = collector.enter_context(collecting_every(run.hardware.garbage_collection_steps))
        try:
            while self.at.update < total and not self._reached():
                ended = self._update(batches, stop)
                done = self.at.update
                heartbeat.enter("log")
                for update in ended:
                    self._tell(update, log)
                if self._evaluates(done):
                    self._evaluate(log)
                stopping = any(update.result.stop for update in ended)
                due, last = self._saves(done), stopping or done == total or self._reached()
                heartbeat.enter("save")
                if due or last:
                    log.flush()  # a run that resumes from this checkpoint needs every update before it in metrics.jsonl
                with self._first("save") if due or last else nullcontext() as memory:
                    self.checkpoints.between_updates(due=due, last=last)
                if peaks := self.memory.agreed(memory):
                    log.entry(done - 1, peaks)
                collect(done)
                if stopping:
                    code = ExitCode.DONE if done == total or self._reached() else ExitCode.STOPPED_AND_SAVED
                    break
            if total == 0 and not resumed:
                self.checkpoints.between_updates(due=True, last=True)
            self._say_reached()
            if verdict := self._metrics.verdict():
                self._say(str(verdict))
            heartbeat.enter("end")
        except (NonFiniteError, SpikeError):  # raised by all ranks alike, after the same update
            self.checkpoints.saver.finish()
            raise
        finally:
            self._log = None
            log.close()
            collector.close()
        return code

    def _asked_before_the_first_update(self, stop: StopFlag) -> bool:
        asked = torch.tensor(float(stop.requested), device=self.engine.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def _update(self, batches: Iterator[UpdateBatch], stop: StopFlag) -> list[Ended]:
        """Runs an update; returns the updates whose results are known now, in order.

        Where the engine decides on the device, that is the update before: the host has launched this one before it waits.
        """
        self._since = start = clock.now() - self._unread
        self.heartbeat.enter("data")
        batch = next(batches)
        launched = Launched(batch, waited=clock.now() - start - self._unread)
        profiles, watches = self._profiles(), self._profiles(after=1)
        if profiles and self._log is not None:
            self._log.flush()  # else the profile would contain the reduction of the last entry
        watch = self.memory.watch("forward") if watches else nullcontext()
        with self._metrics.profile() if profiles else nullcontext() as window, watch as memory:
            self.heartbeat.enter("forward_backward")
            self.engine.forward_backward(batch)
            self.checkpoints.saver.before_step()
            launched.pending = self.engine.launch_step(stop=stop.requested)
            self._count(launched)
            ended = self._read(everything=profiles or watches or self._needs_result(self.at.update))
        if ended and ended[-1].launched is launched:
            launched.window, launched.memory = window[0] if window else None, memory
        self._unread = clock.now() - self._since if self._launched else 0.0
        return ended

    def _count(self, launched: Launched) -> None:
        """The run has come to the end of this update, whose result is not read yet."""
        at = self.at
        at.update, at.cursor, at.eval_loss = at.update + 1, launched.batch.cursor, None
        at.target_tokens += launched.batch.target_tokens
        self.heartbeat.update = at.update
        launched.target_tokens = at.target_tokens
        self._launched.append(launched)
        self._updates += 1

    def _read(self, everything: bool) -> list[Ended]:
        """The results that are known on the host, and those of updates before the last; all with `everything`.

        The seconds of an update are those since the result before.
        """
        ended: list[Ended] = []
        while self._launched and (everything or len(self._launched) > 1 or self._launched[0].known):
            first = self._launched.popleft()
            result, now = first.result(), clock.now()
            ended.append(Ended(first, result, now - self._since))
            self._since, everything = now, everything or bool(result.stop)
        return ended

    def _tell(self, update: Ended, log: Log) -> None:
        """Measures, logs and judges one update."""
        launched, result = update.launched, update.result
        done, steps = result.update + 1, self.run.logging.log_steps
        self._metrics.add(update.seconds, launched.waited, launched.batch, launched.window, launched.memory)
        if spike := self._spikes.look(result):
            self._say(spike)
        if done % steps == 0 or done == self.engine.updates or result.skipped:
            log.update(result, launched.batch, launched.target_tokens)

    def _needs_result(self, done: int) -> bool:
        """Whether what follows the update needs its result: the end, an evaluation or a save."""
        return done == self.engine.updates or self._evaluates(done) or self._saves(done)

    def _evaluates(self, done: int) -> bool:
        every = self.run.training.eval_steps
        return done == self.engine.updates or bool(every and done % every == 0)

    def _saves(self, done: int) -> bool:
        every = self.run.checkpoint.save_steps
        return bool(every) and done % (every or 1) == 0

    def _profiles(self, after: int = 0) -> bool:
        """Whether the next update is profiled; with `after`, whether it comes so many updates after a profiled update."""
        every, done = self.run.logging.profile_steps, self._updates - WARMUP_UPDATES
        return every is not None and done >= 0 and done % every == after % every

    def _first(self, phase: str) -> AbstractContextManager[dict[str, int] | None]:
        """A context for an evaluation or a save. Where updates are profiled, the first of each has its memory measured."""
        asked = self.run.logging.profile_steps is not None and phase not in self.memory.seen
        return self.memory.watch(phase) if asked else nullcontext()

    def _reached(self) -> bool:
        """Whether the evaluation of the present weights reached until_eval_loss; the same on all ranks."""
        limit, loss = self.run.training.until_eval_loss, self.at.eval_loss
        return limit is not None and loss is not None and loss <= limit

    def _say_reached(self) -> None:
        limit, done = self.run.training.until_eval_loss, len(self._metrics.seconds)
        if limit is None:
            return
        if self._reached() and not done:
            self._say(
                f"Evaluation loss {self.at.eval_loss:.4f} <= {limit} was reached in update {self.at.update}: "
                "the run has reached its goal. To train further, lower or remove training.until_eval_loss."
            )
            return
        since = f" since update {self.at.update - done}, where the run resumed" if done < self.at.update else ""
        text = f"after {format_seconds(sum(self._metrics.seconds))} of training{since}, without evaluation and saving"
        if self._reached():
            self._say(f"Evaluation loss {self.at.eval_loss:.4f} <= {limit} reached in update {self.at.update}, {text}.")
        else:
            self._say(f"Evaluation loss {limit} not reached {text}.")

    def _evaluate(self, log: Log) -> None:
        if self.data.validation is None:
            return
        self.heartbeat.enter("evaluate")
        batches = self.data.evaluation(self.engine.device, self.engine.inputs.ready)
        with self._first("evaluate") as memory:
            loss, targets = self.engine.evaluate(self._beating(batches))
        if math.isfinite(loss):
            self.at.evaluated(loss)
        log.entry(
            self.at.update - 1,
            {
                names.EVAL_LOSS: loss,
                names.PERPLEXITY: math.exp(min(loss, 700)),
                names.EVAL_TARGETS: targets,
                names.TRAINING_SECONDS: sum(self._metrics.seconds),
                **self.memory.agreed(memory),
            },
        )
        log.say(f"Evaluation after update {self.at.update}: loss {loss:.4f} over {targets:,} targets.")

    def _beating(self, batches: Iterable[UpdateBatch]) -> Iterator[UpdateBatch]:
        for batch in batches:
            self.heartbeat.beat()
            yield batch

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.say(text)
        elif self.first:
            say(self._console, text)

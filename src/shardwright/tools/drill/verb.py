"""`shardwright drill`: a reference, trials that inject faults, and a table of what was lost and what differs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.checkpoint.directory import complete_checkpoints
from shardwright.config.load import Loaded
from shardwright.config.output_paths import check_writable_directory
from shardwright.config.rates import check_length
from shardwright.console import say
from shardwright.errors import ConfigError, ExitCode, did_you_mean
from shardwright.launch import owned, refuse_launcher
from shardwright.layout.legality import check_device, check_run
from shardwright.measure import clock
from shardwright.mesh.process_group import device_kind
from shardwright.tools.drill.corruption import undetected
from shardwright.tools.drill.disk import directory_bytes, small_disk
from shardwright.tools.drill.faults import full_disk_trial, runtime_trials
from shardwright.tools.drill.random_kills import run_random_kills
from shardwright.tools.drill.reshard import ReshardResult, possible_layouts, rows_of, run_reshard
from shardwright.tools.drill.target_run import TargetRun
from shardwright.tools.drill.trials import TrialResult, judge, run_corrupted, run_reference, run_trials
from shardwright.train.preflight import prepare_run
from shardwright.units import format_seconds

RUNTIME = ("kill", "save", "async", "signal", "write", "hang")
TRIALS = (*RUNTIME, "damage", "reshard")
UPDATES, SAVE_STEPS, HANG_SECONDS = 40, 2, 15
ROOM_BYTES = 16 * 2**20
"""Room on the small disk for logs and a save under way, in addition to twice the size of the reference."""
SOAK_SAVE_STEPS, SOAK_UPDATES = 4, 200


@dataclass(frozen=True)
class DrillPlan:
    """What a drill does. trials: groups of faults. soak: number of random kills instead of the trials; 0 for none."""

    ranks: int
    trials: tuple[str, ...] = TRIALS
    seed: int = 0
    soak: int = 0
    updates: int = UPDATES
    keep: bool = False


def parse_trials(text: str) -> tuple[str, ...]:
    """The groups of faults in a list separated by commas; `all` stands for each."""
    names = tuple(TRIALS if text == "all" else (part.strip() for part in text.split(",")))
    for name in names:
        if name not in TRIALS:
            raise ConfigError(f"--trials: `{name}` is not known.", "", did_you_mean(name, TRIALS))
    return names


def run_drill(loaded: Loaded, plan: DrillPlan) -> int:
    """Injects faults into runs of `loaded` and prints the results; returns 0, or 3 where a trial failed.

    The runs write to `checkpoint.output_dir/drill`, which is removed when all trials pass.
    """
    console = Console(highlight=False)
    refuse_launcher("drill")
    check_run(loaded, plan.ranks)
    output_dir = Path(loaded.run.checkpoint.output_dir)
    check_writable_directory(output_dir, "checkpoint.output_dir")
    with owned(output_dir, "drill", lambda text: say(console, text)):
        return _run(loaded, plan, output_dir / "drill", console)


def _run(loaded: Loaded, plan: DrillPlan, directory: Path, console: Console) -> int:
    device = device_kind(loaded.run.hardware.device, plan.ranks)
    check_device(loaded.run, device)
    adjusted, changes = _adjusted(loaded, plan, device)
    check_run(adjusted, plan.ranks)
    prepare_run(adjusted.replaced({"checkpoint.output_dir": str(directory / "none")}, "drill"), console)
    for left in directory.glob("[!.]*"):  # of an earlier drill; the rows just prepared stay, in `.cache`
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    say(console, f"{plan.ranks} ranks, seed {plan.seed}; changed for the drill: {changes}.")
    drill, started = _Drill(adjusted, plan, directory, console), clock.now()
    try:
        passed = drill.soak() if plan.soak else drill.trials()
    finally:
        drill.close()
    say(console, f"{'Passed' if passed else 'FAILED'} in {format_seconds(clock.now() - started)}.")
    if passed and not plan.keep:
        shutil.rmtree(directory)
    else:
        say(console, f"Runs, checkpoints and logs: {directory}")
    return ExitCode.DONE if passed else ExitCode.CHECK_FAILED


def _adjusted(loaded: Loaded, plan: DrillPlan, device: str) -> tuple[Loaded, str]:
    """The run that the drill uses, and the settings that were changed for it, as text."""
    t, updates = loaded.run.training, min(SOAK_UPDATES, 5 * plan.soak) if plan.soak else plan.updates
    shown: dict[str, Any] = {
        "training.max_steps": updates,
        "checkpoint.save_steps": SOAK_SAVE_STEPS if plan.soak else SAVE_STEPS,
        "checkpoint.save_total_limit": 2 if plan.soak else None,
        "hardware.timeout_seconds": HANG_SECONDS,
    }
    if t.warmup_steps > updates // 2:
        shown["training.warmup_steps"] = updates // 2
    plain: dict[str, Any] = {}
    try:
        check_length(t.model_copy(update={"warmup_steps": min(t.warmup_steps, updates // 2)}), updates)
    except ConfigError:  # the schedule has phases that need more updates
        shown.pop("training.warmup_steps", None)
        plain = {"training.warmup_steps": 0, "training.lr_scheduler_kwargs": {}}
        shown["training.lr_scheduler_type"] = "constant"
    if t.eval_steps and t.eval_steps > updates // 3:
        shown["training.eval_steps"] = updates // 3
    silent: dict[str, Any] = {
        "training.num_train_epochs": None,
        "checkpoint.resume": "auto",
        "checkpoint.keep_every": None,
        "checkpoint.keep_best": False,
        "checkpoint.export_hf": "none",
        "hardware.device": device,
        "logging.log_steps": 1,
        "logging.report_to": [],
    }
    text = ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None)
    loaded = loaded.replaced({"data.drop_last": False}, "default")  # for epochs only
    return loaded.replaced({**silent, **shown}, "drill").replaced(plain, "default"), text


class _Drill:
    """One call of the verb."""

    def __init__(self, loaded: Loaded, plan: DrillPlan, directory: Path, console: Console) -> None:
        self.loaded, self.plan, self.directory, self.console = loaded, plan, directory, console
        self.updates = loaded.run.training.max_steps or 0
        self.rng = random.Random(plan.seed)
        self._targets: list[TargetRun] = []

    def close(self) -> None:
        for target in self._targets:
            target.close()

    def say(self, text: str) -> None:
        say(self.console, text)

    def _target(self, name: str, **values: Any) -> TargetRun:
        loaded = self.loaded.replaced(values, "drill") if values else self.loaded
        self._targets.append(TargetRun(loaded, self.plan.ranks, self.directory / name))
        return self._targets[-1]

    def _reference(self) -> TargetRun:
        reference, started = self._target("reference"), clock.now()
        run_reference(reference)
        self.say(f"Reference: {self.updates} updates without faults, {format_seconds(clock.now() - started)}.")
        return reference

    def soak(self) -> bool:
        """Random kills; whether all is well."""
        found = run_random_kills(self._target, self._reference(), self.plan.soak, self.updates, self.rng, self.say)
        for problem in found.problems:
            self.say(problem)
        return found.passed

    def trials(self) -> bool:
        """Every trial of the plan's groups; whether all passed."""
        reference, groups = self._reference(), set(self.plan.trials)
        results: list[TrialResult] = []
        reshards: list[ReshardResult] = []
        full_disk = self._full_disk(reference) if "write" in groups else []
        if full_disk:
            groups -= {"write"}
        if trials := runtime_trials(self.plan.ranks, groups, self.rng):
            target = self._target("faults")
            results = run_trials(target, trials, self.updates, self.rng, self.say)
            judge(results, target, reference)
        results += full_disk
        if "damage" in groups:
            results += self._corruption(reference)
        if results:
            _show(results, self.say)
        if "reshard" in groups:
            reshards = self._reshard(reference)
            _show(reshards, self.say)
        return not any([result.problem for result in results] + [result.problem for result in reshards])

    def _full_disk(self, reference: TargetRun) -> list[TrialResult]:
        """A run on a small disk that is filled. Empty where none can be mounted; a limit on file sizes takes its place."""
        place = self.directory / "full"
        size = 2 * directory_bytes(reference.output_dir) + ROOM_BYTES
        with small_disk(place, size) as refused:
            if refused:
                self.say(f"No disk to fill: {refused}. A limit on the size of a rank's files takes its place.")
                return []
            target = self._target(f"{place.name}/run")
            try:
                results = run_trials(target, [full_disk_trial()], self.updates, self.rng, self.say)
                judge(results, target, reference)
            finally:
                target.close()
            if self.plan.keep or any(result.problem for result in results):
                shutil.copytree(place, self.directory / "full-kept", symlinks=True)
        return results

    def _corruption(self, reference: TargetRun) -> list[TrialResult]:
        newest = complete_checkpoints(reference.output_dir)[-1]
        missed = undetected(newest, self.directory / "corrupted-copies")
        detection = TrialResult("each kind of file, each kind of corruption", "verify", after="all detected")
        if missed:
            detection.problem = detection.after = f"not detected: {', '.join(missed)}"
        target = self._target("corrupted")
        result = run_corrupted(target, reference, self.rng, self.say)
        judge([result], target, reference)
        return [detection, result]

    def _reshard(self, reference: TargetRun) -> list[ReshardResult]:
        there = complete_checkpoints(reference.output_dir)
        checkpoint = there[len(there) // 2]
        worlds = {ranks: possible_layouts(self.loaded, ranks) for ranks in sorted({1, self.plan.ranks})}
        directory = self.directory / "read"
        results = run_reshard(self.loaded, checkpoint, reference.output_dir, worlds, directory)
        numbers = [(ranks, number) for ranks, layouts in worlds.items() for number in range(len(layouts))]
        rows = [rows_of(directory / f"{ranks}-{number}", ranks) for ranks, number in numbers]
        for result, own in zip(results, rows):
            if not own or own != rows[0]:
                result.problem = result.problem or "the run trained on other rows"
        return results


def _show(results: Sequence[TrialResult | ReshardResult], say: Callable[[str], None]) -> None:
    """Prints a table, one line for each result; then the problem of each that failed."""
    lines = [list(results[0].cells), *(list(result.cells.values()) for result in results)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for result in results:
        if result.problem:
            say(f"{next(iter(result.cells.values()))}: {result.problem}.")

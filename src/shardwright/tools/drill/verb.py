"""`shardwright drill`: a reference, faults, starts after them, and a table of what was lost and what differs."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.checkpoint import store
from shardwright.config.load import Loaded
from shardwright.config.output_paths import check_writable_directory
from shardwright.config.rates import check_length
from shardwright.console import say
from shardwright.errors import ConfigError, ExitCode, did_you_mean
from shardwright.launch import inside_a_launcher, owned
from shardwright.layout.legality import check_device, check_run
from shardwright.measure import clock
from shardwright.mesh.process_group import device_kind
from shardwright.tools.drill.chain import Row, judge, run_chain, run_damaged, run_reference
from shardwright.tools.drill.damage import unnoticed
from shardwright.tools.drill.disk import bytes_below, small_disk
from shardwright.tools.drill.faults import disk_full, live_faults
from shardwright.tools.drill.reshard import Read, possible_layouts, rows_of, run_reshard
from shardwright.tools.drill.session import Session
from shardwright.tools.drill.soak import run_soak
from shardwright.tools.drill.table import show_reads, show_rows
from shardwright.train.preflight import prepare_run
from shardwright.units import format_seconds

LIVE = ("kill", "save", "async", "signal", "write", "hang")
TRIALS = (*LIVE, "damage", "reshard")
UPDATES, SAVE_STEPS, HANG_SECONDS = 40, 2, 15
ROOM_BYTES = 16 * 2**20
"""What logs and a save under way may take on a small disk, beside twice the reference."""
SOAK_SAVE_STEPS, SOAK_UPDATES = 4, 200


@dataclass(frozen=True)
class Plan:
    """What a drill does. trials: groups of faults. soak: how many random kills instead of them; 0 for none."""

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


def run_drill(loaded: Loaded, plan: Plan) -> int:
    """Breaks runs of `loaded` as `plan` says and prints what came of it; returns 0, or 3 where anything differs.

    It writes below `checkpoint.output_dir`, in a directory that it removes when all is well.
    """
    console = Console(highlight=False)
    if inside_a_launcher():
        raise ConfigError(
            "`drill` was started under a launcher.",
            "It starts its own ranks.",
            "Call it without torchrun or srun.",
        )
    check_run(loaded, plan.ranks)
    output_dir = Path(loaded.run.checkpoint.output_dir)
    check_writable_directory(output_dir, "checkpoint.output_dir")
    with owned(output_dir, "drill", lambda text: say(console, text)):
        return _run(loaded, plan, output_dir / "drill", console)


def _run(loaded: Loaded, plan: Plan, directory: Path, console: Console) -> int:
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


def _adjusted(loaded: Loaded, plan: Plan, device: str) -> tuple[Loaded, str]:
    """The run as the drill breaks it, and what was changed for that."""
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
    except ConfigError:  # phases of a schedule that so few updates cannot hold
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

    def __init__(self, loaded: Loaded, plan: Plan, directory: Path, console: Console) -> None:
        self.loaded, self.plan, self.directory, self.console = loaded, plan, directory, console
        self.updates = loaded.run.training.max_steps or 0
        self.chance = random.Random(plan.seed)
        self._sessions: list[Session] = []

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def say(self, text: str) -> None:
        say(self.console, text)

    def _session(self, name: str, **values: Any) -> Session:
        loaded = self.loaded.replaced(values, "drill") if values else self.loaded
        self._sessions.append(Session(loaded, self.plan.ranks, self.directory / name))
        return self._sessions[-1]

    def _reference(self) -> Session:
        reference, started = self._session("reference"), clock.now()
        run_reference(reference)
        self.say(f"Reference: {self.updates} updates, nothing done to them, {format_seconds(clock.now() - started)}.")
        return reference

    def soak(self) -> bool:
        """Random kills."""
        reference = self._reference()
        done = run_soak(self._session, reference, self.plan.soak, self.updates, self.chance, self.say)
        for problem in done.problems:
            self.say(problem)
        return done.passed

    def trials(self) -> bool:
        """Every fault of the plan's groups."""
        reference, rows, reads = self._reference(), [], []
        groups = set(self.plan.trials)
        full = self._full(reference) if "write" in groups else []
        if full:
            groups -= {"write"}
        if faults := live_faults(self.plan.ranks, groups, self.chance):
            session = self._session("broken")
            rows = run_chain(session, faults, self.updates, self.chance, self.say)
            judge(rows, session, reference)
        rows += full
        if "damage" in groups:
            rows += self._damage(reference)
        if rows:
            show_rows(rows, self.say)
        if "reshard" in groups:
            reads = self._reshard(reference)
            show_reads(reads, self.say)
        return not any(row.problem for row in rows) and not any(read.problem for read in reads)

    def _full(self, reference: Session) -> list[Row]:
        """A run on a small disk that is filled; nothing where none can be mounted, and a limit on files stands for it."""
        place = self.directory / "full"
        size = 2 * bytes_below(reference.output_dir) + ROOM_BYTES
        with small_disk(place, size) as refused:
            if refused:
                self.say(f"No disk to fill: {refused}. A limit on the size of a rank's files stands for it.")
                return []
            session = self._session(f"{place.name}/run")
            try:
                rows = run_chain(session, [disk_full()], self.updates, self.chance, self.say)
                judge(rows, session, reference)
            finally:
                session.close()
            if self.plan.keep or any(row.problem for row in rows):
                shutil.copytree(place, self.directory / "full-kept", symlinks=True)
        return rows

    def _damage(self, reference: Session) -> list[Row]:
        newest = store.complete_checkpoints(reference.output_dir)[-1]
        missed = unnoticed(newest, self.directory / "damaged-copies")
        seen = Row("each kind of file, each kind of damage", "store.verify", after="all seen")
        if missed:
            seen.problem = seen.after = f"not seen: {', '.join(missed)}"
        session = self._session("damaged")
        row = run_damaged(session, reference, self.chance, self.say)
        judge([row], session, reference)
        return [seen, row]

    def _reshard(self, reference: Session) -> list[Read]:
        there = store.complete_checkpoints(reference.output_dir)
        checkpoint = there[len(there) // 2]
        worlds = {ranks: possible_layouts(self.loaded, ranks) for ranks in sorted({1, self.plan.ranks})}
        directory = self.directory / "read"
        reads = run_reshard(self.loaded, checkpoint, reference.output_dir, worlds, directory)
        numbers = [(ranks, number) for ranks, layouts in worlds.items() for number in range(len(layouts))]
        rows = [rows_of(directory / f"{ranks}-{number}", ranks) for ranks, number in numbers]
        for read, own in zip(reads, rows):
            if not own or own != rows[0]:
                read.problem = read.problem or "it trained on other rows"
        return reads

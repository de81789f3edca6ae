"""The run into which a drill injects faults: started and observed from outside, through heartbeats and files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from shardwright.checkpoint.manifest import read_manifest
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.config.load import Loaded
from shardwright.errors import CheckFailed
from shardwright.launch.heartbeat import Beat, read_heartbeat
from shardwright.measure import clock

POLL_SECONDS = 0.0002
RESTARTS = 1000
WAIT_SECONDS = 300.0
"""How long the drill waits for an expected event, in addition to the run's own time limits."""


class TargetRun:
    """A run of `ranks` ranks in its own output directory, across all its launchers and starts."""

    def __init__(self, loaded: Loaded, ranks: int, output_dir: Path) -> None:
        self.loaded = loaded.replaced({"checkpoint.output_dir": str(output_dir)}, "drill")
        self.ranks, self.output_dir = ranks, output_dir
        output_dir.mkdir(parents=True)
        self._file = output_dir / "drill.json"
        self._file.write_text(self.loaded.to_json(), encoding="utf-8")
        self.output = output_dir / "launcher.log"
        self.launcher: subprocess.Popen | None = None

    def start(self, restarts: int = RESTARTS) -> None:
        """Starts a launcher, unless one is running."""
        if self.running:
            return
        arguments = [str(self._file), str(self.ranks), str(restarts)]
        command = [sys.executable, "-m", "shardwright.tools.drill.start", *arguments]
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def set_async_save(self, async_save: bool) -> None:
        """Whether ranks that start from now on save in the background."""
        changed = self.loaded.replaced({"checkpoint.async_save": async_save}, "drill")
        part = self._file.with_suffix(".part")
        part.write_text(changed.to_json(), encoding="utf-8")
        part.replace(self._file)

    @property
    def running(self) -> bool:
        """Whether the launcher is running."""
        return self.launcher is not None and self.launcher.poll() is None

    def kill_launcher(self) -> None:
        """Sends SIGKILL to the launcher; its guard process ends the ranks."""
        assert self.launcher is not None
        self.launcher.kill()
        self.launcher.wait()

    def close(self) -> None:
        """Ends all processes."""
        if self.running:
            self.kill_launcher()

    @property
    def starts(self) -> int:
        """Number of starts of ranks, by all launchers."""
        logs = self.output_dir / "logs"
        return sum(1 for path in logs.iterdir() if path.name.isdecimal()) if logs.is_dir() else 0

    def beat(self, rank: int, start: int | None = None) -> Beat | None:
        """The last beat of `rank` in start number `start`, by default the last start."""
        number = self.starts - 1 if start is None else start
        return read_heartbeat(self.output_dir / "logs" / str(number) / f"rank_{rank}")

    def process_of(self, rank: int) -> int | None:
        """The process of a running rank, from the launcher's children: known before the first beat of the rank."""
        assert self.launcher is not None
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if child.environ().get("RANK") == str(rank):
                        return child.pid
        return None

    def reached(self, start: int) -> int:
        """Updates done when start number `start` ended; 0 where it had not begun."""
        beats = [beat for rank in range(self.ranks) if (beat := self.beat(rank, start)) and beat.first >= 0]
        return max((beat.update for beat in beats), default=0)

    def newest(self) -> int:
        """Update of the checkpoint that a start would resume from; 0 for none."""
        path = find_checkpoint(self.output_dir, "auto")
        return read_manifest(path).update if path else 0

    def wait_for_first_update(self, start: int) -> tuple[int, float]:
        """(update, clock) at which start number `start` began to train."""
        for _ in self.polls(f"start {start} to begin"):
            beat = self.beat(0, start)
            if beat is not None and beat.first >= 0:
                return beat.first, clock.now()
            if not self.running:
                raise CheckFailed("A start of the ranks ended before its first update.", self.tail())
        raise AssertionError

    def wait_for_end(self, start: int) -> int | None:
        """Waits for the end of start number `start`: the launcher's exit code, or None when it has restarted the ranks."""
        for _ in self.polls(f"start {start} to end"):
            if not self.running:
                assert self.launcher is not None
                return self.launcher.returncode
            if self.starts > start + 1:
                return None
        raise AssertionError

    def polls(self, what: str, interval: float = 0.01, seconds: float = WAIT_SECONDS) -> Iterator[None]:
        """Yields every `interval` seconds for `seconds` and the run's time limit; then raises `CheckFailed`."""
        end = clock.now() + seconds + self.loaded.run.hardware.timeout_seconds
        while clock.now() < end:
            yield
            clock.sleep(interval)
        raise CheckFailed(f"The drill has waited too long for {what}.", self.tail())

    def tail(self, lines: int = 8) -> str:
        """The last lines of the launchers' output."""
        text = self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

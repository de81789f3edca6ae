"""Where a run writes its metrics: `metrics.jsonl` always, TensorBoard and trackio when asked, and the line of progress."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardwright.console import say
from shardwright.errors import ConfigError
from shardwright.measure import metric_names as names
from shardwright.units import format_bytes, format_seconds

METRICS = "metrics.jsonl"
Values = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """A tracker that gets the metrics beside the file."""

    def log(self, update: int, values: Values) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in `output_dir/tensorboard`."""

    def __init__(self, output_dir: Path, first_update: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_update)

    def log(self, update: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A trackio run named after the output directory."""

    def __init__(self, output_dir: Path, first_update: int) -> None:
        try:
            import trackio
        except ImportError:
            raise _missing("trackio") from None
        self._trackio: Any = trackio
        trackio.init(project="shardwright", name=output_dir.name)

    def log(self, update: int, values: Values) -> None:
        self._trackio.log({key: value for key, value in values.items() if value is not None}, step=update)

    def close(self) -> None:
        self._trackio.finish()


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"logging.report_to {package}: the package is not installed.", "", f"pip install 'shardwright[{package}]'."
    )


TRACKERS: dict[str, type[TensorBoard] | type[Trackio]] = {"tensorboard": TensorBoard, "trackio": Trackio}


def check_trackers(report_to: Sequence[str]) -> None:
    """Raises `ConfigError` where a package that `report_to` needs is not installed."""
    for name in report_to:
        if find_spec(name) is None:
            raise _missing(name)


class MetricsLog:
    """The metrics of one run; made by rank 0 only.

    first_update: the file's entries of this update and later come from an earlier attempt and are dropped, so that the file of
    a resumed run reads like that of an uninterrupted run. say: called with the number of dropped entries, and once when the
    file cannot be written (a full disk); entries are then kept and written with a later entry.
    """

    def __init__(
        self, output_dir: Path, report_to: list[Any], first_update: int, say: Callable[[str], None] = lambda text: None
    ) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _update_of(line) < first_update]
        aside = path.with_suffix(".new")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        shutil.move(aside, path)  # copies where a share cannot rename over a file
        if dropped := len(lines) - len(kept):
            also = " Trackio keeps them and shows both attempts." if "trackio" in report_to else ""
            say(
                f"{path}: {dropped} entries of an earlier attempt, from update {first_update + 1} on, are dropped.{also}"
            )
        self._file = path.open("ab", buffering=0)
        self._say, self._pending, self._failing = say, b"", False
        self._trackers: list[Tracker] = [TRACKERS[name](output_dir, first_update) for name in report_to]

    def log(self, update: int, values: Values) -> None:
        """Writes one entry; `update` counts from 0. Values that are not finite become null: JSON has no name for them."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._pending += (json.dumps({"update": update, **plain}, allow_nan=False) + "\n").encode()
        self._write()
        for tracker in self._trackers:
            tracker.log(update, values)

    def _write(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._failing:
                self._say(f"{METRICS} cannot be written: {error}. Its entries are kept until writing works again.")
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        self._write()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _update_of(line: str) -> float:
    """The update of a line of metrics; a line cut off by a crash belongs to none that is kept."""
    try:
        return float(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Progress:
    """One line that changes in place on a terminal; one line per log step elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, update: int, values: Values, left_seconds: float | None) -> None:
        """`values` as logged; `update` is the one just done, counted from 0."""
        line = _line(update + 1, self._total, values, left_seconds)
        if self._live is None:
            print(
                line, file=self._console.file, flush=True
            )  # the line has no style, and `print` takes a fifth of rich's time
        else:
            done = (update + 1) / self._total
            bar = "━" * round(20 * done) + "╶" * (20 - round(20 * done))
            self._live.update(Text(f"{bar} {line}", overflow="ellipsis", no_wrap=True))

    def say(self, text: str) -> None:
        """Prints a line above the line of progress."""
        say(self._console, text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _line(number: int, total: int, values: Values, left_seconds: float | None) -> str:
    parts = [f"update {number:>{len(str(total))}}/{total}"]
    loss, norm, rate = (values[name] for name in (names.LOSS, names.GRAD_NORM, names.LEARNING_RATE))
    parts.append(f"loss {loss:.4f}  norm {norm:.3g}  lr {rate:.2e}")
    if (speed := values.get(names.TARGETS_PER_SECOND)) is not None:
        parts.append(f"{speed:,.0f} target tokens/s  {format_seconds(float(values[names.STEP_SECONDS] or 0))}/update")
    memory = values.get(names.PEAK_ALLOCATED) or values.get(names.PEAK_HOST)
    if memory:
        parts.append(f"peak {format_bytes(float(memory))}")
    if left_seconds is not None:
        parts.append(f"{format_seconds(left_seconds)} left")
    return "  ".join(parts)

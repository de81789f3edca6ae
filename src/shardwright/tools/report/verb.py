"""`shardwright report`: from directories to one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.arch.model_shape import Inventory
from shardwright.config.output_paths import check_writable_file
from shardwright.errors import ConfigError, ExitCode
from shardwright.measure import clock
from shardwright.planner.hardware import find_device
from shardwright.tools.report.page import render
from shardwright.tools.report.predict import device_of, forecast
from shardwright.tools.report.read import RunDirectory, read_directory

PAGE = "report.html"


def run_report(
    paths: Sequence[Path],
    output: Path | None,
    device: str | None,
    write: Callable[[str], object],
    inventory: Inventory | None = None,
) -> int:
    """Writes the page and returns the exit code. output: None: `report.html` in the only directory, or here for several.

    device: a name of the catalogue or a hardware file, for predicted times; None: what the runs' environment names.
    """
    page = output or (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    check_writable_file(page, "--output")
    directories = _distinct([read_directory(path) for path in paths])
    chosen = find_device(device) if device else None
    subjects = [(one, forecast(one, chosen or device_of(one.environment), inventory)) for one in directories]
    page.parent.mkdir(parents=True, exist_ok=True)
    title = ", ".join(one.name for one in directories)
    text = render(subjects, title, f"{clock.date()[:16].replace('T', ' ')} UTC")
    page.write_text(text, encoding="utf-8")
    for one in directories:
        for notice in one.notices:
            write(f"{one.name}: {notice}")
    write(f"Wrote {page} ({len(text.encode()) / 1000:.0f} kB).")
    return ExitCode.DONE


def _distinct(directories: list[RunDirectory]) -> list[RunDirectory]:
    """The directories with unique names: each with as many parents as needed."""
    for depth in range(2, 10):
        names = [one.name for one in directories]
        if len(set(names)) == len(names):
            return directories
        directories = [
            replace(one, name="/".join(one.path.resolve().parts[-depth:])) if names.count(one.name) > 1 else one
            for one in directories
        ]
    raise ConfigError(f"{directories[0].path} is given more than once.", "", "Name each directory once.")

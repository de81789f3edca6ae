"""The page: sections, the run file, the environment, and the template that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright import __version__
from shardwright.errors import ConfigError
from shardwright.measure import metric_names as names
from shardwright.tools.report.compared import predicted_section, side_by_side
from shardwright.tools.report.figure import NA, Section, Table, duration, known, size
from shardwright.tools.report.measured import phase_figure, utilisation_section
from shardwright.tools.report.planned import Subject, memory_section, pipeline_section, traffic_section
from shardwright.tools.report.read import RunDirectory, percentiles
from shardwright.tools.report.training import loss_section, run_steps, step_section, token_section


@dataclass(frozen=True)
class Setting:
    """One line of a resolved run file."""

    key: str
    value: str
    origin: str


def sections(subjects: Sequence[Subject]) -> list[Section]:
    """All sections with figures, in the order of the page."""
    directories = [directory for directory, _ in subjects]
    trained = [directory for directory in directories if not directory.benched] or directories
    steps = [run_steps(directory) for directory in trained if not directory.benched]
    benched = [
        (layout.name, layout.step_seconds, "bench.json holds no step times.", len(layout.step_seconds))
        for directory in directories
        for layout in directory.benched
    ]
    measured = [one for directory in directories for one in directory.all_measured]
    layouts = side_by_side(subjects)
    runs_first = any(directory.updates for directory in directories)
    return [
        *((loss_section(trained), layouts) if runs_first else (layouts, loss_section(trained))),
        step_section(steps, benched),
        utilisation_section(measured),
        memory_section(subjects, phase_figure(measured)),
        pipeline_section(subjects),
        traffic_section(subjects),
        token_section(trained),
        predicted_section(subjects),
    ]


def summary(subjects: Sequence[Subject]) -> Table:
    """One row of figures for each run and benched layout."""
    headers = ("run", "layout", "last loss", "target tokens/s", "step p50", "MFU", "peak memory", "padding")
    rows = []
    for directory, found in subjects:
        layout = NA if isinstance(found, str) else found.layout
        measured, losses = directory.measured(), [v for v in directory.column(names.LOSS) if v is not None]
        for one in (*directory.benched, *([measured] if measured else [])):
            own = one is measured
            p50 = percentiles(one.step_seconds)[0] if one.step_seconds else None
            rate = percentiles(one.targets_per_s)[0] if one.targets_per_s else None
            rows.append(
                (
                    one.name,
                    layout if own else one.name,
                    known(losses[-1] if own and losses else None, lambda v: f"{v:.4f}"),
                    known(rate, lambda v: f"{v:,.0f}"),
                    known(p50, duration),
                    known(one.mfu, lambda v: f"{v:.1%}"),
                    known(one.peak_bytes, size),
                    known(one.padding, lambda v: f"{v:.1%}"),
                )
            )
    if not any(directory.updates for directory, _ in subjects):  # the name of a benched layout is the layout
        return Table((headers[0], *headers[3:]), tuple((row[0], *row[3:]) for row in rows))
    return Table(headers, tuple(rows))


def settings(directory: RunDirectory) -> tuple[Setting, ...]:
    """The lines of the resolved run file with the origin of every value, as the trainer wrote them."""
    found, section = [], ""
    for line in directory.run_file.splitlines():
        if line and not line.startswith((" ", "#")):
            section = line.rstrip().removesuffix(":")
        elif line.strip():
            body, _, origin = line.strip().partition("  # ")
            key, _, value = body.partition(": ")
            found.append(Setting(f"{section}.{key}", value.strip(), origin.strip()))
    return tuple(found)


def differences(directories: Sequence[RunDirectory]) -> Table | None:
    """The keys of the run file in which the runs differ; None for one run."""
    columns = [{one.key: one.value for one in settings(directory)} for directory in directories if directory.run_file]
    if len(columns) < 2:
        return None
    names = [directory.name for directory in directories if directory.run_file]
    rows = tuple(
        (key, *(column.get(key, NA) for column in columns))
        for key in columns[0]
        if len({column.get(key) for column in columns}) > 1
    )
    return Table(("key", *names), rows)


def environment(directories: Sequence[RunDirectory]) -> Table:
    """Versions, devices and ranks of every run."""
    keys = list(dict.fromkeys(key for directory in directories for key in directory.environment))
    rows = [
        (key.replace("_", " "), *(_plain(key, directory.environment.get(key)) for directory in directories))
        for key in keys
    ]
    return Table(("", *(directory.name for directory in directories)), tuple(rows))


def _plain(key: str, value: Any) -> str:
    if value is None:
        return NA
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes") and isinstance(value, int | float):
        return size(value)
    return str(value)


def render(subjects: Sequence[Subject], title: str, date: str) -> str:
    """The whole page as one HTML text. Raises `ConfigError` where jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise ConfigError("report needs jinja2.", "", "pip install 'shardwright[report]'.") from None
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("shardwright.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["zip"] = zip
    directories = [directory for directory, _ in subjects]
    return templates.get_template("page.html.j2").render(
        title=title,
        date=date,
        version=__version__,
        subjects=subjects,
        summary=summary(subjects),
        sections=sections(subjects),
        settings={directory.name: settings(directory) for directory in directories},
        differences=differences(directories),
        environment=environment(directories),
    )

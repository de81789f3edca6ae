"""What a run of the tests says at its end: who used most of the CPU, and what `make test-fast` has left out, or should.

Seconds are those of the CPU, of the test's own process and of the programs that it waited for: they do not depend on what
else the machine does. Ranks that tests fork (tests/gloo/ranks.py) are not among them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

FAST_SECONDS = 2.0
"""A test that needs more of the CPU belongs under the marker `slow`."""
SHOWN = 10
_left_out: Counter[str] = Counter()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = _cpu_seconds()
    return (yield)


_STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        slow = item.get_closest_marker("slow") is not None
        report.user_properties.append(("cpu_seconds", (round(_cpu_seconds() - item.stash[_STARTED], 2), slow)))
    return report


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Of one file, or of what `-m` and `-k` chose."""
    _left_out.update(item.nodeid.split("::")[0] for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of xdist collects all files, so any one tells what was left out."""
    _left_out.clear()
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    used = sorted(
        ((*value, report.nodeid) for reports in terminalreporter.stats.values() for report in reports
         for key, value in getattr(report, "user_properties", ()) if key == "cpu_seconds"), reverse=True,
    )  # fmt: skip
    if len(used) > SHOWN:
        terminalreporter.section("most of the CPU")
        for seconds, _, name in used[:SHOWN]:
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
        terminalreporter.line(
            f"{sum(seconds for seconds, *_ in used):6.0f} s  in all {len(used)} tests, ranks not counted"
        )
    late = [name for seconds, slow, name in used if seconds > FAST_SECONDS and not slow]
    if late:
        terminalreporter.line(f"Over {FAST_SECONDS:.0f} s without the marker `slow`: " + ", ".join(late))
    if config.option.markexpr == "not slow" and _left_out:
        terminalreporter.section("left out")
        for name, count in sorted(_left_out.items()):
            terminalreporter.line(f"{count:4}  {name}")
        terminalreporter.line(f"{sum(_left_out.values())} slow tests were left out; `make test` runs them too.")

"""The table of metrics: the only place in the code that spells a metric's name, and the page of the documentation."""

from __future__ import annotations

import re

from tests.places import ROOT

from shardwright.measure.metric_names import METRICS

SPELLED = re.compile(r'"((?:train|perf|comm|mem|data|eval)/[a-z_0-9{]+)"')


def test_no_other_module_spells_a_metric() -> None:
    source = ROOT / "src" / "shardwright"
    others = [path for path in source.rglob("*.py") if path.name != "metric_names.py"]
    found = {str(path.relative_to(source)): names for path in others if (names := SPELLED.findall(path.read_text()))}
    assert found == {}


def test_the_documentation_has_every_metric() -> None:
    rows = [f"| `{name}` | {m.unit} | {m.ranks} | {m.meaning} |" for name, m in METRICS.items()]
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows

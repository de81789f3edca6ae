"""The worked examples of the texts come out exactly; every field explains itself. Known-fault rows: none."""

from __future__ import annotations

import csv

import pytest
from tests.places import REFERENCE

from shardwright.arch.known_models import known_shape
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes
from shardwright.planner.examples import ideal_states, worked_examples
from shardwright.planner.explain import FIELDS, Subject, explain
from shardwright.planner.hardware import find_device
from shardwright.planner.problem import Layout, Problem

TEXT = "\n".join(worked_examples())


@pytest.mark.parametrize(
    "line",
    [
        "(2 + 2 + 12) x 70e9 bytes = 16 x 70e9 = 1.12 TB",
        "(2 + 2 + 12) x 7e9 bytes = 16 x 7e9 = 112 GB",
        "zero1 on 4 ranks: 2 + 2 + 12 / 4 = 7P bytes",
        "zero2 on 4 ranks: 2 + (2 + 12) / 4 = 5.5P bytes",
        "2.2 + 2.2 + 13.1 = 17.5 GB per rank",
        "80 GB - 17.5 GB = 62.5 GB left",
        "= 50.6 GB per rank",
        "(4 + 4 + 8) bytes = 16 GB, over 4 ranks 4 GB",
        "one of 20 blocks gathered: 0.2 GB, and its gradient before the reduce-scatter: 0.2 GB",
        "4 + 3 + 0.2 + 0.2 + 0.5 = 7.9 GB",
        "16,384 x 65,536 x 2 bytes = 2.15 GB",
        "2 GB / 100 GB/s = 20 ms at least",
        "2 ranks x 4 rows x 8 microbatches = 64 sequences per update",
        "= 5.88e+23 FLOPs",
        "= 272 days, without interruptions",
        "2 units x (N - 1) / N per rank",
        "3 units x (N - 1) / N per rank",
    ],
)
def test_worked_examples(line: str) -> None:
    assert line in TEXT


def test_all_54_cells_of_the_zero_table() -> None:
    """Table 1 of arXiv:1910.02054, decimal GB, within one unit of the last printed digit (some cells are cut, not rounded)."""
    cells = 0
    with (REFERENCE / "zero_table1.csv").open() as file:
        for row in csv.DictReader(file):
            for kind, column in (("zero1", "stage1_gb"), ("zero2", "stage2_gb"), ("zero3", "stage3_gb")):
                printed = row[column]
                last_digit = 10.0 ** -len(printed.partition(".")[2])
                size = ideal_states(float(row["params_b"]) * 1e9, kind, int(row["degree"])).total / 1e9
                assert abs(size - float(printed)) < last_digit, (row, kind, size)
                cells += 1
    assert cells == 54


def test_every_field_explains_itself() -> None:
    """Field by field on a sharded layout; the states are those of arithmetic by hand."""
    problem = Problem(known_shape("llama-3-8b"), 8192, 64, device=find_device("h100-sxm-80gb"))
    subject = Subject(problem, Layout(Axes(dp_shard=8), "zero3"), 8)
    for field in FIELDS:
        assert len(list(explain(field, subject))) >= 2, field
    assert "x 4 bytes (fp32) = 3.74 GiB" in "\n".join(explain("parameters", subject))
    assert "two moments in fp32 over 8 ranks: 7.48 GiB" in "\n".join(explain("optimizer", subject))
    assert len(list(explain(None, subject))) > 30


def test_a_field_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean `memory`"):
        list(explain("memry", Subject(Problem(known_shape("gpt2"), 1024, 8), Layout(), 1)))

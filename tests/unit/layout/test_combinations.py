"""The table of what does not combine: refusals by name, the planner's use of it, and the page in docs. Row A124."""

from __future__ import annotations

from typing import Any

import pytest
from tests.places import ROOT

from shardwright.config import load_run_file
from shardwright.errors import ConfigError
from shardwright.layout.combinations import EXCLUSIONS, excluded, table
from shardwright.layout.legality import check_run
from shardwright.planner.space import SPLIT_WEIGHTS

BASE: dict[str, Any] = {
    "model.model_name_or_path": "somewhere",
    "data.train": ["x"],
    "data.max_length": 64,
    "training.max_steps": 1,
    "training.global_batch_size": 8,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallelism.pp_size": 2, "parallelism.pp_schedule": "zbv", "parallelism.data_parallel": "zero1"},
         "zbv with data_parallel zero1"),
        ({"parallelism.pp_size": 2, "parallelism.pp_schedule": "zero_bubble", "parallelism.data_parallel": "ddp",
          "memory.compile": True}, "zero_bubble with memory.compile"),
        ({"parallelism.pp_size": 2, "model.model_name_or_path": "package.module:function"}, "with the model function"),
        ({"parallelism.data_parallel": "ddp", "memory.cpu_offload": "params"}, "cpu_offload params with data_parallel ddp"),
    ],
)  # fmt: skip
def test_a_pair_that_does_not_combine_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(load_run_file(None, {**BASE, **values}), 2)


def test_each_exclusion_needs_both_features() -> None:
    for exclusion in EXCLUSIONS:
        assert excluded({exclusion.first[0], exclusion.second[0]}) is exclusion
        assert excluded(set(exclusion.first)) is None and excluded(set(exclusion.second)) is None
    assert excluded({"zero3", "pp", "1f1b", "tp", "cp", "full"}) is None


def test_the_planner_leaves_out_what_the_gate_refuses() -> None:
    assert SPLIT_WEIGHTS == ("zero_bubble", "zbv")


def test_the_page_holds_the_table() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "combinations.md").read_text()

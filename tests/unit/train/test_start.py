"""Numbers of ranks."""

from __future__ import annotations

import pytest
from rich.console import Console
from tests.places import ROOT

from shardwright.config import load_run_file
from shardwright.errors import ConfigError
from shardwright.train.start import possible_counts


def test_numbers_of_ranks_on_which_the_objective_divides() -> None:
    """global_batch_size is 8: 4 and 2 ranks, not 3, whose reason is said."""
    loaded = load_run_file(ROOT / "examples" / "tiny.yaml")
    console = Console(record=True, width=300, quiet=False)
    with console.capture() as said:
        assert possible_counts(loaded, 4, 2, console) == [4, 2]
    assert "Not on 3 ranks: training.global_batch_size = 8 is not a multiple of 3" in said.get()
    with pytest.raises(ConfigError, match="not a multiple of 3"):
        possible_counts(loaded, 3, 3, console)

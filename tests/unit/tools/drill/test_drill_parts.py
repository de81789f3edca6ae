"""What the drill reads from files: stages of a save, differences between runs; names of trials."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.tools.drill.compare import compare_metrics, first_difference
from shardwright.tools.drill.injection import save_stage
from shardwright.tools.drill.verb import parse_trials


def test_stages_of_a_save_are_told_from_files(tmp_path: Path) -> None:
    assert save_stage(tmp_path) == ""
    aside = tmp_path / ".checkpoint-4.incomplete"
    (aside / "tensors").mkdir(parents=True)
    assert save_stage(tmp_path) == "before writing"
    (aside / "tensors" / "part").touch()
    assert save_stage(tmp_path) == "while writing"
    (aside / "manifest.json").touch()
    assert save_stage(tmp_path) == "before the rename"
    aside.rename(tmp_path / "checkpoint-4")
    assert save_stage(tmp_path) == "before the link"
    (tmp_path / "latest").symlink_to("checkpoint-4")
    assert save_stage(tmp_path) == ""


def test_any_difference_between_runs_is_found(tmp_path: Path) -> None:
    """A bit, a sign of zero, a name; an entry that is missing, doubled or of another loss."""
    state = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    assert first_difference(state, {name: value.clone() for name, value in state.items()}) == ""
    assert "a differs" in first_difference(state, {**state, "a": -torch.zeros(3)})
    assert "1 names differ: b" in first_difference(state, {"a": state["a"]})
    one, other = tmp_path / "one", tmp_path / "other"
    lines = ['{"update": 0, "train/loss": 3.0}', '{"update": 1, "train/loss": 2.5}']
    for directory, own in ((one, lines), (other, lines)):
        directory.mkdir()
        (directory / "metrics.jsonl").write_text("\n".join(own) + "\n")
    assert compare_metrics(one, other) == (None, "")
    for own, update in (
        (lines[:1], 1),
        ([lines[0], *lines], 1),
        ([lines[0], lines[1].replace("2.5", "2.6")], 1),
    ):
        (one / "metrics.jsonl").write_text("\n".join(own) + "\n")
        assert compare_metrics(one, other)[0] == update


def test_trials_are_known_by_name() -> None:
    assert "kill" in parse_trials("all") and parse_trials("kill, save") == ("kill", "save")
    with pytest.raises(ConfigError, match="Did you mean `kill`"):
        parse_trials("kil")

"""Sources with weights: exact counts of every epoch, and every row equally often. Known fault A25 for the changing choice."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data_runs import ready, run_over

from shardwright.config import RunFile
from shardwright.data.mixture import Mixture
from shardwright.data.prepare import Prepared, make_order, prepare
from shardwright.errors import ConfigError


def epoch_rows(mixture: Mixture, epoch: int) -> list[int]:
    return mixture.rows(np.arange(len(mixture), dtype=np.int64), epoch).tolist()


def test_weights_of_one_are_the_rows_in_order() -> None:
    mixture = Mixture([0, 3, 10], [1, 1], seed=3)
    assert epoch_rows(mixture, 0) == epoch_rows(mixture, 7) == list(range(10))


@pytest.mark.parametrize(("weight", "per_epoch"), [(2.0, 20), (0.25, 3), (0.1, 1), (2.7, 27), (0.01, 1), (0.3, 3)])
def test_each_epoch_holds_the_weighted_number_of_rows(weight: float, per_epoch: int) -> None:
    """10 rows of a weighted source between 4 and 2 of weight 1; 0.25 x 10 rounds up to 3, 0.01 x 10 is at least 1."""
    mixture = Mixture([0, 4, 14, 16], [1, weight, 1], seed=0)
    assert len(mixture) == 6 + per_epoch
    seen: Counter[int] = Counter()
    for epoch in range(23):
        rows = epoch_rows(mixture, epoch)
        assert rows[:4] == [0, 1, 2, 3] and rows[-2:] == [14, 15]
        chosen = rows[4:-2]
        assert len(chosen) == per_epoch and all(4 <= row < 14 for row in chosen)
        seen.update(chosen)
        counts = [seen[row] for row in range(4, 14)]
        assert sum(counts) == (epoch + 1) * per_epoch
        assert max(counts) - min(counts) <= 1


def test_the_choice_changes_between_epochs_and_not_between_calls() -> None:
    """A25: three of ten rows, other ones in the next epoch; the same for the same seed, in any order of asking."""
    mixture, again, other = (Mixture([0, 100], [0.5], seed=seed) for seed in (5, 5, 6))
    first, second = epoch_rows(mixture, 0), epoch_rows(mixture, 1)
    assert sorted(first + second) == list(range(100))
    assert epoch_rows(mixture, 2) != first and epoch_rows(other, 0) != first
    assert epoch_rows(again, 0) == first
    assert again.rows(np.array([49, 0, 7]), 1).tolist() == [second[49], second[0], second[7]]


def test_a_run_passes_its_sources_as_their_weights_say(tmp_path: Path) -> None:
    """Documents of 3 tokens from three files, one empty: rows of every epoch, packed or not, counted by their letters."""
    for name, count in (("a", 4), ("b", 8), ("none", 0)):
        lines = [json.dumps({"text": name + chr(ord("A") + number)}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def run(weight: float, **data: Any) -> RunFile:
        train = [
            {"path": str(tmp_path / "a.jsonl"), "weight": weight},
            str(tmp_path / "b.jsonl"),
            {"path": str(tmp_path / "none.jsonl"), "weight": 3},
        ]
        training = {"num_train_epochs": 4, "global_batch_size": 3}
        return run_over(tmp_path, training=training, train=train, **data)

    def epochs(run_file: RunFile) -> tuple[Prepared, list[Counter[str]]]:
        """The documents of each of the four epochs, in which order they come."""
        found = ready(run_file)
        order = make_order(run_file, found)
        rows = np.concatenate([order.update_rows(update) for update in range(order.total_updates)])
        seen = []
        for epoch in range(4):
            part = rows[epoch * order.rows : (epoch + 1) * order.rows].tolist()
            text = bytes(token for row in part for token in found.table.row(row)[0].tolist() if token < 256).decode()
            seen.append(Counter(re.findall("..", text)))
        return found, seen

    expected = {f"b{chr(ord('A') + number)}": 1 for number in range(8)}
    found, seen = epochs(run(0.5, max_length=4))
    for first, second in (seen[:2], seen[2:]):
        assert len(first) == 10 and first.items() >= expected.items()
        assert first + second == Counter(dict.fromkeys(expected, 2) | {f"a{x}": 1 for x in "ABCD"})
    assert found.notices[-1] == (
        f"train: the weights of the sources make epochs of 10 rows: 2 of 4 of {tmp_path}/a.jsonl, "
        f"8 of 8 of {tmp_path}/b.jsonl, 0 of 0 of {tmp_path}/none.jsonl"
    )
    packed, seen = epochs(run(1.5, max_length=6, batching="pack"))
    assert packed.table.bounds == (0, 2, 6, 6)
    assert [sum(epoch.values()) for epoch in seen] == [14] * 4
    assert sum(seen, Counter()) == Counter(dict.fromkeys(expected, 4) | {f"a{x}": 6 for x in "ABCD"})
    again, _ = epochs(run(2.5, max_length=6, batching="pack"))
    assert again.cached and again.fingerprint != packed.fingerprint, "a resumed run must notice other weights"
    with pytest.raises(ConfigError, match=r"A weight in data.validation has no effect"):
        prepare(run(0.5, validation=[{"path": str(tmp_path / "b.jsonl"), "weight": 2}]), "validation")

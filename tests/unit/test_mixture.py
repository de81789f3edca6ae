"""Sources with weights: exact counts of every epoch, and every row equally often. Known fault A25 for the changing choice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardwright.data.mixture import Mixture


def epoch_rows(mixture: Mixture, epoch: int) -> list[int]:
    return mixture.rows(np.arange(len(mixture), dtype=np.int64), epoch).tolist()


def test_weights_of_one_are_the_rows_in_order() -> None:
    mixture = Mixture([0, 3, 10], [1, 1], seed=3)
    assert epoch_rows(mixture, 0) == epoch_rows(mixture, 7) == list(range(10))


@pytest.mark.parametrize(
    ("weight", "per_epoch"), [(2.0, 20), (0.25, 3), (0.1, 1), (2.7, 27), (0.01, 1), (0.3, 3)]
)
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

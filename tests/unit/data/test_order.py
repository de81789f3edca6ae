"""Known faults A10 A24 A25 A48 A49 A50: which rows an update holds, in every epoch and after a resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardwright.data.arrays import FILLER
from shardwright.data.order import RowOrder
from shardwright.data.permutation import permute
from shardwright.errors import ConfigError, DataError

M = 2**64 - 1
GOLDEN = ([8, 37, 26, 6, 13, 16, 31, 46], [48, 50, 3, 23, 57, 53, 54, 6])


def oracle(position: int, rows: int, seed: int, epoch: int) -> int:
    """The permutation as its docstring defines it, in Python integers, one position at a time."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
        return x ^ (x >> 31)

    half = 3
    while 4**half < rows:
        half += 1
    stream = mix((mix(seed) + epoch) & M)
    while True:
        left, right = divmod(position, 2**half)
        for number in range(1, 13):
            key = mix((stream + number * 0x9E3779B97F4A7C15) & M)
            left, right = right, left ^ (mix((right + key) & M) % 2**half)
        position = left * 2**half + right
        if position < rows:
            return position


def ids(order: RowOrder) -> list[int]:
    return [int(row) for update in range(order.total_updates) for row in order.update_rows(update)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 65, 257, 4096, 5000])
def test_each_epoch_holds_every_row_once(rows: int) -> None:
    """A24: the union over one epoch is every row once, for three epochs."""
    for epoch in range(3):
        assert sorted(permute(np.arange(rows), rows, 42, epoch).tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 1000, 10**6 + 3, 10**12])
def test_permutation_matches_its_definition(rows: int) -> None:
    positions = sorted({0, min(1, rows - 1), rows // 2, rows - 1})
    for seed, epoch in itertools.product((0, 42, 2**63 + 5), (0, 1, 1000)):
        found = permute(np.array(positions), rows, seed, epoch).tolist()
        assert found == [oracle(position, rows, seed, epoch) for position in positions]


def test_ids_of_a_seed_never_change() -> None:
    """Saved cursors name positions: these ids may not change with a version of numpy or of this program."""
    order = RowOrder(58, global_batch_size=8, seed=42, max_steps=9)
    assert order.update_rows(0).tolist() == GOLDEN[0]
    assert order.update_rows(7).tolist() == GOLDEN[1]


def test_all_permutations_of_four_rows_are_equally_likely() -> None:
    """Chi-squared over the 24 permutations, 23 degrees of freedom: 49.7 is its 0.1 % point. Fixed seeds."""
    counts: dict[tuple[int, ...], int] = {}
    for seed, epoch in itertools.product(range(40), range(3)):
        found = tuple(permute(np.arange(4), 4, seed, epoch).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert sum((count - 5) ** 2 / 5 for count in counts.values()) < 49.7


def test_neighbours_do_not_stay_neighbours() -> None:
    """Of n - 1 neighbouring positions about 2 hold neighbouring rows in a random permutation."""
    found = permute(np.arange(10_000), 10_000, 1, 0)
    assert np.sum(np.abs(np.diff(found)) == 1) <= 9
    displacement = np.abs(found - np.arange(10_000)).mean()  # n / 3 for a random one, s.d. about 24
    assert abs(displacement - 10_000 / 3) < 120


def test_epochs_and_seeds_differ_and_repeat() -> None:
    """A25: another composition each epoch, the same one for the same (seed, epoch)."""
    make = lambda seed: ids(RowOrder(20, global_batch_size=5, seed=seed, num_train_epochs=3))  # noqa: E731
    first = make(7)
    epochs = [first[0:20], first[20:40], first[40:60]]
    batches = [{frozenset(epoch[i : i + 5]) for i in range(0, 20, 5)} for epoch in epochs]
    assert batches[0] != batches[1] != batches[2] != batches[0]
    assert make(7) == first
    assert make(8) != first


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7, 10, 12, 14])
def test_resume_gives_the_ids_of_an_uninterrupted_run(stop: int) -> None:
    """A48 A49: 10 rows, 2 an update; stops in epochs 0, 1 and 2 and at their boundaries."""
    make = lambda: RowOrder(10, global_batch_size=2, seed=3, max_steps=15)  # noqa: E731
    whole = ids(make())
    resumed = make()
    assert [int(i) for u in range(stop, 15) for i in resumed.update_rows(u)] == whole[2 * stop :]


def test_epochs_after_a_resume_are_whole() -> None:
    """A50: after a resume within epoch 0, epochs 1 and 2 hold every row; an update may cross the boundary."""
    order = RowOrder(10, global_batch_size=4, seed=3, num_train_epochs=3)
    assert order.total_updates == 8  # 30 positions, 4 an update
    rest = [int(i) for u in range(2, 8) for i in order.update_rows(u)]
    whole = ids(order)
    assert rest == whole[8:]
    assert sorted(rest[2:12]) == sorted(rest[12:22]) == list(range(10))
    assert rest[22:] == [FILLER] * 2


def test_last_update_is_kept_and_part_filled() -> None:
    """A10: 5 rows, 2 an update, one epoch: 3 updates, and the third holds one row and one filler."""
    order = RowOrder(5, global_batch_size=2, seed=0, num_train_epochs=1)
    assert order.total_updates == 3
    found = ids(order)
    assert sorted(found[:5]) == [0, 1, 2, 3, 4]
    assert found[5:] == [FILLER]
    assert [order.epoch(update) for update in range(4)] == [0.0, 0.4, 0.8, 1.0]


def test_a_run_of_steps_has_no_filler() -> None:
    order = RowOrder(5, global_batch_size=4, seed=0, max_steps=10)
    assert len(ids(order)) == 40
    assert all(ids(order).count(row) == 8 for row in range(5))


def test_an_update_may_hold_several_epochs() -> None:
    order = RowOrder(3, global_batch_size=10, seed=0, max_steps=1)
    found = ids(order)
    assert all(sorted(found[i : i + 3]) == [0, 1, 2] for i in (0, 3, 6))


@pytest.mark.parametrize(("epochs", "positions"), [(1.0, 100), (0.5, 50), (0.07, 7), (0.255, 26), (2.3, 230)])
def test_fractions_of_epochs_are_decimals(epochs: float, positions: int) -> None:
    """100 x 0.07 is 7 rows; in binary it is a little more, and would be rounded up to 8."""
    order = RowOrder(100, global_batch_size=1, seed=0, num_train_epochs=epochs)
    assert order.total_updates == positions


def test_without_shuffle_the_order_is_that_of_the_files() -> None:
    order = RowOrder(5, global_batch_size=4, seed=9, shuffle=False, num_train_epochs=2)
    assert ids(order) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, FILLER, FILLER]


def test_far_updates_of_huge_data_cost_nothing() -> None:
    order = RowOrder(10**12, global_batch_size=512, seed=0, max_steps=10**10)
    found = order.update_rows(10**10 - 1)
    assert found.min() >= 0 and found.max() < 10**12 and len(set(found.tolist())) == 512


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither is given"):
        RowOrder(5, global_batch_size=2)
    with pytest.raises(ConfigError, match="both are given"):
        RowOrder(5, global_batch_size=2, max_steps=1, num_train_epochs=1)
    with pytest.raises(DataError, match="no rows"):
        RowOrder(0, global_batch_size=2, max_steps=1)
    order = RowOrder(5, global_batch_size=2, max_steps=3)
    for number in (-1, 3):
        with pytest.raises(IndexError, match=f"update {number} of a run of 3"):
            order.update_rows(number)

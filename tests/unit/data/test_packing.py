"""Known faults A17 A18 A22 A25: which documents share a row, against ten lines of best fit and against the documents."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tables import documents, numbered, table

from shardwright.config import load_run_file
from shardwright.data.documents import Documents
from shardwright.data.packing import RowRules, best_fit, fill, make_rows, wrapped
from shardwright.data.table import Table, _write_rows
from shardwright.errors import ConfigError
from shardwright.layout.legality import check_run


def naive(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing as its name says it: the lengths in each row."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def lengths_of(seed: int) -> tuple[list[int], int]:
    """Lengths and a capacity: uniform, log-normal, few values, long ones, tiny ones by turns."""
    rng = np.random.default_rng(seed)
    capacity, count = int(rng.integers(2, 80)), int(rng.integers(1, 120))
    kind = seed % 5
    if kind == 0:
        found = rng.integers(1, capacity + 1, count)
    elif kind == 1:
        found = np.clip(np.exp(rng.normal(1.5, 1.0, count)).astype(np.int64), 1, capacity)
    elif kind == 2:
        found = rng.choice(rng.integers(1, capacity + 1, 3), count)
    elif kind == 3:
        found = rng.integers(max(1, capacity // 2), capacity + 1, count)
    else:
        found = rng.integers(1, max(2, capacity // 4), count)
    return found.tolist(), capacity


def pieces_of(lengths: list[int]) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.stack([ends - lengths, lengths], axis=1)


def grouped(pieces: np.ndarray, ends: np.ndarray) -> list[list[tuple[int, int]]]:
    bounds = [0, *ends.tolist()]
    return [[tuple(p) for p in pieces[a:b].tolist()] for a, b in itertools.pairwise(bounds)]  # type: ignore[misc]


@pytest.mark.parametrize("seeds", [range(100), range(100, 200), range(200, 300)], ids=str)
def test_rows_are_filled_as_by_naive_best_fit(seeds: range) -> None:
    """The same number of rows with the same fill, every document once and whole, none over the capacity."""
    for seed in seeds:
        lengths, capacity = lengths_of(seed)
        given = pieces_of(lengths)
        packed = grouped(*best_fit(given, capacity))
        assert sorted(piece for row in packed for piece in row) == [tuple(p) for p in given.tolist()]
        fills = sorted(sum(length for _, length in row) for row in packed)
        assert fills == sorted(map(sum, naive(lengths, capacity))), seed
        assert fills[-1] <= capacity


def test_every_fit_is_the_tightest() -> None:
    """A trace: 6 6 4 3 3 2 into rows of 10: 6+4, 6+3, then 3 opens a row although 2 would fit nowhere tighter."""
    packed = grouped(*best_fit(pieces_of([3, 6, 2, 6, 4, 3]), 10))
    assert sorted(sorted(length for _, length in row) for row in packed) == [[2, 3], [3, 6], [4, 6]]


def test_steps_depend_on_lengths_not_on_pieces() -> None:
    counts = [0] * 65
    for length, count in ((40, 10**9), (24, 10**9), (7, 10**12)):
        counts[length] = count
    steps = fill(counts, 64)
    assert len(steps) <= 6
    assert sum(rows * each for _, rows, each in steps) == 2 * 10**9 + 10**12


def test_log_normal_documents_fill_rows() -> None:
    """20,000 lengths of mean about 645, at most 4,096: the rows are at least 99.6% full."""
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(645) - 0.5, 1.0, 20_000)).astype(np.int64), 1, 4096)
    _, ends = best_fit(pieces_of(lengths.tolist()), 4096)
    assert lengths.sum() / (len(ends) * 4096) > 0.996


def test_documents_within_a_row_and_rows_keep_the_given_order() -> None:
    """Without a seed rows follow the files: a row stands where its first document does."""
    for seed in range(30):
        lengths, capacity = lengths_of(seed)
        packed = grouped(*best_fit(pieces_of(lengths), capacity))
        assert all(row == sorted(row) for row in packed)
        assert [row[0] for row in packed] == sorted(row[0] for row in packed)


def test_a_seed_chooses_among_equal_documents() -> None:
    """A25: the plan is one for all epochs; which documents meet depends on lengths and seed, on nothing else."""
    data = numbered([5, 5, 5, 5, 5, 5, 3, 3, 3, 3, 3, 3] * 4)
    plans = [table(data, RowRules(8, "split", "bfd", seed)) for seed in (1, 1, 2)]
    rows = [[found.pieces(row).tolist() for row in range(len(found))] for found in plans]
    assert rows[0] == rows[1] != rows[2]
    assert all(len(found) == 24 and found.counts["row_tokens"] == 24 * 8 for found in plans)


@pytest.mark.parametrize("seed", range(40))
def test_wrapped_rows_are_the_documents_one_after_the_other(seed: int) -> None:
    """Rows joined are the documents joined, all but the last row are full, and a piece lies in one document."""
    lengths, capacity = lengths_of(seed)
    given = np.random.default_rng(seed).permutation(pieces_of(lengths))
    rows = grouped(*wrapped(given, capacity))
    assert [sum(n for _, n in row) for row in rows[:-1]] == [capacity] * (len(rows) - 1)
    assert 0 < sum(n for _, n in rows[-1]) <= capacity
    tokens = [t for row in rows for start, n in row for t in range(start, start + n)]
    assert tokens == [t for start, n in given.tolist() for t in range(start, start + n)]
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert all(len(set(document[start : start + n])) == 1 for row in rows for start, n in row)


def test_a_long_and_six_shorter_documents_in_rows_of_ten() -> None:
    """A22: (9, 8, 2, 2, 2, 1, 1) in rows of 10; single tokens have no target and are left out, said and counted."""
    found = table(numbered([9, 8, 2, 2, 2, 1, 1]), RowRules(10, "split", "bfd"))
    rows = sorted(sorted(n for _, n in found.pieces(row)) for row in range(len(found)))
    assert rows == [[2, 2], [2, 8], [9]]
    assert found.counts["targetless_rows"] == 2
    assert found.counts["targets"] == 8 + 7 + 3 and found.counts["pieces"] == 5


@pytest.mark.parametrize("overlong", ["split", "truncate"])
@pytest.mark.parametrize("strategy", [None, "bfd", "wrapped"])
def test_tokens_targets_and_weights_of_rows_are_counted_without_reading_them(overlong: Any, strategy: Any) -> None:
    """A17 A120: what the table says of each row is what its contents hold, with random masks and weights."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 30, 40).tolist()
        values = [0.0, 1.0] if seed % 2 else [0.0, 1.0, 0.25]
        weights = [rng.choice(values, n).tolist() for n in lengths]
        data = numbered(lengths)
        found = table(data, RowRules(12, overlong, strategy, seed), weights)
        weight_of = {t: w for own, ws in zip(data, weights) for t, w in zip(own, ws)}
        every = np.arange(len(found))
        counted = list(zip(found.real_tokens(every), found.target_tokens(every), found.target_weights(every)))
        trained: list[int] = []
        for row in range(len(found)):
            tokens, labels = found.row(row)
            inside = [int(label) for label in labels if label != -100]
            sums = sum(weight_of[label] for label in inside)
            assert counted[row] == (len(tokens), len(inside), pytest.approx(sums, abs=0)), (seed, row)
            assert inside and len(tokens) <= 12
            assert all(int(tokens[t + 1]) == label for t, label in enumerate(labels) if label != -100)
            # no label crosses a document: documents are numbered in the thousands
            assert all(label // 1000 == token // 1000 for token, label in zip(tokens, labels) if label != -100)
            trained += inside
        assert len(trained) == len(set(trained)) == found.counts["targets"]
        if overlong == "split" and strategy != "wrapped":  # all but the first token of each piece
            assert set(trained) == {t for t, w in weight_of.items() if w and t % 1000 % 12}
        assert found.weighted == (len(values) == 3)


def test_each_document_is_seen_exactly_once() -> None:
    """A22: packing repeats and shortens nothing, and leaves out only tokens without a target."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(2, 40, 60).tolist()
        for strategy in ("bfd", "wrapped"):
            found = table(numbered(lengths), RowRules(16, "split", strategy, seed))
            tokens = [int(t) for row in range(len(found)) for t in found.row(row)[0]]
            assert len(tokens) == len(set(tokens))
            missing = {t for document in numbered(lengths) for t in document} - set(tokens)
            rests = {1000 * n + size - 1 for n, size in enumerate(lengths) if size % 16 == 1}
            if strategy == "bfd":  # a rest of one token has no target
                assert missing == rests and found.counts["targetless_rows"] == len(rests)
            else:  # nor has the last row when it holds one token
                assert len(missing) == found.counts["targetless_rows"] == (sum(lengths) % 16 == 1)


@pytest.mark.parametrize("strategy", [None, "bfd", "wrapped"])
def test_documents_of_several_sources_share_no_row(strategy: Any) -> None:
    """So that the row order can realise the weights of sources: rows of a source are those of its documents alone."""
    lengths = np.random.default_rng(3).integers(1, 20, 50).tolist()
    weights = [np.random.default_rng(n).choice([0.0, 0.5, 1.0], n).tolist() for n in lengths]
    bounds = (0, 13, 13, 40, 50)
    found = table(numbered(lengths), RowRules(12, "split", strategy, 2, bounds), weights)
    assert len(found.bounds) == 5 and found.bounds[-1] == len(found)
    for number, (a, b) in enumerate(itertools.pairwise(bounds)):
        alone = table(numbered(lengths)[a:b], RowRules(12, "split", strategy, 2), weights[a:b]) if b > a else []
        first, last = found.bounds[number : number + 2]
        assert last - first == len(alone)
        for row in range(first, last):
            tokens, labels = found.row(row)
            own, own_labels = alone.row(row - first)  # type: ignore[union-attr]
            assert tokens.tolist() == own.tolist()
            assert labels.tolist() == own_labels.tolist()
    every = np.arange(len(found))
    assert found.target_tokens(every).sum() == found.counts["targets"]
    assert len({RowRules(12, "split", strategy, 2, b).name for b in (bounds, (0, 12, 50), None)}) == 3


def test_the_plan_is_written_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start opens files; another seed, strategy, length or weight is another fingerprint."""
    plain = documents(numbered([5, 4, 3, 6, 2, 7] * 10))
    weighted = documents(numbered([5, 4, 3, 6, 2, 7] * 10), [[1.0] * n for n in [5, 4, 3, 6, 2, 7] * 10])

    def opened(rules: RowRules, source: Documents = plain, name: str = "a") -> Table:
        return Table.make(Documents(tmp_path / name, *list(vars(source).values())[1:]), rules)

    every_rules = [
        RowRules(8, "split"),
        *(RowRules(8, "split", "bfd", seed) for seed in (1, 2)),
        RowRules(8, "split", "wrapped", 1),
    ]
    first = [opened(rules) for rules in (*every_rules, RowRules(7, "split", "bfd", 1))]
    assert len({found.fingerprint for found in first}) == 5
    assert opened(every_rules[1], weighted, "b").fingerprint != first[1].fingerprint
    monkeypatch.setattr("shardwright.data.table._write_rows", None)
    again = opened(every_rules[1])
    assert again.fingerprint == first[1].fingerprint and again.counts == first[1].counts
    assert isinstance(again._pieces.base, np.memmap) and isinstance(again._rows.base, np.memmap)
    assert again.block([0, -1, 3], 8, 9).input_ids.tolist() == first[1].block([0, -1, 3], 8, 9).input_ids.tolist()
    assert _write_rows is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data.packing_strategy": "wrapped"}, "data.batching is pad"),
        ({"data.bucket_updates": 4}, "data.batching is pad"),
        ({"data.batching": "pack", "data.bucket_updates": 4}, "data.batching is pack"),
        ({"data.batching": "bucket", "data.packing_strategy": "wrapped"}, "data.batching is bucket"),
        ({"data.drop_last": True}, "every update of a run of max_steps is full"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(load_run_file("examples/tiny.yaml", options), 1)


def test_empty_rows_of_no_documents() -> None:
    """Documents without a target leave no rows, and say so."""
    for strategy in (None, "bfd", "wrapped"):
        found = make_rows(np.array([1, 2, 3]), RowRules(8, "split", strategy))  # type: ignore[arg-type]
        assert found.counts["rows"] == 0 and found.counts["targetless_rows"] == 3
        assert found.pieces.shape == (0, 2) and found.rows.shape == (0, 3)

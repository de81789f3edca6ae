"""Tokenised records: what masks, labels, positions and lengths beside input_ids make of them, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokens import ready, shown

from shardwright.errors import DataError

IDS = [10, 11, 12, 13, 14, 15]
LAST = [0, 0, 0, 1, 1, 1]
WHOLE = "[+ 10 11 12 13 14 15+]"
TAIL = " 10 11 12[+ 13 14 15+]"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [WHOLE]),
        ({"completion_mask": LAST}, [TAIL]),
        ({"assistant_masks": [bool(value) for value in LAST]}, [TAIL]),
        ({"loss_mask": [float(value) for value in LAST]}, [TAIL]),
        ({"loss_mask": LAST, "labels": [10, 11, 12, 13, -100, 15]}, [" 10 11 12[+ 13+] 14[+ 15+]"]),
        ({"loss_mask": LAST, "completion_mask": [1, 1, 1, 1, 1, 0]}, [" 10 11 12[+ 13 14+] 15"]),
        ({"loss_mask": LAST, "attention_mask": [1, 1, 1, 1, 1, 0]}, [" 10 11 12[+ 13 14+]"]),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, ["[+ 10 11 12+]", "[+ 13 14 15+]"]),
        ({"seq_lengths": [2, 4]}, ["[+ 10 11+]", "[+ 12 13 14 15+]"]),
        ({"seq_lengths": [2, 4], "position_ids": [0, 1, 0, 1, 2, 3]}, ["[+ 10 11+]", "[+ 12 13 14 15+]"]),
        ({"seq_lengths": [3, 3], "loss_mask": [0, 0, 1, 0, 0, 1]}, [" 10 11[+ 12+]", " 13 14[+ 15+]"]),
        ({"position_ids": [1, 1, 0, 1, 0, 1], "attention_mask": [0, 0, 1, 1, 1, 1]}, ["[+ 12 13+]", "[+ 14 15+]"]),
        ({"position_ids": [0, 1, 2, 3, 4, 5]}, [WHOLE]),
    ],
)
def test_columns_beside_input_ids_act(more: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    found = ready(tmp_path, [{"input_ids": IDS, **more}])
    assert shown(found) == expected
    divided = [line for line in found.notices if "divides 1 of 1 records" in line]
    assert len(divided) == (len(more.keys() & {"position_ids", "seq_lengths"}) if len(expected) > 1 else 0)
    assert not [line for line in found.notices if "nothing reads" in line]


def test_targets_of_packed_rows_do_not_cross_documents(tmp_path: Path) -> None:
    """Two documents of three tokens have two targets each, alone and in one row."""
    for batching in ("pad", "pack"):
        found = ready(tmp_path, [{"input_ids": IDS, "seq_lengths": [3, 3]}], batching=batching)
        assert found.counts["targets"] == 4 and found.counts["rows"] == (2 if batching == "pad" else 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_mask": [0, 0, 0, 2, 1, 1]}, r"`loss_mask\[3\]` is 2\. A mask holds 0 and 1"),
        ({"attention_mask": [1, 1, 1, 2, 2, 2]}, r"`attention_mask\[3\]` is 2.*`seq_lengths`"),
        ({"completion_mask": [1]}, "`completion_mask` has 1 values for 6"),
        ({"completion_mask": ["1"] * 6}, r"`completion_mask\[0\]` is a string"),
        ({"position_ids": [0, 1, 2, 7, 8, 9]}, r"`position_ids\[3\]` is 7 after 2"),
        ({"position_ids": [1, 2, 3, 4, 5, 6]}, "`position_ids` begins with 1"),
        ({"seq_lengths": [3, 2]}, "`seq_lengths` adds up to 5 for 6"),
        ({"seq_lengths": [6, 0]}, "at least 1"),
        ({"seq_lengths": [3, 3], "position_ids": [0, 1, 0, 1, 2, 3]}, "different positions"),
    ],
)
def test_columns_that_contradict_are_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"jsonl:2: .*{message}"):
        ready(tmp_path, [{"input_ids": IDS}, {"input_ids": IDS, **more}])


def test_columns_that_nothing_reads_are_named_once_per_file(tmp_path: Path) -> None:
    """With the number of records that have them; empty values do not count; files with the same columns share a line."""
    records = [{"input_ids": IDS, "special_tokens_mask": [0] * 6, "images": []}, {"input_ids": IDS, "id": 7}]
    [line] = ready(tmp_path, records).notices
    assert line.endswith(
        "data-0.jsonl: nothing reads the columns `id` (in 1 of 2 records), `special_tokens_mask` (in 1 of 2 records)"
    )
    (tmp_path / "more").mkdir()
    for name in ("a", "b"):
        ready(tmp_path, [{"input_ids": IDS, "url": "x"}])
        (tmp_path / "data-1.jsonl").rename(tmp_path / "more" / f"{name}.jsonl")
    [line] = ready(tmp_path, [str(tmp_path / "more")]).notices
    assert line.endswith("a.jsonl and 1 other files: nothing reads the columns `url` (in 2 of 2 records)")


def test_columns_of_tables_that_nothing_reads_are_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"input_ids": [IDS] * 3, "length": [6] * 3}), tmp_path / "a.parquet")
    [line] = ready(tmp_path, [str(tmp_path / "a.parquet")]).notices
    assert line.endswith("a.parquet: nothing reads the columns `length` (in 3 of 3 records)")

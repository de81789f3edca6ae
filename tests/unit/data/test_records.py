"""What is read from JSONL, text and parquet, and the errors that name file and line. No known-fault row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.config.schema import Data, Source
from shardwright.data import records as records_module
from shardwright.data.files import find_files, sources_of
from shardwright.data.formats import sample_of
from shardwright.data.records import columns, records, slices
from shardwright.errors import DataError


def read(path: Path, column: str = "text") -> list[tuple[str, int]]:
    """Every document of a file of text with its line."""
    data = Data(train=[str(path)], text_column=column)
    found = (pair for part in slices(0, str(path)) for pair in records(part, column))
    return [(sample_of(record, "text", data, f"{path}:{line}"), line) for line, record in found]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_jsonl_gives_a_document_per_object_and_passes_blank_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '\ufeff{"text": "one"}\r\n\n{"n": 3, "text": "tw\\no"}\n  \n{"text": ""}')
    assert read(path) == [("one", 1), ("tw\no", 3), ("", 5)]


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a\u2028b\x85c"}\n{"text": "d"}\n')
    assert read(path) == [("a\u2028b\x85c", 1), ("d", 2)]


def test_text_gives_a_document_per_line(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.txt", "one\r\n\n three \nfour")) == [
        ("one", 1),
        ("", 2),
        (" three ", 3),
        ("four", 4),
    ]


def test_parquet_gives_a_document_per_row(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": [1, 2, 3], "body": ["x", "", "z"]}), tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet", "body") == [("x", 1), ("", 2), ("z", 3)]
    with pytest.raises(DataError, match=r"there is no column `boddy`.*Did you mean `body`"):
        read(tmp_path / "a.parquet", "boddy")
    with pytest.raises(DataError, match=r"a\.parquet:1: `id` is a number, not a string"):
        read(tmp_path / "a.parquet", "id")
    with pytest.raises(DataError, match="is not a parquet file"):
        read(written(tmp_path / "b.parquet", "no"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "the line is not JSON. Expecting ',' delimiter, column 13"),
        ('{"text": 3}', "`text` is a number, not a string"),
        ('{"text": null}', "`text` is null, not a string"),
        ('{"text": ["a"]}', "`text` is a list, not a string"),
        ('{"text": {"a": 1}}', "`text` is an object, not a string"),
        (
            '{"txet": "x", "id": 3}',
            "there is no column `text`. data.text_column names this column. Did you mean `txet`",
        ),
        (
            '{"prompt": "x", "id": 3}',
            "there is no column `text`. data.text_column names this column. Columns here: prompt, id",
        ),
        ("{}", "there is no column `text`. data.text_column names this column. The record has no columns"),
        ('["x"]', "the line is a list, not an object"),
        ('[{"text": "x"},', "A JSON array is not JSON Lines"),
        ('{"text": "a\\ud800"}', "`text` holds half a surrogate pair at character 2"),
        (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = written(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + raw + b"\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def test_files_come_in_the_order_of_the_patterns_and_sorted_within_one(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "z.txt", "notes.md"):
        written(tmp_path / name, json.dumps({"text": "x"}))
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub" / "c.jsonl", "")

    def names(patterns: list[str]) -> list[str]:
        return [
            Path(file.path).name
            for file in find_files(sources_of([str(tmp_path / name) for name in patterns]), "data.train")
        ]

    assert names(["z.txt", "*.jsonl"]) == ["z.txt", "a.jsonl", "b.jsonl"]
    assert names(["."]) == ["a.jsonl", "b.jsonl", "z.txt"]
    assert names(["**/*.jsonl"]) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_patterns_that_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", "")
    written(tmp_path / "notes.md", "")
    (tmp_path / "empty").mkdir()
    for pattern, message in (
        ("b.jsonl", "names no file"),
        ("b*.jsonl", "names no file"),
        ("empty", "is a directory without data files"),
        ("notes.md", "is not a supported data file"),
    ):
        with pytest.raises(DataError, match=message):
            find_files(sources_of([str(tmp_path / pattern)]), "data.train")
    with pytest.raises(DataError, match=r"a\.jsonl is named by .*a\.jsonl` and by .*\*\.jsonl`.*count twice"):
        find_files(sources_of([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")]), "data.train")


def test_slices_join_to_the_file_and_count_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 40 bytes and the rest of the line: the records and lines of one slice."""
    lines = [json.dumps({"text": "x" * (number % 37)}) for number in range(100)]
    path = written(tmp_path / "a.jsonl", "\n".join([*lines[:50], "", *lines[50:]]))
    whole = read(path)
    monkeypatch.setattr(records_module, "_SLICE_BYTES", 40)
    assert len(list(slices(0, str(path)))) > 20
    assert read(path) == whole == [("x" * (n % 37), n + 1 + (n >= 50)) for n in range(100)]


def test_a_saved_data_set_is_read_without_nulls_inside_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": True}]},
        {"messages": [{"role": "user", "content": str(number)} for number in range(3)]},
    ]
    whole = datasets.Dataset.from_list([row | {"text": None} for row in rows])
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "set")
    whole.select([1, 0]).save_to_disk(tmp_path / "one", num_shards=2)

    def found(source: str | Source) -> list[tuple[int, object]]:
        files = find_files(sources_of([source]), "data.train")
        parts = (part for file in files for part in slices(0, file.path))
        return [(line, record["messages"]) for part in parts for line, record in records(part)]

    messages = [row["messages"] for row in rows]
    assert found(str(tmp_path / "set")) == [(1, messages[0]), (2, messages[1])]
    assert found(Source(path=str(tmp_path / "set"), split="test")) == [(1, messages[1])]
    assert found(str(tmp_path / "one")) == [(1, messages[1]), (1, messages[0])]
    assert columns(str(next((tmp_path / "one").glob("*.arrow")))) == ["messages", "text"]
    with pytest.raises(DataError, match=r"has no split `dev`\. Its splits are: train, test"):
        found(Source(path=str(tmp_path / "set"), split="dev"))
    with pytest.raises(DataError, match="`split: dev` has no effect"):
        found(Source(path=str(tmp_path / "one"), split="dev"))

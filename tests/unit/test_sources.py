"""What is read from JSONL, text and parquet, and the errors that name file and line. No known-fault row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.data.sources import documents, find_files
from shardwright.errors import DataError


def read(path: Path, column: str = "text") -> list[tuple[str, int]]:
    return [(found["text"], found["line"]) for found in documents([(0, str(path))], column)]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_jsonl_gives_a_document_per_object_and_passes_blank_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", '\ufeff{"text": "one"}\r\n\n{"n": 3, "text": "tw\\no"}\n  \n{"text": ""}'
    )
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
    pq.write_table(
        pa.table({"id": [1, 2, 3], "body": ["x", "", "z"]}), tmp_path / "a.parquet", row_group_size=2
    )
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
            "there is no column `text`. data.text_column names it. Did you mean `txet`",
        ),
        (
            '{"prompt": "x", "id": 3}',
            "there is no column `text`. data.text_column names it. Columns here: prompt, id",
        ),
        ("{}", "there is no column `text`. data.text_column names it. It has no columns"),
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
        return [path.name for path in find_files([str(tmp_path / name) for name in patterns], "data.train")]

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
        ("notes.md", "is of no known kind"),
    ):
        with pytest.raises(DataError, match=message):
            find_files([str(tmp_path / pattern)], "data.train")
    with pytest.raises(DataError, match=r"a\.jsonl is named by .*a\.jsonl` and by .*\*\.jsonl`.*count twice"):
        find_files([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")], "data.train")

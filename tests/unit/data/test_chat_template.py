"""Which tokens of chats and completions are trained. Known fault A08; spans counted by hand, and an independent oracle.

Tokens are bytes, so that a span of characters can be written down as the bytes of the text that must be trained.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data_runs import EOS, run_over, written
from tests.data_runs import ready as prepared
from tests.places import EXAMPLES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shardwright.config import load_run_file
from shardwright.data.encode import token_weights, with_whole_offsets
from shardwright.data.prepare import Prepared, prepare
from shardwright.data.tokenizer import load_tokenizer
from shardwright.errors import ConfigError, DataError

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>"
    "{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[Q]{{ m.content }}[/Q]{% endif %}{% endfor %}"
)


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def ready(directory: Path, records: list[dict[str, Any]], template: str | None = PLAIN, **data: Any) -> Prepared:
    """`records` prepared with `template` in the tokenizer's directory (None: none)."""
    tokenizer = directory / "tokenizer"
    if not tokenizer.is_dir():
        tokenizer.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EXAMPLES / "tiny" / name, tokenizer)
    (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (tokenizer / "chat_template.jinja").write_text(template)
    written(directory / "data.jsonl", *records)
    model = {"tokenizer_name_or_path": str(tokenizer)}
    return prepared(run_over(directory, model=model, **{"max_length": 512} | data))


def documents(found: Prepared) -> list[tuple[bytes, list[tuple[bytes, float]]]]:
    """(all bytes, runs of equal weight as (bytes, weight) without those of weight 0) of each document; `$` is the end."""
    stored, result, start = found.table.documents, [], 0
    for end in stored.ends[:, 0].tolist():
        ids = stored.tokens[start:end].tolist()
        weights = [1.0] * len(ids) if stored.weights is None else stored.weights[start:end].tolist()
        runs: list[tuple[bytes, float]] = []
        for before, token, weight in zip([0.0, *weights], ids, weights):
            shown = b"$" if token == EOS else bytes([token])
            if weight and weight == before:
                runs[-1] = (runs[-1][0] + shown, weight)
            elif weight:
                runs.append((shown, weight))
        result.append((b"".join(b"$" if token == EOS else bytes([token]) for token in ids), runs))
        start = end
    return result


TALK = [user("hi"), assistant("yes"), user("so"), assistant("no")]
TALK_BYTES = b"<user>hi</>\n<assistant>yes</>\n<user>so</>\n<assistant>no</>\n"


def test_only_what_the_assistant_writes_is_trained(tmp_path: Path) -> None:
    """A08: with marks, the marked; without, what follows the generation prompt; the tokens are those of the whole text."""
    marked = ready(tmp_path, [{"messages": TALK}], MARKED)
    assert documents(marked) == [(TALK_BYTES, [(b"yes</>", 1.0), (b"no</>", 1.0)])]
    found = ready(tmp_path, [{"messages": TALK}], PLAIN)
    assert documents(found) == [(TALK_BYTES, [(b"yes</>\n", 1.0), (b"no</>\n", 1.0)])]
    assert found.summary().startswith("train: 1 documents of messages, 59 tokens -> 1 rows")
    assert found.table.documents.path != marked.table.documents.path, "another template is another cache entry"
    whole = ready(tmp_path, [{"messages": TALK}], PLAIN, assistant_only_loss=False)
    assert documents(whole) == [(TALK_BYTES, [(TALK_BYTES, 1.0)])]
    assert whole.table.documents.weights is None


def test_a_target_of_token_zero_is_trained_and_masked_ones_are_not_zero(tmp_path: Path) -> None:
    """A08: the token 0 inside an answer is a target like any other; the prompt's tokens are none."""
    found = ready(tmp_path, [{"input_ids": [5, 6, 7, 0, 9, 0], "labels": [-100, -100, -100, 0, 9, 0]}])
    assert found.table.documents.weights is not None
    assert found.table.documents.weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.table.documents.tokens.tolist() == [5, 6, 7, 0, 9, 0]


def test_a_turn_ends_with_its_special_token(tmp_path: Path) -> None:
    """Generation stops at the end token: the newline that the template writes after it is not the model's."""
    template = PLAIN.replace("</>", "<eos>")
    assert documents(ready(tmp_path, [{"messages": TALK[:2]}], template)) == [
        (b"<user>hi$\n<assistant>yes$\n", [(b"yes$", 1.0)])
    ]


def test_a_template_without_generation_prompt_is_exact_when_its_answer_has_no_header(tmp_path: Path) -> None:
    found = ready(tmp_path, [{"messages": TALK}], BRACKETS)
    assert documents(found) == [(b"[Q]hi[/Q] yes$[Q]so[/Q] no$", [(b" yes$", 1.0), (b" no$", 1.0)])]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:1] }}</>{% endfor %}"
            + PROMPT,
            r"data\.jsonl:2: message 1 \(assistant\) is rendered differently when messages follow it",
        ),
        (PLAIN.removesuffix(PROMPT), r"jsonl:1: message 1 .* has a header"),
        (PLAIN.replace("%}<assistant>{%", "%}<model>{%"), "jsonl:1: message 1 .* does not continue the messages"),
        ("{{ raise_exception('no users here') }}", r"jsonl:1: .* cannot render the messages \(user, assistant\)"),
        (MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% generation %}"), None),
    ],
)  # fmt: skip
def test_templates_whose_spans_cannot_be_found_are_refused(template: str, message: str | None, tmp_path: Path) -> None:
    """The first one shortens earlier answers; a template is named, and the line. Two marks an answer are as good as one."""
    records = [{"messages": [user("a"), assistant("b")]}, {"messages": TALK}]
    if message is None:
        assert documents(ready(tmp_path, records, template))[1][1] == [(b"yes</>", 1.0), (b"no</>", 1.0)]
        records[0]["messages"].append(assistant("c", loss_weight=2))
        message = "jsonl:1: the tokenizer's chat template marks 4 spans for 2 assistant messages"
    with pytest.raises(DataError, match=message):
        ready(tmp_path, records, template)


def test_a_token_across_the_boundary_of_a_message_is_refused(tmp_path: Path) -> None:
    """A tokenizer that joins `:` with the letter after it: the prompt alone would have other tokens."""
    merged = Tokenizer(
        models.BPE(vocab={chr(n): n for n in range(33, 127)} | {"Ċ": 0, "Ġ": 1, ":y": 2}, merges=[(":", "y")])
    )
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (tmp_path / "tokenizer").mkdir()
    merged.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}" + PROMPT.replace(
        "<assistant>", "assistant:"
    )
    with pytest.raises(DataError, match=r"jsonl:1: a token holds characters on both sides.*assistant:yes"):
        ready(tmp_path, [{"messages": TALK}], template)
    fine = ready(tmp_path, [{"messages": [user("hi"), assistant("no")]}], template)
    assert fine.counts["targets"] > 0 and fine.counts["crossing_tokens"] == 0
    joined = ready(tmp_path, [{"prompt": "q:", "completion": "yes"}], template)
    assert joined.table.documents.weights is None, "the first token is no target, and the one across is trained"
    joined = ready(tmp_path, [{"prompt": "aq:", "completion": "yes"}], template)
    assert joined.table.documents.weights is not None
    assert joined.table.documents.weights.tolist() == [0, 0, 1, 1, 1]
    assert joined.notices[-1].startswith("train: in 1 of 1 documents a token holds characters of the prompt and of the")


def test_train_and_loss_weight_of_messages(tmp_path: Path) -> None:
    """Masks a turn, weighs another, trains a user's; without assistant_only_loss the rest of the text counts 1."""
    talk = [user("hi"), assistant("yes", train=False), user("so", train=True), assistant("no", loss_weight=0.25)]
    for template in (PLAIN, MARKED):
        [(text, runs)] = documents(ready(tmp_path, [{"messages": talk}], template))
        assert text == TALK_BYTES
        assert [(run.removesuffix(b"\n"), weight) for run, weight in runs] == [(b"<user>so</>", 1.0), (b"no</>", 0.25)]
    found = ready(tmp_path, [{"messages": talk}], MARKED, assistant_only_loss=False)
    assert documents(found)[0][1] == [
        (b"<user>hi</>\n<assistant>", 1.0),
        (b"\n<user>so</>\n<assistant>", 1.0),
        (b"no</>", 0.25),
        (b"\n", 1.0),
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (assistant("x", train=1), "`train` is a number, not true or false"),
        (assistant("x", loss_weight=-1), "`loss_weight` is -1. `loss_weight` must be"),
        (assistant("x", loss_weight="2"), "`loss_weight` is a string"),
        (assistant("x", train=False, loss_weight=2), "`train` is false and `loss_weight` is 2"),
        ({"content": "x"}, r"`messages\[1\]` has no `role`"),
        ("x", r"`messages\[1\]` is a string, not a message"),
    ],
)
def test_malformed_messages_name_their_line(message: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{text}"):
        ready(tmp_path, [{"messages": TALK}, {"messages": [user("a"), message]}])


def test_samples_without_a_trained_token_are_counted_and_named(tmp_path: Path) -> None:
    records = [
        {"messages": TALK},
        {"messages": [user("alone")]},
        {"messages": []},
        {"messages": [user("a"), assistant("b", train=False)]},
    ]
    found = ready(tmp_path, records)
    assert len(documents(found)) == 1
    assert found.notices[1:] == (
        "train: 1 of 4 documents are empty and left out",
        f"train: 2 of 4 documents have no trained token and are left out. First: {tmp_path / 'data.jsonl'}:2",
    )
    with pytest.raises(DataError, match=r"none of 2 documents has a trained token \(2 are masked.*jsonl:1"):
        ready(tmp_path, [records[1], records[3]])


def test_prompt_and_completion(tmp_path: Path) -> None:
    """A08: the completion and its end are trained; the key trains all; an empty completion trains nothing."""
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "é", "completion": "ß€"}]
    assert documents(ready(tmp_path, records, None)) == [
        (b"2+2=4$", [(b"4$", 1.0)]),
        ("éß€$".encode(), [("ß€$".encode(), 1.0)]),
    ]
    assert documents(ready(tmp_path, records, None, completion_only_loss=False))[0] == (b"2+2=4$", [(b"2+2=4$", 1.0)])
    assert documents(ready(tmp_path, records, None, append_eos=False))[0] == (b"2+2=4", [(b"4", 1.0)])
    found = ready(tmp_path, [*records, {"prompt": "x", "completion": ""}], None)
    assert found.counts["masked_documents"] == 1 and found.counts["documents"] == 2


def test_prompt_and_completion_of_messages(tmp_path: Path) -> None:
    record = {"prompt": TALK[:3], "completion": TALK[3:]}
    for template, end in ((PLAIN, b"\n"), (MARKED, b"")):
        assert documents(ready(tmp_path, [record], template)) == [(TALK_BYTES, [(b"no</>" + end, 1.0)])]
        both = ready(tmp_path, [record], template, completion_only_loss=False)
        assert documents(both)[0][1] == [(b"yes</>" + end, 1.0), (b"no</>" + end, 1.0)]
        tail = ready(tmp_path, [record], template, assistant_only_loss=False)
        assert documents(tail)[0][1] == [(b"no</>\n", 1.0)]
    with pytest.raises(DataError, match="`prompt` is a list and `completion` is a string"):
        ready(tmp_path, [{"prompt": TALK, "completion": "x"}])


def test_tools_and_keywords_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].name if tools else '-' }}{{ mood|default('') }}" + PLAIN
    tools = [{"name": "clock", "parameters": {}}]
    records = [
        {"messages": TALK[:2], "tools": tools, "chat_template_kwargs": {"mood": "!"}},
        {"messages": TALK[:2], "tools": json.dumps(tools)},
        {"messages": TALK[:2], "tools": []},
    ]
    texts = [text for text, _ in documents(ready(tmp_path, records, template))]
    assert [text.split(b"<")[0] for text in texts] == [b"clock!", b"clock", b"-"]
    with pytest.raises(DataError, match=r"jsonl:1: `tools` is a string that is not JSON"):
        ready(tmp_path, [{"messages": TALK[:2], "tools": "clock("}], template)


def test_alpaca_and_sharegpt_are_mapped(tmp_path: Path) -> None:
    alpaca = {"instruction": "add", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"]]}
    expected = b"<system>s</>\n<user>a</>\n<assistant>b</>\n<user>add\n\n1 2</>\n<assistant>3</>\n"
    assert documents(ready(tmp_path, [alpaca])) == [(expected, [(b"b</>\n", 1.0), (b"3</>\n", 1.0)])]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    more = [{"from": "human", "value": "so"}, {"from": "gpt", "value": "no", "train": False}]
    assert documents(ready(tmp_path, [{"conversations": turns + more}])) == [(TALK_BYTES, [(b"yes</>\n", 1.0)])]
    with pytest.raises(DataError, match=r"`conversations\[0\]` is from `bot`"):
        ready(tmp_path, [{"conversations": [{"from": "bot", "value": "x"}]}])


def test_the_template_of_the_run_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(MARKED.replace("</>", "<eos>"))
    found = ready(tmp_path, [{"messages": TALK[:2]}], None, chat_template=str(path))
    assert documents(found) == [(b"<user>hi$\n<assistant>yes$\n", [(b"yes$", 1.0)])]
    path.write_text(MARKED)
    assert documents(ready(tmp_path, [{"messages": TALK[:2]}], None, chat_template=str(path)))[0][1][0][0] == b"yes</>"
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        ready(tmp_path, [{"messages": TALK}], None)
    with pytest.raises(ConfigError, match=r"data.chat_template: .*none.jinja cannot be read"):
        ready(tmp_path, [{"messages": TALK}], None, chat_template=str(tmp_path / "none.jinja"))


def test_marks_agree_with_the_tokenizers_own_mask(tmp_path: Path) -> None:
    """Transformers' `return_assistant_tokens_mask` over answers of one to four bytes a character."""
    talks = [[user("é" * n), assistant("ß€😀"[: n % 4] + "x" * n + "😀"), user("?"), assistant("€")] for n in range(12)]
    without_end = MARKED.replace("</>{% endgeneration %}", "{% endgeneration %}</>")
    assert without_end != MARKED, "spans must end in a character of several tokens"
    found = ready(tmp_path, [{"messages": talk} for talk in talks], without_end)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    stored, start = found.table.documents, 0
    assert stored.weights is not None
    for talk, end in zip(talks, stored.ends[:, 0].tolist()):
        oracle = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert stored.tokens[start:end].tolist() == oracle["input_ids"]
        assert stored.weights[start:end].tolist() == oracle["assistant_masks"]
        start = end


def test_spaces_keep_their_characters_where_the_tokenizer_trims_offsets() -> None:
    """`a`, two spaces, `b` as three tokens: a span of the spaces alone is the middle token, which trimming hides."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "ĠĠ": 3}, merges=[("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<e>", special=True)])
    assert backend.encode("a  b").offsets[1] == (3, 3)
    whole = with_whole_offsets(backend)
    encoding = whole.encode("a  b<e>")
    assert encoding.ids == backend.encode("a  b<e>").ids and encoding.offsets[1] == (1, 3)
    weights, crossed = token_weights(encoding, [(1, 3, 2.0), (4, 7, 1.0)])
    assert weights.tolist() == [0, 2, 0, 1] and crossed == []
    weights, crossed = token_weights(encoding, [(0, 7, 1.0), (2, 4, 0.0)])
    assert weights.tolist() == [1, 0, 0, 1] and crossed == [2]
    assert np.count_nonzero(token_weights(encoding, [])[0]) == 0


def test_the_chat_demo_is_made_from_either_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the corpus' form, never imported, and pydoc's topics without it; the template marks every answer."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("prepare_chat", EXAMPLES / "prepare_chat.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    english = tmp_path / "chatterbot_corpus" / "data" / "english"
    english.mkdir(parents=True)
    (english.parents[1] / "__init__.py").write_text("raise ImportError('must not be imported')")
    (english / "a.yml").write_text("categories: [a]\nconversations:\n- - Hi \n  - 3\n- - One\n  - Two\n  - Three\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo.corpus() == [["Hi", "3"], ["One", "Two", "Three"]]
    monkeypatch.setattr(demo, "corpus", lambda: None)
    monkeypatch.setattr(sys, "argv", ["prepare_chat.py", str(tmp_path / "demo" / "chat")])
    demo.main()
    monkeypatch.chdir(tmp_path)
    run = load_run_file(EXAMPLES / "chat.yaml").run
    found = prepare(run)
    assert found is not None and found.table.packed and found.notices[0].startswith("train: ")
    talk = json.loads(Path("demo/chat/text/train.jsonl").read_text().splitlines()[0])["messages"]
    tokenizer = load_tokenizer(Path("demo/chat/model"))
    end, weights = int(found.table.documents.ends[0, 0]), found.table.documents.weights
    assert weights is not None
    trained = [token for token, weight in zip(found.table.documents.tokens[:end], weights[:end]) if weight]
    answers = "".join(message["content"] + "<|end|>" for message in talk if message["role"] == "assistant")
    assert tokenizer.decode(trained) == answers

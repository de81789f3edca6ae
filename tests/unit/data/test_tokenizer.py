"""Tokens that begin and end documents: once each, and whether what is trained teaches to stop. Expected texts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokens import CHATML, CHATML_TOKENS, ready, shown, write_tokenizer

from shardwright.data.notices import trained_ends

TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)


def said(found: Any, *words: str) -> list[str]:
    """The notices that hold all of `words`."""
    return [line for line in found.notices if all(word in line for word in words)]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "<bos>hi"}, "[+<bos>hi<eos>+]"),
        ({"text": "<bos><bos>hi"}, "[+<bos>hi<eos>+]"),
        ({"text": "hi<eos>"}, "[+<bos>hi<eos>+]"),
        ({"prompt": "<bos>q:", "completion": "a"}, "<bos>q:[+a<eos>+]"),
        ({"prompt": "q:", "completion": "a<eos>"}, "<bos>q:[+a<eos>+]"),
    ],
)
def test_text_that_holds_what_the_tokenizer_adds_begins_and_ends_once(
    record: dict[str, str], expected: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tok", around="<bos> $A <eos>", bos_token="<bos>", eos_token="<eos>")
    plain = {"text": "x"} if "text" in record else {"prompt": "x", "completion": "y"}
    found = ready(tmp_path, [record, plain])
    assert shown(found, tokenizer)[0] == expected
    assert len(said(found, "twice", "1 of 2 records", ".jsonl:1")) == 1
    assert not said(ready(tmp_path, [plain]), "twice")


def test_a_token_that_begins_or_ends_a_text_in_its_middle_is_said(tmp_path: Path) -> None:
    """A completion that begins with BOS again, two texts in one, and two tokenised documents without their lengths."""
    write_tokenizer(tmp_path / "tok", around="<bos> $A", bos_token="<bos>", eos_token="<eos>")
    found = ready(tmp_path, [{"prompt": "a", "completion": "<bos>b"}])
    assert said(found, "1 of 1 records hold `<bos>`", "more than once")
    found = ready(tmp_path, [{"text": "a<eos>b"}, {"text": "c"}])
    assert said(found, "1 of 2 records hold the end token `<eos>` before their end")
    found = ready(tmp_path, [{"input_ids": [256, 5, 6, 256, 7]}])
    assert said(found, "1 of 1 records hold `<bos>`", "more than once")


def test_a_chat_begins_once_where_template_and_content_both_do(tmp_path: Path) -> None:
    names = {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
    tokenizer = write_tokenizer(tmp_path / "tok", around="<bos> $A", template="{{ bos_token }}" + CHATML, **names)
    found = ready(tmp_path, [TALK])
    assert shown(found, tokenizer) == [f"<bos>{TURN}[+yo<|im_end|>+]\n"] and found.notices == ()
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = write_tokenizer(tmp_path / "tok", around="<bos> $A", template=template, **names)
    talk = [{"role": "user", "content": "<bos>hi"}, {"role": "assistant", "content": "yo"}]
    found = ready(tmp_path, [{"messages": talk}])
    assert shown(found, tokenizer) == ["<bos>hi<|im_end|>[+yo<|im_end|>+]"]
    assert said(found, "begin with `<bos>` twice")
    write_tokenizer(tmp_path / "tok", around="<bos> $A", template=CHATML, **names)
    assert said(ready(tmp_path, [TALK]), "begin without `<bos>`", "the chat template does not write")


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (MARKED, CHATML_TOKENS),  # the marks leave the end out
        (CHATML, ("<|im_start|>",)),  # the end is no token, but letters
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            CHATML_TOKENS,
        ),
    ],
)
def test_a_turn_that_never_ends_is_said(template: str, special: tuple[str, ...], tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", ("<eos>", *special), template=template, eos_token="<eos>")
    found = ready(tmp_path, [TALK, TALK])
    [line] = said(found, "2 of 2 trained turns end in no special token", ".jsonl:1")
    assert found.notices == (line,)
    assert trained_ends(found.table.documents.meta) == {}


def test_marks_may_hold_white_space_after_the_end(tmp_path: Path) -> None:
    template = MARKED.replace("{{ m.content }}{% endg", "{{ m.content + '<|im_end|>\\n' }}{% endg")
    tokenizer = write_tokenizer(tmp_path / "tok", template=template, eos_token="<|im_end|>")
    found = ready(tmp_path, [TALK])
    assert shown(found, tokenizer) == [f"{TURN}[+yo<|im_end|>\n+]<|im_end|>\n"] and found.notices == ()
    talk = [TALK["messages"][0], {"role": "assistant", "content": "yo<|im_end|>"}]
    assert said(ready(tmp_path, [{"messages": talk}]), "1 trained turns end in `<|im_end|>` twice")
    assert said(ready(tmp_path, [{"prompt": "a", "completion": "b"}], append_eos=False), "no special token")
    for ids, masks, ends in (([5, 256], {}, {}), ([5, 256], {"loss_mask": [0, 1]}, {256: "<bos>"})):
        found = ready(tmp_path, [{"input_ids": ids, **masks}])
        assert trained_ends(found.table.documents.meta) == ends


def test_an_end_that_generation_does_not_know_is_said(tmp_path: Path) -> None:
    """The tokenizer's end is another, and the model's: generation_config.json decides, with one end or several."""
    tokenizer = write_tokenizer(tmp_path / "tok", template=CHATML, eos_token="<eos>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    found = ready(tmp_path, [TALK])
    assert trained_ends(found.table.documents.meta) == {end: "<|im_end|>"}
    assert said(found, f"`<|im_end|>` ({end})", f"not an end token of the tokenizer ({eos})")
    write_tokenizer(tmp_path / "tok", template=CHATML, eos_token="<|im_end|>")
    config = {"model_type": "llama", "vocab_size": 300, "eos_token_id": eos}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert said(ready(tmp_path, [TALK]), f"not an end token of config.json ({eos})")
    generation = tmp_path / "model" / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [eos, 3]}))
    assert said(ready(tmp_path, [TALK]), f"not an end token of generation_config.json ({eos}, 3)")
    generation.write_text(json.dumps({"eos_token_id": [eos, end]}))
    assert ready(tmp_path, [TALK]).notices == ()

"""Chats in the several manners of records, under templates that know one of them; texts by hand, trained in [+ +].

What Transformers renders of the manner that a template knows is the oracle for the other manners.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.byte_tokens import CHATML, ready, shown, write_tokenizer

from shardwright.data.notices import _LINES
from shardwright.errors import DataError

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
TAIL = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}{{ ARGUMENTS }}{{ '</call>' }}{% endfor %}"
)
TEXT = "{{ m.content or '' }}"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
NAMES = {"object": "objects", "JSON": "JSON"}
USER = {"role": "user", "content": "weather?"}
ASKED = "<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n"


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def rendered(directory: Path, template: str, *messages: dict[str, Any], **columns: Any) -> tuple[str, list[str]]:
    """(the document, the notices) of one conversation."""
    tokenizer = write_tokenizer(directory / "tok", template=template, eos_token="<|im_end|>")
    found = ready(directory, [{"messages": list(messages), **columns}], max_length=2048)
    return shown(found, tokenizer)[0], [line.removeprefix("train: ") for line in found.notices]


@pytest.mark.parametrize("given", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize(
    "body",
    [
        "{% if m['content'] is none %}" + CALLS + "{% else %}{{ m['content'] }}{% endif %}",
        "{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}" + CALLS + "{% endif %}",
        "{{ m.content }}" + CALLS,
        "{{ m.content + '' }}" + CALLS,
        "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}" + CALLS,
    ],
)
def test_a_call_without_content_stands_in_the_text(body: str, given: dict[str, Any], tmp_path: Path) -> None:
    template = HEAD + body.replace("{{ ARGUMENTS }}", "") + TAIL
    text, notices = rendered(tmp_path, template, USER, calling({}, **given))
    assert text == f"{ASKED}[+<call>look </call><|im_end|>+]\n"
    changed = {line.split(" in ")[0] for line in notices}
    assert changed <= {"content that is null is given as empty text", "empty content is given as null"}


def test_a_template_that_fails_on_two_manners_is_given_both_others(tmp_path: Path) -> None:
    """Null content that must stay null, arguments that must become an object, and a user's text in parts."""
    body = "{% if m['content'] is none %}" + CALLS.replace("ARGUMENTS", "c.function.arguments.items() | list")
    template = HEAD + body + "{% else %}{{ '' + m.content }}{% endif %}" + TAIL
    user = {"role": "user", "content": [{"type": "text", "text": "weather?"}]}
    for given in (user, USER):
        text, _ = rendered(tmp_path, template, given, calling('{"city": "Rome"}', content=None))
        assert text == f"{ASKED}[+<call>look [('city', 'Rome')]</call><|im_end|>+]\n"


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("c.function.arguments | tojson", "object"),
        ("c.function.arguments.items() | list", "object"),
        ("c.function.arguments", "JSON"),
        ("' ' + c.function.arguments", "JSON"),
        ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", "both"),
    ],
)
def test_arguments_are_given_as_the_template_writes_them(written: str, known: str, tmp_path: Path) -> None:
    template = HEAD + TEXT + CALLS.replace("ARGUMENTS", written) + TAIL
    manners = {"object": {"city": "Rome"}, "JSON": '{"city": "Rome"}'}
    tokenizer = write_tokenizer(tmp_path / "tok", template=template, eos_token="<|im_end|>")
    right = calling(manners.get(known, manners["object"]), content="")
    oracle = tokenizer.apply_chat_template([USER, right], tokenize=False)
    for manner, arguments in manners.items():
        text, notices = rendered(tmp_path, template, USER, calling(arguments, content=None))
        assert text.replace("[+", "").replace("+]", "") == oracle
        changed = f"`arguments` of calls that are {NAMES[manner]} are given as {NAMES.get(known)}"
        assert [line.split(" in ")[0] for line in notices] == ([] if known in (manner, "both") else [changed])


def test_calls_tools_and_parameters_that_are_json(tmp_path: Path) -> None:
    """As tables keep them, whose columns have one type."""
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        + HEAD
        + TEXT
        + CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
        + TAIL
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = calling({"city": "Rome"}, content="")
    plain, notices = rendered(tmp_path, template, USER, call, tools=[tool])
    assert notices == [] and '"parameters": {"type": "object"}' in plain
    packed = {**call, "tool_calls": json.dumps(call["tool_calls"])}
    assert rendered(tmp_path, template, USER, packed, tools=json.dumps([tool])) == (plain, [])
    assert rendered(tmp_path, template, USER, call, tools=[json.dumps(tool)]) == (plain, [])
    tool["function"]["parameters"] = '{"type": "object"}'  # type: ignore[index]
    text, notices = rendered(tmp_path, template, USER, call, tools=[tool])
    assert text == plain and len(notices) == 1 and notices[0].startswith("`parameters` of tools that are JSON")


@pytest.mark.parametrize(("body", "known"), [("{{ m.content }}", "text"), ("{{ '' + m.content }}", "text"), (PARTS, "parts"),
    ("{% for part in m.content %}{% if part.type == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}", "parts"),
    ("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}", "both")])  # fmt: skip
def test_content_is_given_as_the_template_reads_it(body: str, known: str, tmp_path: Path) -> None:
    manners: dict[str, Any] = {
        "text": "It is sunny.",
        "parts": [{"type": "text", "text": "It is "}, {"type": "text", "text": "sunny."}],
    }
    user = {"text": "weather?", "parts": [{"type": "text", "text": "weather?"}]}
    for manner, content in manners.items():
        talk = [{"role": "user", "content": user[manner]}, {"role": "assistant", "content": content}]
        text, notices = rendered(tmp_path, HEAD + body + TAIL, *talk)
        assert text == f"{ASKED}[+It is sunny.<|im_end|>+]\n"
        assert len(notices) == (known not in (manner, "both")), notices
    with pytest.raises(DataError, match=r"`messages\[0\]`: part 1 of `content` is image, not text"):
        parts = [{"type": "text", "text": "see"}, {"type": "image", "url": "x"}]
        rendered(tmp_path, HEAD + body + TAIL, {"role": "user", "content": parts}, talk[1])


def test_what_a_template_leaves_out_is_said_or_refused(tmp_path: Path) -> None:
    """Beside text that is trained a line each; where nothing of a trained turn is left, a refusal."""
    answer = {"role": "assistant", "content": "sunny", "reasoning_content": "it said so", "name": "bot"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    kwargs = {"enable_thinking": True}
    text, notices = rendered(
        tmp_path, CHATML, USER, answer, tools=[tool], documents=[{"title": "t", "text": "x"}],
        chat_template_kwargs=kwargs, functions=[tool],
    )  # fmt: skip
    assert text == f"{ASKED}[+sunny<|im_end|>+]\n"
    assert [re.sub(" in 1 of .*leaves.*", "", line) for line in notices] == [
        f"{tmp_path / 'data-0.jsonl'}: nothing reads the columns `functions` (in 1 of 1 records)",
        "`documents` has no effect",
        "`enable_thinking` of `chat_template_kwargs` has no effect",
        "`name` of messages has no effect",
        "`reasoning_content` of messages has no effect",
        "`tools` has no effect",
    ]
    call = calling({}, content="")
    with pytest.raises(
        DataError, match=r"data-1\.jsonl:1: message 1 .*does not appear in the text: .*leaves out `tool_calls`"
    ):
        rendered(tmp_path, CHATML, USER, call, {"role": "tool", "content": "sunny"}, answer)
    text, notices = rendered(tmp_path, CHATML, USER, {**call, "train": False}, answer)
    assert text.count("[+") == 1 and any("`tool_calls` of messages has no effect" in line for line in notices)
    text, notices = rendered(tmp_path, CHATML, USER, {"role": "assistant", "content": ""})
    assert any("have an empty assistant message" in line for line in notices)


def test_reasoning_that_only_the_last_turn_shows_is_said(tmp_path: Path) -> None:
    body = "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content }}{% endif %}{{ m.content }}"
    marked = HEAD + "{% generation %}" + body + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% endfor %}"
    turns = [USER, {"role": "assistant", "content": "sunny", "reasoning_content": "hm"}]
    assert rendered(tmp_path, marked, *turns)[1] == []
    _, notices = rendered(tmp_path, marked, *turns, *turns)
    assert [line.split(" in ")[0] for line in notices] == ["`reasoning_content` of messages has no effect"]


def test_roles_that_a_template_does_not_know_are_said(tmp_path: Path) -> None:
    known = HEAD.replace("%}{{ '<", "%}{% if m.role in ('user', 'assistant') %}{{ '<", 1)
    known += "{{ m.content }}" + TAIL.replace("{% endfor %}", "{% endif %}{% endfor %}")
    answer = {"role": "assistant", "content": "a"}
    for role in ("developer", "system"):
        text, notices = rendered(tmp_path, known, {"role": role, "content": "be brief"}, USER, answer)
        assert text == f"{ASKED}[+a<|im_end|>+]\n"
        assert [line.split(" in ")[0] for line in notices] == [f"the content of `{role}` messages has no effect"]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match=r"cannot render the messages \(system, user, assistant\)\. no system turn"):
        rendered(tmp_path, refusing, {"role": "system", "content": "be brief"}, USER, answer)


@pytest.mark.parametrize(
    "message", [{"role": "assistant"}, {"role": "user", "contents": None}, {"role": "user", "content": None}]
)
def test_messages_without_anything_to_say_are_refused(message: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"jsonl:1: `messages\[1\]` has no `content`"):
        rendered(tmp_path, CHATML, USER, message)


def test_weights_of_messages_in_every_spelling(tmp_path: Path) -> None:
    """`weight` is 0 or 1 in OpenAI's files; `train` and `weight` may not contradict."""
    turns = [
        USER,
        {"role": "assistant", "content": "a", "weight": 0},
        USER,
        {"role": "assistant", "content": "b", "weight": 1},
    ]
    text, notices = rendered(tmp_path, CHATML, *turns)
    assert text.count("[+") == 1 and "[+b<|im_end|>+]" in text and notices == []
    with pytest.raises(DataError, match="message 1: `train` is false and `weight` is 1"):
        rendered(tmp_path, CHATML, USER, {"role": "assistant", "content": "a", "weight": 1, "train": False})


def test_sharegpt_calls_and_messages(tmp_path: Path) -> None:
    """A `function_call` turn is a call; turns of role and content are messages."""
    template = HEAD + TEXT + CALLS.replace("ARGUMENTS", "c.function.arguments | tojson") + TAIL
    tokenizer = write_tokenizer(tmp_path / "tok", template=template, eos_token="<|im_end|>")
    call = {"name": "look", "arguments": {"city": "Rome"}}
    turns = [{"from": "human", "value": "weather?"}, {"from": "function_call", "value": json.dumps(call)}]
    expected = ASKED + '[+<call>look {"city": "Rome"}</call><|im_end|>+]\n'
    assert shown(ready(tmp_path, [{"conversations": turns}]), tokenizer) == [expected]
    messages = [USER, calling({"city": "Rome"})]
    assert shown(ready(tmp_path, [{"conversations": messages}]), tokenizer) == [expected]


def test_keys_of_data_that_no_record_needs_are_said(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    write_tokenizer(tmp_path / "tok", eos_token="<eos>")
    pair = {"prompt": "a", "completion": "b"}
    assert "`tools` (in 1 of 1 records)" in ready(tmp_path, [{**pair, "tools": [{"name": "x"}]}]).notices[0]
    found = ready(tmp_path, [pair], chat_template=str(tmp_path / "t.jinja"), assistant_only_loss=True)
    assert found.notices == (
        "train: data.chat_template has no effect: no record holds messages",
        "train: data.assistant_only_loss has no effect: no record holds messages",
    )
    write_tokenizer(tmp_path / "tok", template=CHATML + "{{ strftime_now('%Y') }}", eos_token="<|im_end|>")
    found = ready(tmp_path, [{"messages": [USER, {"role": "assistant", "content": "b"}]}], assistant_only_loss=False)
    assert any("today's date" in line for line in found.notices)
    assert all("{subject}" in line or "records" in line for line in _LINES.values())

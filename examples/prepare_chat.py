"""Makes what examples/chat.yaml needs: conversations as JSONL, a tokenizer with a chat template, the config of a small Llama.

    python examples/prepare_chat.py [directory]        (default: demo/chat)

The conversations are the English ones of the pip package chatterbot-corpus, from two turns to dozens, user and assistant in
turn; without the package they are the standard library's pydoc topics, asked for and answered. The package is read, never
imported. Running this again leaves files alone that would not change.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml
from prepare_demo import CONFIG, END, VALIDATION_EVERY, to_json, train_tokenizer, write
from tokenizers import AddedToken

START_OF_TURN, END_OF_TURN = "<|turn|>", "<|end|>"
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
{%- endif %}
"""
Conversation = list[str]


def corpus() -> list[Conversation] | None:
    """The English conversations of the package in the order of its files, or None when it is not installed."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        return None
    files = sorted(Path(spec.origin).with_name("data").joinpath("english").glob("*.yml"))
    loaded = (yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) for file in files)
    return [[str(turn).strip() for turn in turns] for content in loaded for turns in content["conversations"]]


def topics() -> list[Conversation]:
    """The documentation that `help()` shows in Python: a topic asked for, and its paragraphs, asked for one by one."""
    from pydoc_data.topics import topics as found

    conversations = []
    for name, text in sorted(found.items()):
        turns = [f"What is {name}?"]
        for paragraph in text.strip().split("\n\n")[:20]:
            turns += [paragraph.strip(), "Go on."]
        conversations.append(turns[:-1])
    return conversations


def to_messages(conversations: Iterable[Conversation]) -> str:
    """JSON Lines of {messages}, user and assistant in turn."""
    roles = ("user", "assistant")
    lines = (
        [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)] for turns in conversations
    )
    return "".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in lines)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "demo/chat")
    conversations, source = corpus(), "chatterbot-corpus (English)"
    if conversations is None:
        conversations = topics()
        source = "the standard library's pydoc_data.topics (chatterbot-corpus is not installed)"
    validation = conversations[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    train = [turns for number, turns in enumerate(conversations, 1) if number % VALIDATION_EVERY]
    write(directory / "text" / "train.jsonl", to_messages(train))
    write(directory / "text" / "validation.jsonl", to_messages(validation))

    tokenizer = train_tokenizer([turn for turns in train for turn in turns])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (START_OF_TURN, END_OF_TURN)]
    )
    write(directory / "model" / "tokenizer.json", tokenizer.to_str(pretty=True))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TURN, "pad_token": END}
    write(directory / "model" / "tokenizer_config.json", to_json(names))
    write(directory / "model" / "chat_template.jinja", TEMPLATE)
    size = tokenizer.get_vocab_size()
    small = {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "vocab_size": size,
    }
    end = {"eos_token_id": tokenizer.token_to_id(END_OF_TURN)}
    write(directory / "model" / "config.json", to_json(CONFIG | small | end))
    turns = sum(map(len, conversations))
    print(
        f"{directory}: {len(train)} training and {len(validation)} validation conversations, {turns:,} turns, from "
        f"{source}; tokenizer of {size} tokens"
    )


if __name__ == "__main__":
    main()

"""With which tokens a run teaches the model to stop."""

from __future__ import annotations

from typing import Any

from shardwright.config.schema import RunFile
from shardwright.data.chat import read_template
from shardwright.data.prepare import Prepared
from shardwright.data.tokenise import load_tokenizer

_CONTENT = "shardwright"


def end_tokens(run: RunFile, train: Prepared) -> list[int]:
    """Ids of the tokens that end what is trained: of texts and completions, and of a chat template's assistant turn."""
    if train.tokenizer_path is None:
        return []
    tokenizer, kinds = load_tokenizer(train.tokenizer_path), set(train.formats)
    ends = []
    if run.data.append_eos and kinds & {"text", "prompt_completion"}:
        ends.append(tokenizer.eos_token_id)
    if kinds - {"text", "prompt_completion", "tokens"}:
        path = run.data.chat_template
        ends.append(_end_of_turn(tokenizer, None if path is None else read_template(path)))
    return sorted({end for end in ends if end is not None})


def _end_of_turn(tokenizer: Any, template: str | None) -> int | None:
    """The first special token behind what an assistant says; None where the template ends a turn without one."""
    from jinja2.exceptions import TemplateError

    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _CONTENT}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return None  # a template for other messages than these two: what it does with the run's own is said there
    behind = tokenizer(text.rpartition(_CONTENT)[2], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return next((token for token in behind if token in special | set(tokenizer.all_special_ids)), None)

"""A tokenizer of bytes with any special tokens, and documents of a run as text: what is trained in [+ +]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.data_runs import ready as prepared
from tests.data_runs import run_over, written
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardwright.data.prepare import Prepared

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def write_tokenizer(
    directory: Path,
    special: Sequence[str] = ("<bos>", "<eos>", *CHATML_TOKENS),
    around: str = "",
    template: str | None = None,
    **names: str,
) -> PreTrainedTokenizerFast:
    """Saves it in `directory`. around: what its post-processor makes of a text, as `<bos> $A <eos>`. names: bos_token, ..."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if around:
        pairs = [(text, raw.token_to_id(text)) for text in special]
        raw.post_processor = processors.TemplateProcessing(single=around, special_tokens=pairs)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)
    return fast


def ready(directory: Path, records: Sequence[dict[str, Any]] | Sequence[str], **data: Any) -> Prepared:
    """`records` prepared with the tokenizer in directory/tok (or without one); paths instead of records are data.train."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    if not (model / "config.json").exists():
        (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    train = [record for record in records if isinstance(record, str)]
    if not train:
        path = directory / f"data-{len(list(directory.glob('data-*')))}.jsonl"
        train = [str(written(path, *records))]
    tokenizer = str(directory / "tok") if (directory / "tok").is_dir() else None
    paths = {"model_name_or_path": str(model), "tokenizer_name_or_path": tokenizer}
    return prepared(
        run_over(directory, model=paths, **{"train": train, "max_length": 512, "batching": "bucket"} | data)
    )


def shown(found: Prepared, tokenizer: Any = None) -> list[str]:
    """Each document; ids instead of text where there is no tokenizer."""
    stored, result, start = found.table.documents, [], 0
    for end in stored.ends[:, 0].tolist():
        ids = stored.tokens[start:end].tolist()
        weights = [1.0] * len(ids) if stored.weights is None else stored.weights[start:end].tolist()
        text, open_ = b"", False
        for token, weight in zip(ids, weights):
            if bool(weight) != open_:
                text, open_ = text + (b"[+" if weight else b"+]"), bool(weight)
            text += _bytes(token, tokenizer)
        result.append((text + b"+]" * open_).decode())
        start = end
    return result


def _bytes(token: int, tokenizer: Any) -> bytes:
    if tokenizer is None:
        return f" {token}".encode()
    name = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.added_tokens_decoder:
        return str(name).encode()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return bytes([_BYTE_OF[letters[token]]])


def _byte_of() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for: printable ones for themselves, the rest in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_of()

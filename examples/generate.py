"""Writes a few words with a Hugging Face model directory: python examples/generate.py DIRECTORY [PROMPT]"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    directory = sys.argv[1]
    prompt = " ".join(sys.argv[2:]) or "And the LORD said unto"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

"""Prints how fast 100,000 documents are tokenised beside two other ways, and how long a second start takes.

    python benchmarks/tokenising.py [--documents N] [--repeats N] [--record]

The same JSON Lines and tokenizer, in turn: ours (slices of the file in processes; with chat, rendering and masks too),
`datasets.Dataset.map` with as many processes and a batched call of the tokenizer, and one process that reads and lets the
tokenizer's own threads encode. All three end with tokens on disk (`map` in its arrow cache). A second start is a fresh process
that calls `prepare` and finds the tokens; its imports count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from shardwright.config import RunFile
from shardwright.data.prepare import prepare
from shardwright.data.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from prepare_chat import TEMPLATE  # noqa: E402
from prepare_demo import CONFIG, END, train_tokenizer  # noqa: E402

AGAIN = (
    "import sys; from shardwright.config import RunFile; from shardwright.data.prepare import prepare;"
    "found = prepare(RunFile.model_validate_json(sys.argv[1])); assert found.cached; print(found.summary())"
)


def make(directory: Path, documents: int) -> None:
    """text.jsonl and chat.jsonl of the same words, log-normal lengths of about 60 words, and a tokenizer trained on them."""
    words = [word for _, text in sorted(topics.items()) for word in text.split()]
    chooser = random.Random(0)
    texts = []
    for _ in range(documents):
        first, count = chooser.randrange(len(words) - 400), int(chooser.lognormvariate(3.8, 0.8))
        texts.append(" ".join(words[first : first + min(400, max(4, count))]))
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with open(directory / "chat.jsonl", "w") as out:
        for text in texts:
            half = len(text) // 2
            messages = [
                {"role": "user", "content": text[:half]},
                {"role": "assistant", "content": text[half:]},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    (directory / "model").mkdir()
    train_tokenizer(texts[:5000]).save(str(directory / "model" / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "model" / "config.json").write_text(json.dumps(CONFIG))


def run_file(directory: Path, name: str, cache: Path, processes: int) -> RunFile:
    """A run over `name`.jsonl with its cache in `cache`."""
    return RunFile.model_validate(
        {
            "model": {"model_name_or_path": str(directory / "model"), "init": "random"},
            "data": {
                "train": [str(directory / f"{name}.jsonl")],
                "num_proc": processes,
                "cache_dir": str(cache),
            },
            "training": {"max_steps": 1, "global_batch_size": 1},
        }
    )


def ours(directory: Path, name: str, processes: int) -> int:
    """Tokens of `prepare` into an empty cache."""
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        found = prepare(run_file(directory, name, Path(cache), processes))
        assert found is not None
        return found.counts["tokens"]


def with_map(directory: Path, processes: int) -> int:
    """Tokens of `datasets`: JSON loaded, mapped in batches of 1,000 in processes."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(directory / "model")
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        loaded = datasets.load_dataset("json", data_files=str(directory / "text.jsonl"), split="train", cache_dir=cache)
        end = tokenizer.eos_token_id

        def encode(batch: dict[str, Any]) -> dict[str, Any]:
            return {"ids": [[*ids, end] for ids in tokenizer(batch["text"], return_attention_mask=False)["input_ids"]]}

        mapped = loaded.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
        return sum(len(batch.column("ids").flatten()) for batch in mapped.data.to_batches())


def with_threads(directory: Path) -> int:
    """Tokens of one process: lines read in batches of 1,000, the tokenizer's threads, appended to a file."""
    tokenizer = load_tokenizer(directory / "model")
    backend, end, total = tokenizer.backend_tokenizer, tokenizer.eos_token_id, 0
    with open(directory / "text.jsonl") as lines, tempfile.TemporaryFile(dir=directory) as out:
        while batch := [json.loads(line)["text"] for line in islice(lines, 1000)]:
            for encoding in backend.encode_batch_fast(batch):
                ids = np.asarray([*encoding.ids, end], np.uint16)
                out.write(ids.tobytes())
                total += len(ids)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    processes = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make(directory, arguments.documents)
        ways: dict[str, Callable[[], int]] = {
            "ours": lambda: ours(directory, "text", processes),
            "ours, 1 process": lambda: ours(directory, "text", 1),
            "datasets.map": lambda: with_map(directory, processes),
            "tokenizer threads": lambda: with_threads(directory),
            "ours, chat": lambda: ours(directory, "chat", processes),
            "ours, chat, 1 process": lambda: ours(directory, "chat", 1),
        }
        with_map(directory, 1)  # imports and forked caches are no part of what is compared
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        processor: dict[str, list[float]] = {way: [] for way in ways}
        tokens: dict[str, int] = {}
        for _ in range(arguments.repeats):
            for way, call in ways.items():
                start, before = time.perf_counter(), sum(os.times()[:4])
                tokens[way] = call()
                seconds[way].append(time.perf_counter() - start)
                processor[way].append(sum(os.times()[:4]) - before)
        for other in ("datasets.map", "tokenizer threads"):
            assert tokens[other] == tokens["ours"], tokens
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        print(f"{arguments.documents:,} documents, {processes} processes, median of {arguments.repeats}")
        for way, median in medians.items():
            low, high = min(seconds[way]), max(seconds[way])
            print(
                f"{way:<24}{tokens[way]:>12,} tokens {median:>8.2f} s ({low:.2f} to {high:.2f})"
                f"{tokens[way] / median:>14,.0f} tokens/s   {medians['ours'] / median:.2f} of ours, "
                f"{statistics.median(processor[way]):.2f} s on the processors"
            )
        again = second_start(directory, processes, arguments.repeats)
        for kind, pairs in again.items():
            walls, used = zip(*pairs)
            print(
                f"second start, {kind}: {statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f}), of it "
                f"{statistics.median(used):.2f} s on the processor, interpreter and imports included"
            )
    if arguments.record:
        row = {
            "benchmark": "tokenising",
            "documents": arguments.documents,
            "seconds": seconds,
            "processor": processor,
            "again": again,
        }
        with open(Path(__file__).with_name("results.jsonl"), "a") as out:
            out.write(json.dumps(row) + "\n")


def second_start(directory: Path, processes: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of fresh processes that find the tokens of text and of chat in the cache."""
    found: dict[str, list[tuple[float, float]]] = {"text": [], "chat": []}
    for kind, pairs in found.items():
        run = run_file(directory, kind, directory / "cache", processes)
        prepare(run)
        for _ in range(repeats):
            start, before = time.perf_counter(), os.times()
            subprocess.run([sys.executable, "-c", AGAIN, run.model_dump_json()], check=True, capture_output=True)
            after = os.times()
            used = after.children_user + after.children_system - before.children_user - before.children_system
            pairs.append((time.perf_counter() - start, used))
    return found


if __name__ == "__main__":
    main()

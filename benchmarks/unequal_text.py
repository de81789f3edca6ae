"""Prints target tokens a second on documents of very unequal length: pad, bucket and pack, and Transformers' Trainer.

    python benchmarks/unequal_text.py [--data kjv,chat] [--updates 8] [--bf16] [--record]

Data: the chapters of the King James Bible, whole texts trained (examples/prepare_demo.py), and the conversations of
chatterbot-corpus, only the assistant's turns trained (examples/prepare_chat.py). One process, one thread, a small Llama in
float32, or with bf16 compute, from the same config. All contenders live in that process and take turns, update by update; an
update holds about the same target tokens for each, so packed updates have fewer rows. Time includes making the batches. A rate
is target tokens by seconds; what is printed is the median of the rates' ratios of each turn, and their spread.

Trainer peers read the same rows: `trainer` pads to the longest of its microbatch, which is what a collator of TRL does;
`trainer packed` packs by best fit and passes position_ids that restart (padding-free), in TRL's own classes where trl is
installed; `pack` and `trainer packed` run with one row a microbatch and with all rows of the update in one, since either may be
the better setting. They need accelerate and are left out, with a line, where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
DATA = {
    "kjv": {"script": "prepare_demo.py", "length": 2048, "rows": 8, "microbatch": 4},
    "chat": {"script": "prepare_chat.py", "length": 256, "rows": 64, "microbatch": 16},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Turn = Callable[[], tuple[int, float]]
"""One update: (target tokens, seconds)."""


def run_file(directory: Path, data: dict[str, Any], batching: str, rows: int, microbatch: int) -> Any:
    """A run over the prepared data in `directory`."""
    from shardwright.config import load_run_file

    values = {
        "model.model_name_or_path": str(directory / "model"),
        "model.init": "random",
        "model.config_overrides": SMALL | {"max_position_embeddings": data["length"]},
        "data.train": [str(directory / "text" / "train.jsonl")],
        "data.max_length": data["length"],
        "data.overlong": "split",
        "data.batching": batching,
        "data.cache_dir": str(directory / "cache"),
        "training.max_steps": 1000,
        "training.global_batch_size": rows,
        "training.per_device_train_batch_size": microbatch,
        "training.lr_scheduler_type": "constant",
        "parallelism.data_parallel": "ddp",
        "precision.param_dtype": "bf16" if data["bf16"] else "fp32",
    }
    return load_run_file(None, values).run


def ours(run: Any) -> Turn:
    """Updates of the product."""
    import torch

    from shardwright.layout.axes import Axes
    from shardwright.train.run_data import open_data
    from shardwright.train.update import UpdateEngine

    axes, device = Axes(), torch.device("cpu")
    batches = open_data(run, axes, 0).updates_from(0, device)
    engine = UpdateEngine(run, axes, device, run.training.max_steps)

    def turn() -> tuple[int, float]:
        start = time.perf_counter()
        batch = next(batches)
        engine.forward_backward(batch)
        engine.step()
        return batch.target_tokens, time.perf_counter() - start

    return turn


def documents(run: Any) -> list[dict[str, list[int]]]:
    """The rows of a padded run as a Trainer reads them: labels are not shifted."""
    from shardwright.data.prepare import prepare

    prepared = prepare(run)
    assert prepared is not None
    rows = (prepared.table.row(row) for row in range(len(prepared.table)))
    return [{"input_ids": ids.tolist(), "labels": [-100, *labels[:-1].tolist()]} for ids, labels in rows]


def padded(features: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as wide as its longest document."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([torch.tensor(f[key]) for f in features] for key in ("input_ids", "labels"))
    mask = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(mask, batch_first=True),
    }


def packed(rows: list[dict[str, list[int]]], length: int) -> tuple[Any, Any]:
    """(dataset, collator) as a user of TRL has them with packing."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    dataset = pack_dataset(Dataset.from_list(rows), length, "bfd")
    return dataset, DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def trainer(run: Any, dataset: Any, collate: Any, rows: int, microbatch: int) -> Turn:
    """Updates of a Transformers Trainer, which runs in a thread and stops after each step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    turns: Queue[None] = Queue()
    results: Queue[tuple[int, float]] = Queue()

    class Counting(Trainer):
        targets = 0

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.targets += int((inputs["labels"][:, 1:] != -100).sum())
            return super().compute_loss(model, inputs, *arguments, **options)

    class Waiting(TrainerCallback):
        start = 0.0

        def wait(self) -> None:
            turns.get()
            made.targets, self.start = 0, time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            results.put((made.targets, time.perf_counter() - self.start))
            self.wait()

    config = AutoConfig.from_pretrained(run.model.model_name_or_path, **run.model.config_overrides)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(Path(run.model.model_name_or_path).parent / "trainer"),
        max_steps=1000,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=rows // microbatch,
        learning_rate=run.training.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=run.training.max_grad_norm,
        weight_decay=0.0,
        use_cpu=True,
        bf16=run.precision.param_dtype == "bf16",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    made = Counting(
        AutoModelForCausalLM.from_config(config),
        arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[Waiting()],
    )

    def work() -> None:
        torch.set_num_threads(1)
        made.train()

    threading.Thread(target=work, daemon=True).start()

    def turn() -> tuple[int, float]:
        turns.put(None)
        return results.get(timeout=600)

    return turn


def contenders(name: str, directory: Path, bf16: bool) -> Iterator[tuple[str, Turn]]:
    """Each way to train on the data set `name`, prepared in `directory`."""
    data = DATA[name] | {"bf16": bf16}
    length, rows, microbatch = data["length"], data["rows"], data["microbatch"]
    padding = run_file(directory, data, "pad", rows, microbatch)
    found = documents(padding)
    from shardwright.data.prepare import prepare

    plan = prepare(run_file(directory, data, "pack", 1, 1))
    assert plan is not None
    packed_rows = max(1, round(rows * len(plan.table) / len(found)))
    yield f"pad, {rows} rows of {length}", ours(padding)
    yield "bucket", ours(run_file(directory, data, "bucket", rows, microbatch))
    at_a_time = sorted({1, packed_rows})  # rows of a microbatch
    for count in at_a_time:
        name = f"pack {count}, {packed_rows} rows of {length}"
        yield name, ours(run_file(directory, data, "pack", packed_rows, count))
    if importlib.util.find_spec("accelerate") is None:
        print("No Trainer: accelerate is not installed.")
        return
    yield "trainer", trainer(padding, found, padded, rows, microbatch)
    if importlib.util.find_spec("trl") is None:
        print("No packed Trainer: trl is not installed.")
        return
    dataset, collate = packed(found, length)
    for count in at_a_time:
        yield f"trainer packed {count}", trainer(padding, dataset, collate, packed_rows, count)


def measure(name: str, updates: int, bf16: bool, record: bool) -> None:
    """Prints the table of one data set."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        script = [sys.executable, str(EXAMPLES / str(DATA[name]["script"])), str(directory)]
        subprocess.run(script, check=True, cwd=directory)
        turns = list(contenders(name, directory, bf16))
        rates: dict[str, list[float]] = {kind: [] for kind, _ in turns}
        targets = dict.fromkeys(rates, 0)
        for number in range(updates + 1):
            for kind, turn in turns:
                count, seconds = turn()
                if number:  # the first one warms up
                    rates[kind].append(count / seconds)
                    targets[kind] += count
    first = next(iter(rates))
    trainers = [kind for kind in rates if kind.startswith("trainer")]
    print(f"{name}: {updates} updates, target tokens a second (spread over updates)")
    for kind, found in rates.items():
        against = "".join(
            f", {median(ratios):.2f} x {other.split(',')[0]} ({min(ratios):.2f} to {max(ratios):.2f})"
            for other in (first, *trainers)
            if other != kind
            for ratios in [[a / b for a, b in zip(found, rates[other])]]
        )
        print(f"  {kind:<24}{median(found):>8,.0f}  {targets[kind] // updates:>7,} targets an update{against}")
        if record:
            line = {
                "benchmark": "unequal_text",
                "data": name,
                "bf16": bf16,
                "kind": kind.split(",")[0],
                "n": updates,
            }
            line |= {
                "targets_per_s": median(found),
                "ratio": median(a / b for a, b in zip(found, rates[first])),
            }
            with open(HERE / "results.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="kjv,chat")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 (Trainer: autocast)")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from shardwright.mesh.process_group import connect
    from shardwright.models.build import quiet_transformers

    quiet_transformers()
    with connect("cpu", 600, 1):
        for name in options.data.split(","):
            measure(name, options.updates, options.bf16, options.record)
    sys.stdout.flush()
    os._exit(0)  # the Trainers' threads wait for turns that do not come


if __name__ == "__main__":
    main()

"""Two hundred answers of `plan`, to see what a change of the planner changes.

    python benchmarks/plan_answers.py OUT.json                    plan every question, write the answers
    python benchmarks/plan_answers.py --compare OLD.json NEW.json print what differs, and by how much

The questions are drawn from a fixed seed: models, devices, sizes, dtypes, optimizers and memory options. The answers are
those of the command line (`shardwright plan … --json`), asked in this process. Sentences are left out: only names and
numbers are compared. Numbers that differ by less than a millionth count as equal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTIONS, SEED, CLOSE = 200, 15, 1e-6
MODELS = (
    "gpt2",
    "gpt2-xl",
    "gemma-2-9b",
    "gemma-3-1b",
    "llama-2-7b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "llama-3.2-1b",
    "megatron-22b",
    "mistral-nemo-12b",
    "phi-4",
    "pythia-6.9b",
    "qwen2.5-0.5b",
    "qwen2.5-32b",
    "qwen3-4b",
    "smollm2-135m",
    "smollm2-1.7b",
)
DEVICES = ("h100", "h200", "a100", "a100-40gb", "v100", "b200", "mi300x", "l40s", "rtx4090", "cpu")
COUNTS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128)
RUN_FILE = """\
model: {{model_name_or_path: {model}, init: random}}
data: {{train: [none.jsonl], max_length: {length}, batching: {batching}}}
training:
  {{max_steps: 10, learning_rate: 1e-4, global_batch_size: {rows}, per_device_train_batch_size: 1, optimizer: {optimizer}}}
precision: {{param_dtype: {param}, reduce_dtype: {reduce}, master_dtype: {master}}}
memory: {{compile: {compiled}, loss_chunk_tokens: {chunk}, cpu_offload: {offload}}}
hardware: {{device: {kind}}}
checkpoint: {{output_dir: none}}
"""


def dtypes(draw: random.Random, device: str) -> tuple[str, str, str]:
    """(compute, reduction, stored weights) as people combine them; a V100 has no bf16."""
    pairs = [("bf16", "fp32", "fp32"), ("bf16", "bf16", "fp32"), ("bf16", "bf16", "bf16"), ("fp32", "fp32", "fp32")]
    if device == "v100":
        pairs = [("fp32", "fp32", "fp32"), ("fp16", "fp32", "fp32")]
    return draw.choice(pairs)


def question(draw: random.Random, directory: Path, number: int) -> list[str]:
    """The arguments of one `plan`: three of five by flags, the others by a run file."""
    model, device, count = draw.choice(MODELS), draw.choice(DEVICES), draw.choice(COUNTS)
    length, rows = draw.choice((512, 1024, 2048, 4096, 8192, 32768)), count * draw.choice((1, 2, 4, 8, 12))
    param, reduce, master = dtypes(draw, device)
    compiled, offload = draw.random() < 0.3, draw.random() < 0.15
    arguments = ["--devices", str(count), "--device", device]
    if number % 5 < 3 or device == "v100":
        arguments += ["--model", model, "--max-length", str(length), "--global-batch-size", str(rows)]
        arguments += ["--param-dtype", param, "--reduce-dtype", reduce, "--master-dtype", master]
        arguments += ["--compiled"] * compiled + ["--offload"] * offload
        return arguments + (["--document-length", str(length // 3)] if draw.random() < 0.25 else [])
    settings = {
        "optimizer": draw.choice(("adamw", "sgd", "muon")),
        "batching": draw.choice(("pad", "pack")),
        "chunk": draw.choice(("auto", "0", "1024")),
        "kind": "cpu" if device == "cpu" else "cuda",
        "offload": "params" if offload else "none",
        "compiled": str(compiled).lower(),
    }
    path = directory / f"{number}.yaml"
    sizes = {"model": model, "length": length, "rows": rows, "param": param, "reduce": reduce, "master": master}
    path.write_text(RUN_FILE.format(**settings, **sizes))
    return [str(path), *arguments]


def answer(arguments: list[str]) -> Any:
    """What `plan` says to them; the exit code and the error where it says no."""
    from typer.testing import CliRunner

    from shardwright.cli import app

    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    if not result.stdout.startswith("{"):
        return {"error": type(result.exception).__name__, "exit": result.exit_code}
    said = json.loads(result.stdout)
    for sentences in ("will_not_fix", "would_fit", "path", "model", "job", "illegal"):
        said.pop(sentences, None)
    for refused in said["rejected"]:
        refused.pop("change", None)
        refused["mostly"] = refused["mostly"].split()[-2]
    return said


def answers() -> dict[str, Any]:
    """Every question with its answer, in the order of the draw."""
    draw, found = random.Random(SEED), {}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(QUESTIONS):
            arguments = question(draw, Path(directory), number)
            asked = " ".join(arguments).replace(arguments[0], Path(arguments[0]).name)
            if arguments[0].endswith(".yaml"):
                asked += " | " + " ".join(Path(arguments[0]).read_text().split())
            found[f"{number}: {asked}"] = answer(arguments)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(where, old, new) of everything that is not equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new)):
            yield from differences(*pair, f"{at}[{index}]")
    elif isinstance(old, float | int) and isinstance(new, float | int):
        if abs(old - new) > CLOSE * max(abs(old), abs(new)):
            yield at, old, new
    elif old != new:
        yield at, old, new


def compare(old: Path, new: Path) -> int:
    """Prints the questions whose answers differ, with the first ten differences of each."""
    before, after, changed = json.loads(old.read_text()), json.loads(new.read_text()), 0
    for asked in [*before, *(asked for asked in after if asked not in before)]:
        found = list(differences(before.get(asked), after.get(asked)))
        if not found:
            continue
        changed += 1
        print(f"\n{asked}")
        for where, was, now in found[:10]:
            print(f"  {where:<44} {was!s:>24} -> {now!s:<24}"[:160])
        if len(found) > 10:
            print(f"  and {len(found) - 10} more")
    print(f"{len(before)} answers, {changed} differ")
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="file for the answers")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two files of answers")
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare)
    if given.output is None:
        parser.error("give a file for the answers, or --compare OLD NEW")
    given.output.write_text(json.dumps(answers(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

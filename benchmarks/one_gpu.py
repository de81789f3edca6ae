"""A Llama of about 1B parameters in bf16 on one GPU, blocks compiled, beside a hand-written loop: `make gpu` runs it.

Prints tokens/s, MFU and HFU, and allocated and reserved memory against what the planner says. Same batches, same
weights' sizes, same optimizer; one after the other in the same process, n updates each after a warm-up that compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import scaffold
import torch
import torch.nn.functional as F

from shardwright.arch.config_json import shape_from_config
from shardwright.arch.flops import model_flops, utilisation
from shardwright.mesh.process_group import connect
from shardwright.planner.memory_timeline import peak
from shardwright.planner.problem import Layout, Problem
from shardwright.planner.program import COMPILED
from shardwright.train.utilisation import device_of
from shardwright.units import format_bytes_binary

ROWS, LENGTH, VOCABULARY = 4, 2048, 32000
CONFIG = scaffold.llama(
    LENGTH,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
)


def ours(directory: str, device: torch.device, layout: str) -> scaffold.Update:
    settings = {
        "parallelism__data_parallel": layout,
        "precision__param_dtype": "bf16",
        "memory__compile": True,
    }
    engine = scaffold.make_engine(directory, LENGTH, ROWS, ROWS, device.type, **settings)
    return scaffold.ours(engine, VOCABULARY)


def bare(directory: str, device: torch.device) -> scaffold.Update:
    """Float32 weights, autocast to bf16, compiled blocks, fused AdamW: what a careful user writes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).to(device)
    for block in model.model.layers:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)

    def update(number: int) -> float:
        made = scaffold.random_rows(number, ROWS, LENGTH, VOCABULARY)
        ids, labels = (t.to(device, non_blocking=True) for t in made)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * (LENGTH - 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return update


def measure(make: Callable[[], scaffold.Update], device: torch.device, n: int) -> tuple[float, int, int]:
    """(median seconds, peak allocated, peak reserved) of n updates after a warm-up."""
    update = make()
    for number in range(5):
        update(number)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for number in range(n):
        start = time.perf_counter()
        update(number)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    result = (
        statistics.median(seconds),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
    )
    del update
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20)
    n = parser.parse_args().n
    with connect("cuda") as connection, tempfile.TemporaryDirectory() as directory:
        device = connection.device
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        shape = shape_from_config(CONFIG)
        properties = torch.cuda.get_device_properties(device)
        known = device_of(properties.name, properties.total_memory)
        cases = {name: (lambda name=name: ours(directory, device, name)) for name in ("ddp", "zero3")}
        cases["bare torch"] = lambda: bare(directory, device)
        print(f"{properties.name}, torch {torch.__version__}, {ROWS} rows of {LENGTH}, bf16, compiled blocks, n={n}")
        print("| loop | tokens/s | MFU | allocated | planned | reserved | planned reserved |")
        print("|---|---|---|---|---|---|---|")
        problem = Problem(shape, LENGTH, ROWS, program=COMPILED)
        for name, make in cases.items():
            seconds, allocated, reserved = measure(make, device, n)
            rate = ROWS * LENGTH / seconds
            flops = model_flops(shape, LENGTH).total
            mfu = f"{utilisation(flops, rate, 1, known.peak('bf16')):.1%}" if known else "n/a"
            planned = ["n/a", "n/a"]
            if name != "bare torch":
                layout = Layout(data_parallel=name, microbatch_rows=ROWS)  # type: ignore[arg-type]
                expected = peak(problem, layout)
                planned = [format_bytes_binary(expected.allocated), format_bytes_binary(expected.reserved)]
            print(
                f"| {name} | {rate:,.0f} | {mfu} | {format_bytes_binary(allocated)} | {planned[0]} "
                f"| {format_bytes_binary(reserved)} | {planned[1]} |",
                flush=True,
            )
        print("MFU: full attention (not halved for causality), head in, embedding lookup out.")


if __name__ == "__main__":
    main()

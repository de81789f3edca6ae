"""Peak memory and time of the loss: in chunks of targets against plain cross entropy on whole fp32 logits.

One process: hidden states [tokens, hidden] and a head [vocabulary, hidden] that both need gradients, forward and backward.

- `plain`: F.linear, widened to float32, F.cross_entropy(reduction="sum").
- `chunked`: as the runtime makes it, gradients in forward.
- `recomputed`: the same with logits made anew in backward, as under the gpipe schedule.

Memory is the peak of bytes that torch's CPU allocator had given out above the start, from the allocation events of
torch.profiler: with what kernels allocate inside, without what is there before (hidden states and head). Times are CPU seconds
of the process, system time for new pages included (wall time also depends on what else the machine does): medians of
interleaved repetitions. `masked` is the share of positions whose label is -100.

    python benchmarks/loss_memory.py                       # 4,096 tokens, vocabulary 128,000, hidden 1,024, fp32
    python benchmarks/loss_memory.py --dtype bf16 --record
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from shardwright.layout.loss import loss_chunk_tokens
from shardwright.loss.chunked_loss import LossOptions, Targets, chunked_cross_entropy_sum
from shardwright.models.torch_dtypes import TORCH_DTYPES

RECORDS = Path(__file__).with_name("results.jsonl")


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most bytes that `step` had allocated at once, by the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events: list[tuple[int, int]] = []
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = most = 0
    for _, size in sorted(events):
        held += size
        most = max(most, held)
    return most


def make_steps(args: argparse.Namespace, masked: float) -> dict[str, Callable[[], float]]:
    g = torch.Generator().manual_seed(0)
    dtype = TORCH_DTYPES[args.dtype]
    x = torch.randn(args.tokens, args.hidden, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(args.vocabulary, args.hidden, generator=g) * args.hidden**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, args.vocabulary, (args.tokens,), generator=g)
    labels[torch.rand(args.tokens, generator=g) < masked] = -100
    chunk = args.chunk or loss_chunk_tokens(args.vocabulary, "cpu", args.dtype)

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels, ignore_index=-100, reduction="sum")

    def chunked(recompute: bool) -> Tensor:
        targets = Targets.of(labels, None, chunk, x.device, fixed=False)
        return chunked_cross_entropy_sum(x, w, None, targets, LossOptions(recompute=recompute))

    def step(loss: Callable[[], Tensor]) -> Callable[[], float]:
        def run() -> float:
            x.grad = w.grad = None
            value = loss()
            (value / args.tokens).backward()
            x.grad = w.grad = None
            return value.item()

        return run

    found = {"plain": step(plain), "chunked": step(lambda: chunked(False))}
    if not args.short:
        found["recomputed"] = step(lambda: chunked(True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=0, help="0: as auto chooses")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-n", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="without `recomputed`")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chunk = args.chunk or loss_chunk_tokens(args.vocabulary, "cpu", args.dtype)
    print(
        f"{args.tokens:,} tokens, vocabulary {args.vocabulary:,}, hidden {args.hidden:,}, {args.dtype}, "
        f"chunks of {chunk} tokens, {args.threads} threads, n = {args.n}"
    )
    for masked in (0.0, 0.5):
        steps = make_steps(args, masked)
        values = {name: step() for name, step in steps.items()}  # and warm-up
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.n):
            for name, step in steps.items():
                start = time.process_time()
                step()
                seconds[name].append(time.process_time() - start)
        memory = {name: peak_bytes(step) for name, step in steps.items()}
        for name in steps:
            own, ratio = seconds[name], median(seconds["plain"]) / median(seconds[name])
            print(
                f"masked {masked:.0%}  {name:11} {memory[name] / 1e6:8.0f} MB ({memory['plain'] / memory[name]:.2f}x less)"
                f"  {median(own):.2f} CPU s ({min(own):.2f} to {max(own):.2f}; {ratio:.2f}x the speed of plain)"
                f"  loss {values[name]:.4f}"
            )
            if args.record:
                row = {
                    "benchmark": "loss_memory", "loss": name, "masked": masked, "tokens": args.tokens,
                    "vocabulary": args.vocabulary, "hidden": args.hidden, "dtype": args.dtype, "chunk": chunk,
                    "n": args.n, "bytes": memory[name], "seconds": median(own), "least": min(own), "most": max(own),
                    "memory_ratio": memory["plain"] / memory[name], "speed_ratio": ratio,
                }  # fmt: skip
                with RECORDS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Ways to keep packed documents apart: python benchmarks/document_attention.py [-n 7] [--widths 256 1024] [--bf16] [--record]

Forward and backward of the core attention alone on the CPU, in turns, for mixes of lengths at several widths of rows. `mask`:
one call with a T x T mask, made once. `document`: a call for each document. `ours`: a call for each length that occurs
(attention/document_attention.py). `causal`: one call that lets documents see each other, as rows of one document cost.
Ratios are processor seconds of the others over those of `ours`, median of the turns and their spread: above 1 ours is
faster. Processor time on one thread, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from shardwright.attention.document_attention import document_attention  # noqa: E402
from shardwright.attention.packed_rows import PackedRows  # noqa: E402

SIZES = ((256, 8, 8, 4, 32), (1024, 2, 8, 4, 64), (4096, 1, 8, 4, 64))
"""(tokens of a row, rows, query heads, kv heads, head width)."""
MIXES: dict[str, Callable[[int, random.Random], int]] = {
    "one document": lambda width, draw: width,
    "two halves": lambda width, draw: width // 2,
    "log-normal, mean 645": lambda width, draw: max(1, int(draw.lognormvariate(6.0, 0.97))),
    "log-normal, mean 100": lambda width, draw: max(1, int(draw.lognormvariate(4.2, 0.9))),
    "5 to 40": lambda width, draw: draw.randint(5, 40),
    "half a row, and 5 to 60": lambda width, draw: width // 2 if draw.random() < 0.05 else draw.randint(5, 60),
}


def documents(mix: str, width: int, rows: int) -> PackedRows:
    """Full rows of documents with the lengths of `mix`."""
    draw, numbers = random.Random(0), torch.zeros(rows, width, dtype=torch.int32)
    for row in range(rows):
        at = number = 0
        while at < width:
            length = min(MIXES[mix](width, draw), width - at)
            numbers[row, at : at + length] = number
            at, number = at + length, number + 1
    return PackedRows(numbers, torch.device("cpu"))


def by_document(rows: PackedRows) -> Callable[..., Tensor]:
    """A call for each document, written into its place."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for row, start, end in rows.spans:
            own = (t[row : row + 1, :, start:end] for t in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True))
        return torch.cat(parts, 2).transpose(1, 2).view(len(q), -1, *q.shape[1::2])

    return run


def ways(rows: PackedRows) -> dict[str, Callable[..., Tensor]]:
    """Each way, as a function of queries, keys and values; all give [B, T, N, H]."""
    numbers = rows.documents
    seen = (numbers[:, None, :, None] == numbers[:, None, None]).tril()
    module = nn.Module()
    return {
        "ours": lambda q, k, v: document_attention(module, q, k, v, None, documents=rows)[0],
        "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(
            1, 2
        ),
        "document": by_document(rows),
        "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        ),
    }


def measured(size: tuple[int, int, int, int, int], mix: str, turns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of each way in each turn; raises where two of them disagree."""
    width, count, heads, kv_heads, head = size
    rows = documents(mix, width, count)
    functions, seconds = ways(rows), {}

    def drawn(n: int) -> Tensor:
        return torch.randn(count, width, n, head).to(dtype).transpose(1, 2).requires_grad_()

    inputs = [drawn(n) for n in (heads, kv_heads, kv_heads)]
    with torch.no_grad():
        outs = {name: function(*inputs) for name, function in functions.items()}
    allowed = 1e-5 if dtype == torch.float32 else 3e-2
    assert all(torch.allclose(outs[name], outs["mask"], atol=allowed) for name in ("ours", "document"))
    grad = torch.randn_like(outs["mask"])
    for turn in range(turns + 1):
        for name, function in functions.items():
            begun = time.process_time()
            torch.autograd.grad(function(*inputs), inputs, grad)
            if turn:
                seconds.setdefault(name, []).append(time.process_time() - begun)
    return {"documents": len(rows.spans), "calls": len(rows.groups), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=7)
    parser.add_argument("--widths", type=int, nargs="+", default=[size[0] for size in SIZES])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "width  mix                       documents  calls  ours, ms  mask/ours          document/ours      causal/ours"
    )
    for size in (size for size in SIZES if size[0] in options.widths):
        for mix in MIXES:
            found = measured(size, mix, options.n, torch.bfloat16 if options.bf16 else torch.float32)
            seconds = found.pop("seconds")
            counts = f"{size[0]:>5}  {mix:<24}  {found['documents']:>9}  {found['calls']:>5}"
            line = f"{counts}  {1e3 * median(seconds['ours']):8.1f}"
            for name in ("mask", "document", "causal"):
                ratios = [other / own for own, other in zip(seconds["ours"], seconds[name])]
                found[f"{name}_ratio"] = median(ratios)
                line += f"  {median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            print(line, flush=True)
            if options.record:
                record = {
                    "benchmark": "document_attention",
                    "width": size[0],
                    "mix": mix,
                    "bf16": options.bf16,
                    "n": options.n,
                    **found,
                }
                with open(HERE / "results.jsonl", "a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

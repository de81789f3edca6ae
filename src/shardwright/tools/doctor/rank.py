"""One rank of the doctor: `python -m shardwright.tools.doctor.rank RESULT.json DEVICE`.

All ranks compute at once, as in training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardwright.launch import finish, worker_main
from shardwright.measure import clock
from shardwright.mesh.process_group import Connection, connect
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.tools.doctor.fit import BLOCK, Measured, Product, Transfer

SECONDS = 0.2
"""Each item is repeated for this long, at least five times."""
DTYPES = ("fp32", "bf16", "fp64")
SHAPES = {
    "cpu": ((128, 128, 128), (256, 1024, 256), (512, 512, 512), (1024, 512, 512), (1024, 1024, 1024), (2048, 512, 128)),
    "cuda": ((512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 1024)),
}
PAYLOADS = {"cpu": (4096, 262144, 4 * 2**20, 16 * 2**20), "cuda": (4096, 2**20, 32 * 2**20, 256 * 2**20)}
HEADS, HEAD_DIM, LENGTH = 4, 64, 512
COLD_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
"""Total bytes of the operands that are used in turn, so that they come from memory as in training, not from a cache."""
ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


class Stopwatch:
    """Times work that all ranks do at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """The median seconds of `work` on the slowest rank. Collective.

        The work is repeated without a pause, so that a queue on the way fills up and its first free slots do not count.
        """
        work()
        self._synchronize()
        dist.barrier()
        start = clock.now()
        work()
        self._synchronize()
        repeats = torch.tensor(max(5.0, min(400.0, SECONDS / max(clock.now() - start, 1e-7))))
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
        found = []
        for _ in range(int(repeats)):
            start = clock.now()
            work()
            self._synchronize()
            found.append(clock.now() - start)
        slowest = torch.tensor(median(found), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()


def in_turn(work: Callable[..., object], operands: Sequence[tuple[torch.Tensor, ...]]) -> Callable[[], object]:
    """`work` on the next operands at each call."""
    turns = cycle(operands)
    return lambda: work(*next(turns))


def products(watch: Stopwatch) -> dict[str, list[Product]]:
    """Matrix products by dtype and size: a row of activations times a transposed weight, as in a linear layer."""
    found: dict[str, list[Product]] = {}
    kind = watch.device.type
    for name in DTYPES:
        found[name], dtype = [], TORCH_DTYPES[name]
        for m, n, k in SHAPES[kind]:
            sets = max(2, min(16, COLD_BYTES[kind] // ((m * k + k * n) * dtype.itemsize)))
            operands = [
                tuple(torch.randn(*size, device=watch.device).to(dtype) for size in ((m, k), (n, k)))
                for _ in range(sets)
            ]
            seconds = watch.seconds(in_turn(F.linear, operands))
            found[name].append(Product(m, n, k, seconds))
    return found


def copy_bandwidth(watch: Stopwatch) -> float:
    """Bytes/s that an element-wise kernel reads and writes, with operands too large for a cache."""
    kind = watch.device.type
    size = ELEMENTS[kind]
    operands = [
        tuple(torch.ones(size, device=watch.device) for _ in range(3))
        for _ in range(max(2, COLD_BYTES[kind] // (12 * size)))
    ]
    return 12 * size / watch.seconds(in_turn(lambda a, b, out: torch.mul(a, b, out=out), operands))


def blocks(watch: Stopwatch) -> dict[str, float]:
    """Seconds of forward and backward of some blocks without attention, by dtype: products as they run in a training step."""
    found = {}
    for name in ("fp32", "bf16"):
        dtype, b = TORCH_DTYPES[name], BLOCK[watch.device.type]
        tensors = [
            [torch.randn(*size, device=watch.device).mul_(0.02).to(dtype).requires_grad_() for size in b.weights]
            for _ in range(b.count)
        ]
        x = torch.randn(b.tokens, b.hidden, device=watch.device).to(dtype)
        leaves = [w for weights in tensors for w in weights]

        def step(x: torch.Tensor = x, tensors: list[Any] = tensors, leaves: list[torch.Tensor] = leaves) -> None:
            for weights in tensors:
                x = _block(x, *weights)
            x.sum().backward()
            for leaf in leaves:
                leaf.grad = None

        found[name] = watch.seconds(step)
    return found


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _block(x: torch.Tensor, q: Any, k: Any, v: Any, o: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    y = _norm(x)
    x = x + F.linear(F.linear(y, q) + F.linear(y, k) + F.linear(y, v), o)
    y = _norm(x)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def attention(watch: Stopwatch) -> tuple[tuple[float, float], float]:
    """((forward, backward) seconds of causal attention, FLOPs of its forward pass)."""
    size, dtype = ((1, HEADS, LENGTH, HEAD_DIM), torch.float32 if watch.device.type == "cpu" else torch.bfloat16)
    q, k, v = (torch.randn(size, device=watch.device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        first = watch.seconds(forward)
    both = watch.seconds(lambda: forward().sum().backward())
    return (first, max(both - first, first)), 2.0 * HEADS * LENGTH * LENGTH * HEAD_DIM


def transfers(watch: Stopwatch) -> Iterator[Transfer]:
    """All-gathers, all-reduces and all-to-alls of several sizes over all ranks."""
    ranks, device = dist.get_world_size(), watch.device
    if ranks == 1:
        return
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
    for payload in PAYLOADS[device.type]:
        count = payload // 4 // ranks * ranks
        whole = torch.zeros(count, device=device)
        piece, other = whole[: count // ranks].clone(), torch.empty_like(whole)
        share, size = (ranks - 1) / ranks * whole.nbytes, whole.nbytes
        for name, passes, work in (
            ("all-gather", 1, partial(gather, other, piece)),
            ("all-to-all", 1, partial(dist.all_to_all_single, other, whole)),
            ("all-reduce", 2, partial(dist.all_reduce, whole)),
        ):
            yield Transfer(name, passes * (ranks - 1), passes * share, size, watch.seconds(work))


def transfer_load(watch: Stopwatch) -> float:
    """Seconds of compute that are lost in each second of a concurrent collective, on the CPU: sockets need a core too."""
    if dist.get_world_size() == 1 or watch.device.type != "cpu":
        return 0.0
    operands = [(torch.randn(512, 512), torch.randn(512, 512)) for _ in range(COLD_BYTES["cpu"] // 2**21 // 2)]
    work, payload = in_turn(F.linear, operands), torch.zeros(PAYLOADS["cpu"][-1] // 4)
    one = watch.seconds(work)
    alone = watch.seconds(partial(dist.all_reduce, payload))
    count = max(3, round(3 * SECONDS / alone))
    dist.barrier()
    start, done = clock.now(), 0
    works = [dist.all_reduce(payload, async_op=True) for _ in range(count)]
    while not all(work is None or work.is_completed() for work in works):
        work()
        done += 1
    seconds = clock.now() - start
    one = (one + watch.seconds(work)) / 2
    lost = torch.tensor((seconds - done * one) / (count * alone), dtype=torch.float64)
    dist.all_reduce(lost)
    return min(max(lost.item() / dist.get_world_size(), 0.0), 1.0)


def measured(connection: Connection) -> Measured:
    """Everything that a rank measures. Collective."""
    device, watch = connection.device, Stopwatch(connection.device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = "cpu", psutil.virtual_memory().total // connection.rank_info.local_world_size
    found, flops = attention(watch)
    return Measured(
        device.type,
        name,
        dist.get_backend() if device.type == "cpu" else "nccl",
        dist.get_world_size(),
        connection.threads,
        memory,
        products(watch),
        copy_bandwidth(watch),
        found,
        flops,
        list(transfers(watch)),
        blocks(watch),
        transfer_load(watch),
    )


def main() -> int:
    with connect(sys.argv[2], 60) as connection, torch.random.fork_rng():
        result = measured(connection)
        if connection.rank_info.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(asdict(result)), encoding="utf-8")
        dist.barrier()
    return 0


if __name__ == "__main__":
    finish(worker_main(main))

"""Run one function on several gloo ranks and hand back what each returned."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.started import PATIENCE

# Ranks are forked from one process that has imported these and done nothing with them: a rank then starts in
# a tenth of a second, where importing torch and Transformers anew takes several.
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
THREADS = int(os.environ.get("SHARDWRIGHT_TEST_THREADS", "1"))
"""Of a rank, and of an oracle; tests/matrix.py asks for more."""
SECONDS_FOR_THE_OTHERS = 2.0  # after the first failure, so that the rank that failed first is shown with its peers


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90 * PATIENCE) -> list[Any]:
    """What `function(*args)` returned on each of `world_size` ranks, in the order of ranks.

    `function` must stand at the top of a module. In it the gloo group is ready (`dist.get_rank()` works) and
    torch has THREADS threads. When a rank raises or dies, or after `timeout` seconds, all ranks are ended and an
    `AssertionError` shows the traceback of the ranks that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world_size, str(Path(directory) / "store"), timeout)
            processes.append(context.Process(target=_rank, args=(theirs, place, function, args), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            results, failures = _collect(processes, pipes, timeout)
        finally:
            for process in processes:
                process.join(5.0 if process.exitcode is None and not sys.exc_info()[0] else 0.1)
                if process.exitcode is None:
                    process.kill()
                    process.join()
    if failures:
        raise AssertionError("\n".join(f"rank {rank} failed:\n{text}" for rank, text in failures.items()))
    return [results[rank] for rank in range(world_size)]


def _collect(processes: list[Any], pipes: list[Connection], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and tracebacks by rank, as they come; ends all ranks soon after the first failure."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout
    while open_pipes:
        ready = wait(list(open_pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                failures = dict.fromkeys(open_pipes, f"no result after {timeout:.0f} s")
            break
        for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
            try:
                done, payload = open_pipes.pop(rank).recv()
            except EOFError:
                processes[rank].join(2.0)
                done, payload = (
                    False,
                    f"ended with exit code {processes[rank].exitcode} before it had a result",
                )
            if done:
                results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + SECONDS_FOR_THE_OTHERS)
                failures[rank] = payload
    if failures:
        for process in processes:
            process.kill()
    return results, failures


def _rank(
    pipe: Connection, place: tuple[int, int, str, float], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, world_size, store, timeout = place
    torch.set_num_threads(THREADS)
    faulthandler.enable()
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        payload = io.BytesIO()
        torch.save(function(*args), payload)
        pipe.send((True, payload.getvalue()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    dist.destroy_process_group()

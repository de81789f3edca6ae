"""Memory of this process, on the accelerator and on the host: its peaks, what is allocated now, and what ran out."""

from __future__ import annotations

import ctypes
import resource
import sys
import traceback
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.torch_private import storage_id

REST = "activations and all else"
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")
"""Parts of the RuntimeErrors of torch's CPU allocators (2.11 to 2.14), which have no class of their own."""

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_host_bytes() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def peak_device_bytes(device: torch.device) -> tuple[int, int] | None:
    """(allocated, reserved) peaks of torch's allocator on an accelerator; None on the CPU, where torch keeps none."""
    if device.type == "cpu":
        return None
    stats = torch.accelerator.memory_stats(device)
    return int(stats["allocated_bytes.all.peak"]), int(stats["reserved_bytes.all.peak"])


class _MallocFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that are allocated now: by torch on an accelerator, by the whole process on the CPU.

    None on a CPU without glibc's `mallinfo2`.
    """
    if device.type != "cpu":
        return int(torch.accelerator.memory_stats(device)["allocated_bytes.all.current"])
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    ask.restype = _MallocFigures
    figures = ask()
    return int(figures.uordblks + figures.hblkhd)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed: of torch's allocators, or of Python's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def in_backward(error: BaseException) -> bool:
    """Whether `error` came out of a backward pass."""
    names = ("backward", "_engine_run_backward")
    return any(frame.name in names for frame in traceback.extract_tb(error.__traceback__))


def bytes_by_group(groups: Mapping[str, Iterable[Tensor]], total: int | None) -> dict[str, int]:
    """Bytes of the storages of `groups`, largest first; a storage counts once, in the first group that holds it.

    total: all allocated bytes. Those of no group are `REST`: tensors that autograd has saved cannot be listed.
    """
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, tensors in groups.items():
        for tensor in tensors:
            plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (storage := storage_id(plain)) not in seen:
                seen.add(storage)
                found[name] = found.get(name, 0) + plain.untyped_storage().nbytes()
    if total is not None:
        found[REST] = max(0, total - sum(found.values()))
    return {name: size for name, size in sorted(found.items(), key=lambda part: -part[1]) if size}

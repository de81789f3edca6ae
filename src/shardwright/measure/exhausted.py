"""Memory that ran out: whether an error says so, and what was alive by category."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.torch_private import storage_id

REST = "activations and all else"
_SAID = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed: of torch's allocators, or of Python's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def in_backward(error: BaseException) -> bool:
    """Whether `error` came out of a backward pass."""
    names = ("backward", "_engine_run_backward")
    return any(frame.name in names for frame in traceback.extract_tb(error.__traceback__))


def alive(groups: Mapping[str, Iterable[Tensor]], total: int | None) -> dict[str, int]:
    """Bytes of the storages of `groups`, each counted once, in the first group that holds it; largest first.

    total: all that was allocated; what no group holds is `REST`, since tensors that autograd has saved cannot be listed.
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

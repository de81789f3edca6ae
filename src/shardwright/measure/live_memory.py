"""Memory of tensors over an update, by phase and by category, seen where torch dispatches: the same on CPU and GPU.

A storage counts from the operator that makes it until it is freed. A storage that `fully_shard` empties and refills counts with
its current size. Not seen: the workspace of a kernel, what C++ allocates without an operator, tensors of other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.torch_private import OWN_OPERATORS, TorchDispatchMode, current_backward, storage_id, tree_leaves


@dataclass
class _Block:
    """One storage."""

    size: int
    """Bytes now."""
    operator: str
    phase: str
    width: int
    """Last dimension of the tensor that the operator made."""
    task: int
    """Autograd's number of the backward pass in which the storage was made, -1 outside of a backward pass."""
    category: str = ""
    emptied: bool = False


@dataclass(frozen=True)
class MemoryPeak:
    """The moment with the most bytes alive."""

    bytes: int
    operator: str
    """The operator that made the last block."""
    phase: str
    composition: dict[str, int]
    """Bytes by the planner's categories."""


class LiveMemory(TorchDispatchMode):
    """A context in which storages are counted; the same context can be entered again.

    vocabulary: width of logits, by which they are recognised. device: kind of device that is counted.
    """

    def __init__(self, vocabulary: int = 0, device: str = "cpu") -> None:
        super().__init__()
        self.vocabulary, self.device = vocabulary, device
        self.live, self.phase = 0, ""
        self._blocks: dict[int, _Block] = {}
        self._refs: dict[int, Any] = {}
        self._number = self._most = 0
        self._at: tuple[str, str, int, dict[int, int]] = ("", "", -1, {})
        self._ever: dict[int, _Block] = {}
        self.peak_by_phase: dict[str, int] = {}
        self.samples: list[tuple[int, str, int]] = []  # (number of the operator, phase, bytes) at each new peak

    # What happens to storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OWN_OPERATORS:
            with self._inside():
                return OWN_OPERATORS[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._number += 1
        for tensor in tree_leaves(result):
            if type(tensor) is Tensor and tensor.device.type == self.device:
                self._made(tensor, func)
        return result

    def _made(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._refs and self._refs[key]() is not None:
            return
        width = tensor.shape[-1] if tensor.dim() else 0
        task = current_backward()
        self._add(storage, _Block(storage.nbytes(), str(func), self._now(), width, task))

    def _add(self, storage: Any, block: _Block) -> None:
        key = storage_id(storage)
        self._refs[key] = ref(storage, partial(self._freed, key, block))
        self._blocks[key] = block
        self._changed(block.size, block)

    def _freed(self, key: int, block: _Block, _: object) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key], self._refs[key]
            self.live -= block.size

    def _resized(self, storage: Any) -> None:
        block = self._blocks.get(storage_id(storage))
        if block is not None:
            change, block.size = storage.nbytes() - block.size, storage.nbytes()
            block.emptied = block.emptied or block.size == 0
            self._changed(change, block)

    def _changed(self, change: int, block: _Block) -> None:
        self.live += change
        if change <= 0:
            return
        phase = self._now()
        self._note_phase(phase)
        if self.live > self._most:
            self._most = self.live
            alive = {id(b): b.size for b in self._blocks.values()}
            self._ever.update((id(b), b) for b in self._blocks.values())  # kept alive, so that no id is used twice
            self._at = (block.operator, phase, current_backward(), alive)

    def _note_phase(self, phase: str) -> None:
        if self.live > self.peak_by_phase.get(phase, 0):
            self.peak_by_phase[phase] = self.live
            self.samples.append((self._number, phase, self.live))

    def _now(self) -> str:
        if self.phase == "forward" and current_backward() != -1:
            return "backward"
        return self.phase

    @contextmanager
    def _inside(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __enter__(self) -> LiveMemory:
        self._watch = _resizes_reported(self._resized)
        self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watch.__exit__(*error)

    # What is asked

    def clear(self) -> None:
        """Forgets peaks and samples; living storages stay counted."""
        self.peak_by_phase, self.samples, self._most = {}, [], 0
        self._at = ("", "", -1, {})
        self._ever = {}

    def enter(self, phase: str) -> None:
        """Starts `phase`; backward passes within `forward` are recognised without a call."""
        self.phase = phase
        self._note_phase(phase)

    def hold(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made before this context was entered."""
        for storage in _storages(tensors, self.device):
            if storage_id(storage) not in self._blocks:
                self._add(storage, _Block(storage.nbytes(), "", self.phase, 0, -1, category))

    def label(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Sets the category of the storages of `tensors`; the first category of a storage stays."""
        for storage in _storages(tensors, self.device):
            block = self._blocks.get(storage_id(storage))
            if block is not None and not block.category:
                block.category = category

    def peak(self) -> MemoryPeak:
        """The peak since `clear`."""
        operator, phase, task, alive = self._at
        sums: dict[str, int] = {}
        for key, size in alive.items():
            name = self._category(self._ever[key], task)
            sums[name] = sums.get(name, 0) + size
        parts = sorted(sums.items(), key=lambda part: -part[1])
        return MemoryPeak(self._most, operator, phase, {name: size for name, size in parts if size})

    def _category(self, block: _Block, task: int) -> str:
        if block.category:
            return block.category
        if block.emptied or "all_gather" in block.operator:
            return "gathered parameters"
        if any(word in block.operator for word in ("reduce_scatter", "chunk_cat", "all_to_all")):
            return "unreduced gradients"
        if block.task not in (-1, task):
            return "unreduced gradients"  # the block outlived the backward pass that made the block
        if self.vocabulary and block.width == self.vocabulary:
            return "logits and loss"
        return "activations" if block.phase == "forward" else "recomputation and workspace"


def _storages(tensors: Iterable[Tensor], device: str) -> Iterator[Any]:
    for tensor in tensors:
        plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if plain.device.type == device:
            yield plain.untyped_storage()


@contextmanager
def _resizes_reported(changed: Callable[[Any], None]) -> Iterator[None]:
    """Calls `changed(storage)` after each resize of a storage.

    torch (2.11 to 2.14) has no operator for `fully_shard`'s `resize_` of a storage, so no dispatch mode sees the call.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = before(storage, size)
        changed(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

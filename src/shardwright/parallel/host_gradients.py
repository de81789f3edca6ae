"""Gradients of several microbatches where shards are on the host: summed there, while the GPU goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.backends.backend import Reductions
from shardwright.mesh.shard_geometry import local_tensor
from shardwright.torch_private import fsdp_units


class HostReductions(Reductions):
    """The reductions of one model whose shards are on the host.

    `fully_shard` copies a reduced gradient to pinned memory without a wait only where the parameter has none yet; else it
    copies to pageable memory, and backward waits for each copy and each sum (torch 2.11 to 2.14). So the gradients of a
    microbatch are taken away before the next one, and a thread adds them to the sum. The order of the sum stays.
    """

    def __init__(self, modules: Sequence[FSDPModule], replicas: dist.ProcessGroup | None) -> None:
        super().__init__(modules, replicas)
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "host gradients")
        self._adding: Future[None] | None = None

    def begin(self, last: bool) -> None:
        super().begin(last)
        self._take()

    def finish(self) -> None:
        super().finish()
        if not self._sums:
            return
        self._take()
        self._wait()
        for p, total in self._sums.items():
            p.grad = total
        self._sums.clear()

    def _take(self) -> None:
        """Takes the gradients of the last backward away. `fully_shard` has waited for their copies at its end."""
        self._wait()
        sums, new = [], []
        for _, unit in fsdp_units(self._modules):
            for p in (held.sharded_param for held in unit.fsdp_params):
                if p.grad is None:
                    continue
                if p in self._sums:
                    sums.append(local_tensor(self._sums[p]))
                    new.append(local_tensor(p.grad))
                else:
                    self._sums[p] = p.grad
                p.grad = None
        if new:
            self._adding = self._thread.submit(_add, sums, new)

    def _wait(self) -> None:
        if self._adding is not None:
            self._adding.result()
            self._adding = None


@torch.no_grad()
def _add(sums: list[Tensor], new: list[Tensor]) -> None:
    torch._foreach_add_(sums, new)

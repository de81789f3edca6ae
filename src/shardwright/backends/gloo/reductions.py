"""Reduce-scatters of `fully_shard` on gloo that return at once: an all-to-all of pieces, summed here when they have come.

gloo's own reduce-scatter sends twice what is needed and has no stream to run on: backward waits for it. Here a unit's
gradients are on their way while backward goes on, and each rank sums the pieces of its shard in the order of ranks, in
float32 or wider whatever dtype they travelled in. NCCL has streams: with it, `fully_shard` is left as it is.

What `fully_shard` holds as gradients before `Wire.finish` is memory that is filled later. It must not be read, so
gradients of earlier microbatches are kept aside and added here, and replicas are summed here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.layout.zero import EXCHANGED
from shardwright.torch_private import fsdp_units


def runs_on_gloo(mesh: DeviceMesh) -> bool:
    """Whether shards of `mesh` (its last dimension) are exchanged by gloo, between more than one rank."""
    group = mesh.get_group(mesh.ndim - 1)
    return mesh.device_type == "cpu" and dist.get_backend(group) == "gloo" and group.size() > 1


@dataclass
class _Arriving:
    """One unit's gradients on their way. earlier: gradients of earlier microbatches, to be added."""

    unit: UnitReduce
    work: dist.Work
    sent: Tensor
    received: Tensor
    output: Tensor
    earlier: list[tuple[nn.Parameter, DTensor]]
    replicated: bool


class Wire:
    """The reductions of one `Sharded` that are under way, in the order in which all ranks send them.

    last: this is the update's last microbatch, after which replicas are summed.
    """

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self.last = True
        self._replicas = replicas
        self._arriving: deque[_Arriving] = deque()
        self._replicating: list[tuple[dist.Work | None, Tensor, Tensor]] = []

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Takes over the reductions of every unit of `modules`, and lets gathers run ahead."""
        for module, unit in fsdp_units(modules):
            module.set_custom_reduce_scatter(UnitReduce(self, unit))  # type: ignore[arg-type]  # it calls, no more
            unit.unshard_async_op = True
            if self._replicas is not None:
                unit.mesh_info.replicate_process_group = None  # it would sum what has not come yet

    def send(self, unit: UnitReduce, output: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Starts the exchange of `sent` [ranks x shard]; `output` [shard] is filled later."""
        while len(self._arriving) >= EXCHANGED or any(one.unit is unit for one in self._arriving):
            self._take()
        earlier = [(p, p.grad) for p in unit.parameters() if isinstance(p.grad, DTensor)]
        for p, _ in earlier:
            p.grad = None
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        assert work is not None
        replicated = self.last and self._replicas is not None
        self._arriving.append(_Arriving(unit, work, sent, received, output, earlier, replicated))

    @torch.no_grad()
    def _take(self) -> None:
        """Waits for the oldest exchange and sums it.

        Called at the same points of the program on all ranks, never when something happens to have come: replicas are
        summed from here, by a group that other stages of a pipeline use too.
        """
        one = self._arriving.popleft()
        one.work.wait()
        pieces = one.received.view(-1, one.output.numel())
        wide = torch.promote_types(pieces.dtype, torch.float32)
        if one.output.dtype == wide:
            torch.sum(pieces, 0, dtype=wide, out=one.output)
        else:
            one.output.copy_(pieces.sum(0, dtype=wide))
        _add(one.earlier)
        if one.replicated:
            travelling = one.output.to(pieces.dtype)
            work = dist.all_reduce(travelling, group=self._replicas, async_op=True)
            self._replicating.append((work, travelling, one.output))

    @torch.no_grad()
    def finish(self) -> None:
        """Completes every gradient. Raises what gloo raises when a rank is gone or too late."""
        while self._arriving:
            self._take()
        for work, travelled, output in self._replicating:
            if work is not None:
                work.wait()
            if travelled is not output:
                output.copy_(travelled)
        self._replicating.clear()


def _add(earlier: Sequence[tuple[nn.Parameter, DTensor]]) -> None:
    """Adds gradients of earlier microbatches to those that have come for the same parameters."""
    sums, addends = [], []
    for p, gradient in earlier:
        if p.grad is None:
            p.grad = gradient
        else:
            assert isinstance(p.grad, DTensor)
            sums.append(p.grad.to_local())
            addends.append(gradient.to_local())
    if sums:
        torch._foreach_add_(sums, addends)


class UnitReduce:
    """What `set_custom_reduce_scatter` is given for one unit: allocates both sides, then sends through the `Wire`."""

    def __init__(self, wire: Wire, unit: Any) -> None:
        self._wire, self._unit, self._sent_is_made = wire, unit, False

    def parameters(self) -> list[nn.Parameter]:
        """The unit's sharded parameters, as they are now: filling weights makes new ones."""
        return [one.sharded_param for one in self._unit.fsdp_params]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, in the reduce dtype, then for the sum, in that of the gradients.

        `fully_shard` asks in this order. It would convert a sum in another dtype at once, before it is there.
        """
        if self._sent_is_made:
            dtype = next(p.dtype for p in self.parameters() if p.requires_grad)
        self._sent_is_made = not self._sent_is_made
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Starts a reduce-scatter SUM of `input_tensor`."""
        self._wire.send(self, output_tensor, input_tensor, group)

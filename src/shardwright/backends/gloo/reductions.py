"""Reduce-scatters of `fully_shard` on gloo that return at once: an all-to-all of pieces, summed here when they have come.

gloo's own reduce-scatter sends twice what is needed and has no stream to run on: backward waits for it. Here the gradients
of a unit travel while backward goes on, and each rank sums the pieces of its shard in the order of ranks, in float32 or
wider whatever dtype they travelled in.

What `fully_shard` holds as gradients before `finish` is memory that is filled later, and must not be read. So gradients of
earlier microbatches are kept aside and added here, and replicas are summed here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.backends.backend import Reductions
from shardwright.backends.facts import GLOO_FACTS
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import fsdp_units


@dataclass
class _Exchange:
    """The gradients of one unit on their way.

    sent: [ranks x shard], kept until it has left.
    received: [ranks x shard], the pieces of this rank's shard.
    output: [shard], what `fully_shard` takes for the gradient.
    earlier: gradients of earlier microbatches, to be added.
    replicated: whether replicas are summed after it.
    """

    unit: UnitReduceScatter
    work: dist.Work
    sent: Tensor
    received: Tensor
    output: Tensor
    earlier: list[tuple[nn.Parameter, DTensor]]
    replicated: bool


class ExchangedReductions(Reductions):
    """The reductions of one model that are under way, in the order in which all ranks send them."""

    def __init__(self, modules: Sequence[Any], replicas: dist.ProcessGroup | None) -> None:
        """Takes over the reductions of every unit of `modules`, and lets gathers run ahead."""
        super().__init__(modules, replicas)
        self._last = True
        self._exchanges: deque[_Exchange] = deque()
        self._replicating: list[tuple[dist.Work | None, Tensor, Tensor]] = []
        for module, unit in fsdp_units(modules):
            module.set_custom_reduce_scatter(UnitReduceScatter(self, unit))  # type: ignore[arg-type]  # only called
            unit.unshard_async_op = True
            if replicas is not None:
                unit.mesh_info.replicate_process_group = None  # fully_shard would sum what has not come yet

    def begin(self, last: bool) -> None:
        self._last = last

    def send(self, unit: UnitReduceScatter, output: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Starts the exchange of `sent` [ranks x shard]; `output` [shard] is filled later."""
        while len(self._exchanges) >= GLOO_FACTS.exchanged_units or any(e.unit is unit for e in self._exchanges):
            self._complete_oldest()
        earlier = [(p, p.grad) for p in unit.parameters() if isinstance(p.grad, DTensor)]
        for p, _ in earlier:
            p.grad = None
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        assert work is not None
        replicated = self._last and self._replicas is not None
        self._exchanges.append(_Exchange(unit, work, sent, received, output, earlier, replicated))

    @torch.no_grad()
    def _complete_oldest(self) -> None:
        """Waits for the oldest exchange and sums it.

        Called at the same points of the program on all ranks, never when something happens to have come: replicas are
        summed from here, by a group that other stages of a pipeline use too.
        """
        oldest = self._exchanges.popleft()
        oldest.work.wait()
        output, pieces = oldest.output, oldest.received.view(-1, oldest.output.numel())
        wide = accumulation_dtype(pieces.dtype)
        if output.dtype == wide:
            torch.sum(pieces, 0, dtype=wide, out=output)
        else:
            output.copy_(pieces.sum(0, dtype=wide))
        _add(oldest.earlier)
        if oldest.replicated:
            travelling = output.to(pieces.dtype)
            work = dist.all_reduce(travelling, group=self._replicas, async_op=True)
            self._replicating.append((work, travelling, output))

    @torch.no_grad()
    def finish(self) -> None:
        """Completes every gradient. Raises what gloo raises when a rank is gone or too late."""
        while self._exchanges:
            self._complete_oldest()
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


class UnitReduceScatter:
    """What `set_custom_reduce_scatter` is given for one unit: allocates both sides, then starts the exchange."""

    def __init__(self, reductions: ExchangedReductions, unit: Any) -> None:
        self._reductions, self._unit, self._sent_is_made = reductions, unit, False

    def parameters(self) -> list[nn.Parameter]:
        """The unit's sharded parameters, as they are now: filling weights makes new ones."""
        return [p.sharded_param for p in self._unit.fsdp_params]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, in the reduce dtype, then for the sum, in the dtype of the gradients.

        `fully_shard` asks in this order (torch 2.13 and 2.14). It would convert a sum in another dtype at once, before the
        pieces have come.
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
        self._reductions.send(self, output_tensor, input_tensor, group)

"""`ddp`: whole parameters on every rank, gradients summed over the ranks while backward runs.

All gradients of a dtype are views of one flat tensor, in the order in which backward makes them. Each bucket, a range of
fixed size of the flat tensor, is all-reduced as soon as it is complete. Buckets do not follow parameters: a large
embedding, whose gradient comes last, is sent in several buckets at once. Differences from `DistributedDataParallel`:
gradients are not divided by the number of ranks, since the loss is already divided by the target tokens of the whole
update; gradients of earlier microbatches are in the same memory; local parts of DTensors (tensor parallelism) are reduced
as they are; a parameter that some ranks did not use costs no walk over the graph. Decision 0015.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import ShardwrightError
from shardwright.mesh.shard_geometry import from_local, local_tensor
from shardwright.parallel.strategy import DataParallel


@dataclass
class FlatGradients:
    """The gradients of one dtype.

    memory: all of them, 1-d.
    bucket: elements that are sent together.
    parameters: numbers of the parameters, in the order of memory.
    ends: the end of each gradient, in elements.
    complete: how many of `parameters`, from the first, have their gradient.
    sent: elements sent in this update.
    """

    memory: Tensor
    bucket: int
    parameters: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    complete: int = 0
    sent: int = 0


class DDP(DataParallel):
    """Collective: all ranks of `group` make one and run the same microbatches."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        reduce_dtype: torch.dtype,
        overlap: bool,
    ) -> None:
        """overlap: buckets are sent while the last microbatch runs backward. In the stages of a pipeline they are sent
        after it: backward is not one pass there, and schedules compute weight gradients separately.
        """
        self.module, self._group, self._bytes, self._dtype = model, group, bucket_bytes, reduce_dtype
        self._ranks, self._overlap, self._last = group.size(), overlap, False
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._order = list(reversed(range(len(self._parameters))))
        self._came: list[int] | None = [] if overlap else None  # the order of gradients, noted in the first update
        self._arrived: set[int] = set()
        self._views: list[Tensor] = []
        self._flats: list[FlatGradients] = []
        self._pending: list[tuple[dist.Work, Tensor, Tensor]] = []  # work, bucket, and the tensor that is sent
        if self._ranks > 1:
            for number, p in enumerate(self._parameters):
                p.register_post_accumulate_grad_hook(lambda p, number=number: self._take_gradient(number))

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; gradients are reduced in the last one."""
        self._last = last and self._overlap
        yield
        self._last = False

    # Gradients as views of the flat tensors

    def _arrange(self) -> None:
        """Makes the flat tensors, and a view for each gradient."""
        dtypes = dict.fromkeys(p.dtype for p in self._parameters)
        self._views = [torch.empty(0)] * len(self._parameters)
        for dtype in dtypes:
            numbers = [n for n in self._order if self._parameters[n].dtype == dtype]
            sizes = [local_tensor(self._parameters[n]).numel() for n in numbers]
            device = local_tensor(self._parameters[numbers[0]]).device
            memory = torch.empty(sum(sizes), dtype=dtype, device=device)
            flat = FlatGradients(memory, max(self._bytes // dtype.itemsize, 1), numbers)
            end = 0
            for number, size in zip(numbers, sizes):
                shape = local_tensor(self._parameters[number]).shape
                self._views[number] = flat.memory[end : end + size].view(shape)
                end += size
                flat.ends.append(end)
            self._flats.append(flat)

    def _settle(self, number: int) -> None:
        """Makes the gradient of a parameter its view, with the same values; zeros where backward left no gradient."""
        p, view = self._parameters[number], self._views[number]
        if p.grad is None:
            view.zero_()
        elif local_tensor(p.grad).data_ptr() == view.data_ptr():
            return
        else:
            view.copy_(local_tensor(p.grad))
        p.grad = from_local(view, p if p.grad is None else p.grad)

    @torch.no_grad()
    def _take_gradient(self, number: int) -> None:
        """Called after backward has added to a gradient: makes it its view, and sends buckets that are complete."""
        if not self._flats:
            self._arrange()
        self._settle(number)
        if not self._last:
            return
        if number in self._arrived:
            if self._is_sent(number):
                raise ShardwrightError(
                    f"A parameter of shape {tuple(self._parameters[number].shape)} has a second gradient in one microbatch, "
                    "after the first was sent.",
                    "Gradients are sent during the last backward of an update, which must be one pass.",
                    "Call backward once for each microbatch.",
                )
            return
        self._arrived.add(number)
        if self._came is not None:
            self._came.append(number)
        self._advance()

    def _is_sent(self, number: int) -> bool:
        flat = next(flat for flat in self._flats if number in flat.parameters)
        at = flat.parameters.index(number)
        return flat.sent > (flat.ends[at - 1] if at else 0)

    # Sending

    def _advance(self) -> None:
        """Sends the buckets that are complete, one flat tensor after the other: the same order on all ranks."""
        for flat in self._flats:
            while flat.complete < len(flat.parameters) and flat.parameters[flat.complete] in self._arrived:
                flat.complete += 1
            done = flat.complete == len(flat.parameters)
            filled = flat.ends[flat.complete - 1] if flat.complete else 0
            while flat.sent < filled and (filled - flat.sent >= flat.bucket or done):
                end = min(flat.sent + flat.bucket, len(flat.memory))
                self._send(flat.memory[flat.sent : end])
                flat.sent = end
            if not done:
                return

    def _send(self, bucket: Tensor) -> None:
        sent = bucket if bucket.dtype == self._dtype else bucket.to(self._dtype)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, bucket, sent))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sends the remaining buckets and waits for all. A parameter that no rank used gets a gradient of zero, as under
        `FSDP`, so that weight decay and momentum go on. Raises the error of the process group when a rank is gone or too
        late.
        """
        if self._ranks == 1:
            for p in self._parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            return
        if not self._flats:
            self._arrange()
        for number in range(len(self._parameters)):
            if number not in self._arrived:
                self._settle(number)
                self._arrived.add(number)
        self._advance()
        for work, bucket, sent in self._pending:
            work.wait()
            if sent is not bucket:
                bucket.copy_(sent)
        self._pending.clear()
        self._arrived.clear()
        for flat in self._flats:
            flat.complete = flat.sent = 0
        if self._came is not None and self._flats:
            self._reorder(self._came)

    def _reorder(self, came: Sequence[int]) -> None:
        """Once: the flat tensors take the order in which gradients came on the group's first rank."""
        self._came = None
        rest = set(self._order) - set(came)
        order = torch.tensor([*came, *(n for n in self._order if n in rest)], device=self._flats[0].memory.device)
        dist.broadcast(order, group=self._group, group_src=0)
        if order.tolist() != self._order:
            self._order = order.tolist()
            self._flats.clear()  # made anew with the next gradient; this update's are read until then

    def release(self) -> None:
        """Nothing is gathered."""

    def close(self) -> None:
        super().close()
        # the hook of each parameter holds this object
        self._parameters.clear()
        self._views.clear()
        self._flats.clear()

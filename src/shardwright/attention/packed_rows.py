"""Where documents lie in packed rows: their spans, positions that restart, and documents of one length side by side.

B rows, T tokens of a row, D documents of all rows, R = real tokens of all rows (those of a document).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows that hold documents one after another, on a device.

    documents: [B, T] on the CPU, the number of each token's document within its row, -1 for padding. Tokens of one
    document are neighbours. All other properties follow from it and are computed at their first use.
    """

    documents: Tensor
    device: torch.device

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], width: int, device: torch.device) -> PackedRows:
        """Rows of `width` tokens that hold one document each, of `lengths` tokens, and padding after it."""
        inside = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        return cls(inside.int() - 1, device)

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor]:
        """(start in the flattened rows, length) of each document, [D], in order of rows."""
        flat, width = self.documents.flatten(), self.documents.shape[1]
        begins = torch.ones(flat.shape, dtype=torch.bool)
        begins[1:] = flat[1:] != flat[:-1]
        begins[::width] = True
        starts = begins.nonzero().flatten()
        lengths = torch.diff(starts, append=torch.tensor([flat.numel()]))
        real = flat[starts] >= 0
        return starts[real], lengths[real]

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(row, first token, end) of each document, in order of rows."""
        starts, lengths = self._spans
        width = self.documents.shape[1]
        return tuple((s // width, s % width, s % width + n) for s, n in zip(starts.tolist(), lengths.tolist()))

    def prepare(self) -> None:
        """Computes on the host all that attention may ask for, so that what comes later only copies."""
        for name in (*_ON_HOST, "spans", "whole", "groups", "longest"):
            getattr(self, name)

    def pinned(self) -> PackedRows:
        """The same in pinned memory, with what was computed so far."""
        rows = PackedRows(self.documents.pin_memory(), self.device)
        known = {name: value for name, value in vars(self).items() if name not in ("documents", "device")}
        for name in _ON_HOST & known.keys():
            known[name] = known[name].pin_memory()
        vars(rows).update(known)
        return rows

    @cached_property
    def on_device(self) -> Tensor:
        """`documents` on the device."""
        return self._move(self.documents)

    @cached_property
    def position_ids(self) -> Tensor:
        """`positions` on the device."""
        return self._move(self.positions)

    @cached_property
    def positions(self) -> Tensor:
        """[B, T] on the CPU: the position of each token in its document; 0 for padding."""
        starts, lengths = self._spans
        positions = torch.zeros(self.documents.numel(), dtype=torch.int64)
        sources = _positions(starts, lengths)
        positions[sources] = sources - starts.repeat_interleave(lengths)
        return positions.view(self.documents.shape)

    @cached_property
    def whole(self) -> bool:
        """Whether nothing has to be kept apart: each row is one document from end to end, or all is padding."""
        rows, width = self.documents.shape
        return self._spans[1].tolist() in ([width] * rows, [])

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(documents, tokens of each) of every length that occurs, longest first."""
        lengths, counts = self._spans[1].unique(return_counts=True)
        return tuple(zip(counts.flip(0).tolist(), lengths.flip(0).tolist()))

    @cached_property
    def grouped(self) -> TokenOrder:
        """Documents of one length side by side, longest first: as in `groups`."""
        return self._grouped.mapped(self._move)

    @cached_property
    def dense(self) -> TokenOrder:
        """Documents one after another without padding, in order of rows."""
        return self._dense.mapped(self._move)

    @cached_property
    def ends(self) -> Tensor:
        """[D + 1] int32: 0, and where each document ends in `dense`."""
        return self._move(self._ends)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return max(self._spans[1].tolist(), default=0)

    @cached_property
    def _grouped(self) -> TokenOrder:
        starts, lengths = self._spans
        by_length = lengths.argsort(descending=True, stable=True)
        return self._order(_positions(starts[by_length], lengths[by_length]))

    @cached_property
    def _dense(self) -> TokenOrder:
        return self._order(_positions(*self._spans))

    @cached_property
    def _ends(self) -> Tensor:
        sums = self._spans[1].cumsum(0)
        return torch.cat([torch.zeros(1, dtype=sums.dtype), sums]).int()

    def _order(self, sources: Tensor) -> TokenOrder:
        size = self.documents.numel()
        back = torch.full((size,), -1, dtype=torch.int64)
        back[sources] = torch.arange(len(sources))
        padding = (back < 0).nonzero().flatten()
        straight = len(sources) == size and bool((sources == torch.arange(size)).all())
        return TokenOrder(sources, back.clamp(min=0), padding if len(padding) else None, straight)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


_ON_HOST = {"positions", "_grouped", "_dense", "_ends"}
"""Properties of `PackedRows` that are tensors on the CPU."""


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Another order of the real tokens of flattened rows.

    sources: [R], where each token stands in the flattened rows.
    back: [B T], where each token of the rows stands in this order; any number for padding.
    padding: the tokens of the rows that are padding, None without.
    straight: nothing moves.
    """

    sources: Tensor
    back: Tensor
    padding: Tensor | None
    straight: bool

    def mapped(self, function: Callable[[Tensor], Tensor]) -> TokenOrder:
        """The order with `function` of each of its tensors."""
        padding = None if self.padding is None else function(self.padding)
        return TokenOrder(function(self.sources), function(self.back), padding, self.straight)

    def pin_memory(self) -> TokenOrder:
        """The same in pinned memory."""
        return self.mapped(Tensor.pin_memory)

    def take(self, rows: Tensor) -> Tensor:
        """[R, ...]: the real tokens of `rows` [B T, ...] in this order."""
        return rows if self.straight else _Permute.apply(rows, self, False)

    def put(self, tokens: Tensor) -> Tensor:
        """[B T, ...]: `tokens` [R, ...] back in their rows, and zeros for padding."""
        return tokens if self.straight else _Permute.apply(tokens, self, True)


class _Permute(torch.autograd.Function):
    """A permutation whose gradient is the one back: autograd's own adds token by token into zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: TokenOrder, into_rows: bool) -> Tensor:
        ctx.order, ctx.into_rows = order, into_rows
        if not into_rows:
            return tensor.index_select(0, order.sources)
        rows = tensor.index_select(0, order.back)
        return rows if order.padding is None else rows.index_fill_(0, order.padding, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Permute.apply(grads[0], ctx.order, not ctx.into_rows), None, None


def _positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """[R]: the tokens start, start + 1, ... of each span, one span after another."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


_RECENT = 16
"""Microbatches whose packed rows are kept: forward and backward of all blocks ask for the same ones."""
_recent: OrderedDict[tuple[int, str], PackedRows] = OrderedDict()


def recent_rows(documents: Tensor, device: torch.device) -> PackedRows:
    """The rows that hold `documents` [B, T] (on the CPU), with what was computed for them before."""
    key = documents.data_ptr(), str(device)
    rows = _recent.pop(key, None)
    if rows is None or not torch.equal(rows.documents, documents):  # memory is used again for other rows
        rows = PackedRows(documents.clone(), device)
    _recent[key] = rows
    while len(_recent) > _RECENT:
        _recent.popitem(last=False)
    return rows

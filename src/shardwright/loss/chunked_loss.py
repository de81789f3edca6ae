"""Cross entropy of a head's logits in chunks of targets: whole logits are never in memory.

With z = f(x W' + b) (f: what the model does behind its head), p = softmax(z) and a target y of weight w, the loss is
-w log p_y and its gradient by z is w (p - 1_y): it needs no later part of the graph. So forward makes the gradients of
hidden states and head at once, chunk by chunk, and backward only scales them; or backward makes the logits anew, which
costs one more product with W and keeps nothing in between. Positions without a target are left out of all products.

Logits are in the compute dtype, as the model's own; softmax is in float32 at least, and so is the sum of the gradient of
the head over chunks, rounded once at the end. A vocabulary divided over tensor-parallel ranks costs two reductions for each
chunk: maxima, then sums of exp and the targets' logits. Together they send 3 numbers for each position, with any chunks.

P positions of this rank (B x T), N of them targets, D width, V vocabulary, W its rows on this rank.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.backends.facts import backend_facts
from shardwright.backends.tp_collectives import Peers, all_sum, copy_in
from shardwright.config.schema import RunFile
from shardwright.errors import ModelError
from shardwright.layout.axes import Axes
from shardwright.layout.loss import IGNORE_INDEX, chunk_tokens
from shardwright.loss.output_head import Deferred, Step, apply_steps, steps_behind_head
from shardwright.loss.vocab_parallel_loss import check_ids
from shardwright.mesh.shard_geometry import chunk, local_tensor
from shardwright.models.model_parts import Parts
from shardwright.torch_private import own_parameters

PRODUCT_ELEMENTS = 2**21
"""Of the head's gradient in the compute dtype, made at a time and added to the sum in float32."""


@dataclass(frozen=True)
class Targets:
    """The targets among P positions.

    labels: [N]. weights: [N], None: all 1; those of positions that fill up N are 0. positions: [N] in ascending order, None:
    every position is a target. chunks: (first, end, sent) of each chunk among the N; `sent` is the length of what it reduces,
    where ranks divide the vocabulary.
    """

    labels: Tensor
    weights: Tensor | None
    positions: Tensor | None
    chunks: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(
        cls,
        labels: Tensor,
        weights: Tensor | None,
        chunk: int,
        device: torch.device,
        fixed: bool,
        multiple: int = 1,
    ) -> Targets:
        """From labels and weights [B, T], best on the CPU: they are looked at, which would stop a GPU.

        fixed: chunks are of `chunk` positions, so that ranks send the same whatever is masked; else of `chunk` targets.
        multiple: other positions of weight 0 fill up their number to it (or take in all), so that shapes come again.
        """
        labels = labels.flatten()
        wanted = labels != IGNORE_INDEX
        places = wanted.nonzero()[:, 0]
        total, count = len(labels), len(places)
        missing = min(-count % multiple, total - count)
        if missing:
            places = torch.cat([places, (~wanted).nonzero()[:missing, 0]]).sort().values
            count += missing
            labels = labels.where(wanted, 0)
            weights = wanted.float() if weights is None else weights.flatten() * wanted
        if fixed:
            known = places.tolist()
            cuts = [bisect.bisect_left(known, first) for first in range(0, total, chunk)] + [count]
        else:
            cuts = [*range(0, count, chunk), count]
        every = count == total
        own = labels if every else labels[places]
        if weights is not None:
            weights = (weights.flatten() if every else weights.flatten()[places]).to(device, non_blocking=True)
        return cls(
            own.to(device, non_blocking=True),
            weights,
            None if every else places.to(device, non_blocking=True),
            tuple((first, end, min(chunk, total - k * chunk)) for k, (first, end) in enumerate(pairwise(cuts))),
        )


@dataclass(frozen=True)
class How:
    """How a head's loss is made.

    steps: what the model does with its logits. recompute: backward makes the logits anew. first: number of this rank's
    first row of the vocabulary. group: name of the group that divides it, None: nobody does.
    """

    steps: tuple[Step, ...] = ()
    recompute: bool = False
    first: int = 0
    group: str | None = None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _reduced(x: Tensor, width: int, group: str | None, operation: str) -> Tensor:
    """`x` [..., n] reduced over the group, sent as [..., width]."""
    if group is None:
        return x
    return all_sum(F.pad(x, (0, width - x.size(-1))), group, operation)[..., : x.size(-1)]


class _Chunk:
    """The logits of n targets, as the model would make them: `z` [n, W] is wide and may be overwritten."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[Step, ...]) -> None:
        self.steps, logits = steps, F.linear(x, weight, bias)
        self.dtype = logits.dtype
        if not steps:
            self.z = _wide(logits)
            return
        with torch.enable_grad():
            self._before = logits.detach().requires_grad_()
            self._behind = apply_steps(steps, self._before)
        z = self._behind.detach()
        self.z = z.clone() if z.dtype == _wide(z).dtype else _wide(z)

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient by what the head gives, from that by `z`."""
        if not self.steps:
            return gradient.to(self.dtype)
        return torch.autograd.grad(self._behind, self._before, gradient.to(self._behind.dtype))[0]


class _Gradients:
    """Gradients of hidden states [N, D], weight and bias, filled chunk by chunk; None where nobody asks."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, count: int, asked: tuple[bool, ...]) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight = weight
        self.x = x.new_empty(count, x.size(1)) if asked[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if asked[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if asked[2] and bias is not None else None

    def add(self, first: int, end: int, x: Tensor, gradient: Tensor) -> None:
        """Takes the gradient [n, W] of a chunk's logits, made from `x` [n, D]."""
        if self.x is not None:
            torch.mm(gradient, self._weight, out=self.x[first:end])
        if self.weight is not None:
            if gradient.dtype == self.weight.dtype:
                self.weight.addmm_(gradient.t(), x)
            else:
                rows = max(1, PRODUCT_ELEMENTS // x.size(1))
                for total, part in zip(self.weight.split(rows), gradient.split(rows, dim=1)):
                    total += part.t() @ x
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)

    def given(self, x: Tensor, targets: Targets, scale: Tensor) -> tuple[Tensor | None, ...]:
        """(hidden states [P, D], weight, bias) times `scale`, in the dtypes of what they are gradients of."""
        scaled = [None if g is None else g.mul_(scale) for g in (self.x, self.weight, self.bias)]
        hidden, weight, bias = scaled
        if hidden is not None and targets.positions is not None:
            hidden = x.new_zeros(x.shape).index_copy_(0, targets.positions, hidden)
        return (
            hidden,
            None if weight is None else weight.to(self._weight.dtype),
            None if bias is None else bias.to(self._weight.dtype),
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, how: How, train: bool
    ) -> Tensor:
        asked = tuple(ctx.needs_input_grad[:3])
        at_once = train and not how.recompute and any(asked)
        made = _Gradients(x, weight, bias, len(targets.labels), asked) if at_once else None
        ctx.made, ctx.targets, ctx.how, ctx.asked = made, targets, how, asked
        total = x.new_zeros((), dtype=_wide(x[:0]).dtype)
        logs = []
        for first, end, sent, own in _pieces(x, targets):
            chunk = _Chunk(own, weight, bias, how.steps)
            z = chunk.z
            largest = _reduced(z.amax(-1), sent, how.group, "max")
            place, here = _place(targets.labels[first:end] - how.first, z.size(-1))
            target = torch.where(here, z.gather(-1, place)[:, 0] - largest, 0.0)
            sums = torch.stack([z.sub_(largest[:, None]).exp_().sum(-1), target])
            exps, target = _reduced(sums, sent, how.group, "sum")
            weights = None if targets.weights is None else targets.weights[first:end].to(z.dtype)
            losses = exps.log() - target
            total += losses.sum() if weights is None else (losses * weights).sum()
            if made is not None:
                each = exps.new_ones(()) if weights is None else weights
                z.mul_((each / exps)[:, None])
                z.scatter_add_(1, place, -(here * each)[:, None])
                made.add(first, end, own, chunk.back(z))
            elif train:
                logs.append(largest + exps.log())
        ctx.save_for_backward(x, weight, bias, torch.cat(logs) if logs else None)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias, logs = ctx.saved_tensors
        targets, how, made, scale = ctx.targets, ctx.how, ctx.made, gradients[0]
        if how.recompute:
            made = _Gradients(x, weight, bias, len(targets.labels), ctx.asked)
            for first, end, _, own in _pieces(x, targets):
                chunk = _Chunk(own, weight, bias, how.steps)
                z = chunk.z.sub_(logs[first:end, None]).exp_()
                place, here = _place(targets.labels[first:end] - how.first, z.size(-1))
                z.scatter_add_(1, place, -here[:, None].to(z.dtype))
                if targets.weights is not None:
                    z.mul_(targets.weights[first:end, None])
                made.add(first, end, own, chunk.back(z))
        if made is None:
            raise RuntimeError("the gradients of a loss in chunks were handed out already")
        ctx.made = None  # they are handed out without a copy
        return (*made.given(x, targets, scale), None, None, None)


def _place(labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(column [n, 1] of each target, whether this rank has it [n]); `labels` count from its first row."""
    here = (labels >= 0) & (labels < rows)
    return torch.where(here, labels, 0)[:, None], here


def _pieces(x: Tensor, targets: Targets) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first, end, sent, hidden states [end - first, D]) of each chunk."""
    for first, end, sent in targets.chunks:
        positions = targets.positions
        yield first, end, sent, x[first:end] if positions is None else x[positions[first:end]]


def chunked_cross_entropy_sum(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, how: How) -> Tensor:
    """SUM w * -log softmax(f(x W' + b))[label] over targets: a scalar of float32 at least, the same on all of the group.

    Shapes: x [P, D], weight [W, D], bias [W]. Gradients reach all three; on a divided vocabulary that of `x` is this rank's
    part of a sum. Backward can run once.
    """
    return _ChunkedCrossEntropy.apply(x, weight, bias, targets, how, torch.is_grad_enabled())


@dataclass(frozen=True)
class LossChunks:
    """Tokens of a chunk of logits (0: logits are whole), rows of the vocabulary, what the model does behind its head."""

    tokens: int
    vocabulary: int = 0
    steps: tuple[Step, ...] = ()
    reason: str = ""

    def describe(self) -> str:
        """For the line that says what runs."""
        why = f" ({self.reason})" if self.reason else ""
        return f"loss in chunks of {self.tokens} tokens" if self.tokens else f"loss on whole logits{why}"


def find_loss_chunks(model: nn.Module, parts: Parts, run: RunFile, device: str) -> LossChunks:
    """How the loss of `model` (whole, on meta, of `parts`) is made on a device of this kind.

    Raises `ModelError` where the run file gives a number of tokens and the model's head cannot do it; with `auto` logits
    are whole then, for the reason given.
    """
    p = run.parallelism
    weight = None if parts.head is None else own_parameters(model.get_submodule(parts.head)).get("weight")
    asked = run.memory.loss_chunk_tokens
    if weight is None and asked in ("auto", 0):
        return LossChunks(0)
    vocabulary = 1 if weight is None else weight.shape[0]
    axes = Axes(pp=p.pp_size, cp=p.cp_size, tp=p.tp_size)
    tokens = chunk_tokens(run, axes, vocabulary, device)
    if not tokens:
        return LossChunks(0)
    try:
        return LossChunks(tokens, vocabulary, steps_behind_head(model, parts))
    except ModelError as error:
        if asked != "auto":
            raise
        return LossChunks(0, reason=error.what.rstrip("."))


_HEAD = "_shardwright_head"


class ChunkedHead:
    """A head that gives a `Deferred` loss in place of logits whenever targets were announced before; else logits.

    peers: the ranks that divide the vocabulary; None: the head is whole.
    """

    def __init__(self, head: nn.Linear, chunks: LossChunks, peers: Peers | None, *, recompute: bool) -> None:
        first = 0 if peers is None else chunk(chunks.vocabulary, peers.size, peers.rank)[0]
        self.how = How(chunks.steps, recompute, first, None if peers is None else peers.name)
        self._head: Any = head
        self._chunks, self._peers, self._logits = chunks, peers, head.forward
        self._announced: tuple[Tensor, Tensor | None] | None = None
        head.forward = self._forward  # type: ignore[method-assign, assignment]
        vars(head)[_HEAD] = self

    def announce(self, labels: Tensor | None, weights: Tensor | None) -> None:
        """The next forward gives the loss of these labels and weights [B, T]; without labels it gives logits."""
        self._announced = None if labels is None else (labels, weights)

    def _forward(self, x: Tensor) -> Any:
        if self._announced is None:
            return self._logits(x)
        labels, weights = self._announced
        self._announced = None
        if labels.shape != x.shape[:-1]:
            raise ValueError(f"hidden states of shape {tuple(x.shape)} for labels {tuple(labels.shape)}")
        divided = self._peers is not None
        even = x.dtype == torch.bfloat16 and not divided
        multiple = backend_facts(x.device.type).targets_multiple if even else 1
        targets = Targets.of(labels, weights, self._chunks.tokens, x.device, divided, multiple)
        if self._peers is not None:
            check_ids(targets.labels, self._chunks.vocabulary)
            x = copy_in(x, self._peers)
        weight, bias = local_tensor(self._head.weight), self._head.bias
        bias = None if bias is None else local_tensor(bias)
        loss = chunked_cross_entropy_sum(x.flatten(0, -2), weight, bias, targets, self.how)
        return Deferred(loss, self.how.steps)


def chunked_head(model: nn.Module) -> ChunkedHead | None:
    """The `ChunkedHead` on a module of `model`, if there is one (and this rank holds it)."""
    found = (vars(module).get(_HEAD) for module in model.modules())
    return next((head for head in found if head is not None), None)

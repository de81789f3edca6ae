"""Cross entropy of a head's logits in chunks of targets: whole logits are never in memory.

With z = f(x W' + b) (f: what the model does after its head), p = softmax(z) and a target y of weight w, the loss is
-w log p_y and its gradient by z is w (p - 1_y), which needs no later part of the graph. So forward computes the gradients
of hidden states and head at once, chunk by chunk, and backward only scales them. Or backward computes the logits again,
which costs one more product with W and keeps nothing in between. Positions without a target are left out of all products.

Logits are in the compute dtype, like the model's own; softmax is in float32 at least, and so is the sum of the head's
gradient over chunks, rounded once at the end. A vocabulary divided over tensor-parallel ranks costs two reductions for each
chunk: maxima, then sums of exp and the logits of the targets. Both send 3 numbers for each position, however large chunks are.

P positions of this rank (B x T), N of them targets, D width, V vocabulary, W its rows on this rank.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.backends.backend import choose_backend
from shardwright.backends.facts import backend_facts
from shardwright.backends.tp_collectives import TensorParallelGroup, all_reduce, copy_to_tp
from shardwright.config.schema import RunFile
from shardwright.errors import ModelError
from shardwright.layout.axes import model_axes
from shardwright.layout.loss import IGNORE_INDEX, chunk_tokens
from shardwright.loss.output_head import DeferredLoss, Step, apply_steps, steps_after_head
from shardwright.loss.vocab_parallel_loss import check_ids, widened
from shardwright.mesh.shard_geometry import chunk as shard_range
from shardwright.mesh.shard_geometry import local_tensor
from shardwright.models.model_parts import Parts
from shardwright.models.torch_dtypes import accumulation_dtype
from shardwright.torch_private import own_parameters


@dataclass(frozen=True)
class Targets:
    """The targets among P positions.

    labels: [N].
    weights: [N], None: all 1. Positions that fill up N have weight 0.
    positions: [N] in ascending order, None: every position is a target.
    chunks: (first, end, sent) of each chunk among the N. Where ranks divide the vocabulary, the chunk reduces `sent` numbers.
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
        """On `device`, from labels and weights [B, T] on the CPU: their values are read, which would stop a GPU.

        fixed: chunks are of `chunk` positions, so that ranks send the same whatever is masked; else of `chunk` targets.
        multiple: positions of weight 0 fill up N to a multiple of it (or to all positions), so that shapes come again.
        """
        labels = labels.flatten()
        is_target = labels != IGNORE_INDEX
        positions = is_target.nonzero()[:, 0]
        total, count = len(labels), len(positions)
        missing = min(-count % multiple, total - count)
        if missing:
            positions = torch.cat([positions, (~is_target).nonzero()[:missing, 0]]).sort().values
            count += missing
            labels = labels.where(is_target, 0)
            weights = is_target.float() if weights is None else weights.flatten() * is_target
        if fixed:
            known = positions.tolist()
            cuts = [bisect.bisect_left(known, first) for first in range(0, total, chunk)] + [count]
        else:
            cuts = [*range(0, count, chunk), count]
        every = count == total
        kept = labels if every else labels[positions]
        if weights is not None:
            weights = weights.flatten() if every else weights.flatten()[positions]
        sizes = tuple((first, end, min(chunk, total - k * chunk)) for k, (first, end) in enumerate(pairwise(cuts)))
        return cls(kept, weights, None if every else positions, sizes).on(device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Targets:
        """The same with `function` of each tensor."""
        weights, positions = (None if t is None else function(t) for t in (self.weights, self.positions))
        return Targets(function(self.labels), weights, positions, self.chunks)

    def on(self, device: torch.device) -> Targets:
        """The same on `device`."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class LossOptions:
    """How the loss of a head is computed.

    steps: what the model does with its logits.
    recompute: backward computes the logits again.
    first: this rank's first row of the vocabulary.
    group: name of the group that divides the vocabulary; None: the vocabulary is whole.
    """

    steps: tuple[Step, ...] = ()
    recompute: bool = False
    first: int = 0
    group: str | None = None


def _reduced(x: Tensor, width: int, group: str | None, operation: str) -> Tensor:
    """`x` [..., n] reduced over the group, sent as [..., width]."""
    if group is None:
        return x
    return all_reduce(F.pad(x, (0, width - x.size(-1))), group, operation)[..., : x.size(-1)]


class _Chunk:
    """The logits of n targets, as the model would make them: `z` [n, W] in float32 at least, to be overwritten."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[Step, ...]) -> None:
        self.steps, logits = steps, F.linear(x, weight, bias)
        self.dtype = logits.dtype
        if not steps:
            self.z = widened(logits)
            return
        with torch.enable_grad():
            self._before = logits.detach().requires_grad_()
            self._after_steps = apply_steps(steps, self._before)
        z = self._after_steps.detach()
        self.z = z.to(accumulation_dtype(z.dtype), copy=True)

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient by what the head gives, from that by `z`."""
        if not self.steps:
            return gradient.to(self.dtype)
        return torch.autograd.grad(self._after_steps, self._before, gradient.to(self._after_steps.dtype))[0]


class _Gradients:
    """Gradients of hidden states [N, D], weight and bias, filled chunk by chunk; None where autograd needs none."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, count: int, needed: tuple[bool, ...]) -> None:
        wide = accumulation_dtype(weight.dtype)
        self._weight = weight
        self.x = x.new_empty(count, x.size(1)) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None

    def add(self, first: int, end: int, x: Tensor, gradient: Tensor) -> None:
        """Adds what the gradient [n, W] of a chunk's logits gives, computed from `x` [n, D]."""
        if self.x is not None:
            torch.mm(gradient, self._weight, out=self.x[first:end])
        if self.weight is not None:
            choose_backend(x.device.type).add_product(self.weight, gradient.t(), x)
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)

    def scaled(self, x: Tensor, targets: Targets, scale: Tensor) -> tuple[Tensor | None, ...]:
        """(hidden states [P, D], weight, bias) times `scale`, in the dtypes of what they are gradients of."""
        hidden, weight, bias = (None if g is None else g.mul_(scale) for g in (self.x, self.weight, self.bias))
        if hidden is not None and targets.positions is not None:
            hidden = x.new_zeros(x.shape).index_copy_(0, targets.positions, hidden)
        return hidden, *(None if g is None else g.to(self._weight.dtype) for g in (weight, bias))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: LossOptions, train: bool
    ) -> Tensor:
        needed = tuple(ctx.needs_input_grad[:3])
        at_once = train and not options.recompute and any(needed)
        made = _Gradients(x, weight, bias, len(targets.labels), needed) if at_once else None
        ctx.made, ctx.targets, ctx.options, ctx.needed = made, targets, options, needed
        total = x.new_zeros((), dtype=accumulation_dtype(x.dtype))
        logs = []
        for first, end, sent, own in _pieces(x, targets):
            chunk = _Chunk(own, weight, bias, options.steps)
            z = chunk.z
            largest = _reduced(z.amax(-1), sent, options.group, "max")
            place, here = _place(targets.labels[first:end] - options.first, z.size(-1))
            target = torch.where(here, z.gather(-1, place)[:, 0] - largest, 0.0)
            sums = torch.stack([z.sub_(largest[:, None]).exp_().sum(-1), target])
            exps, target = _reduced(sums, sent, options.group, "sum")
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
        targets, options, made, scale = ctx.targets, ctx.options, ctx.made, gradients[0]
        if options.recompute:
            made = _Gradients(x, weight, bias, len(targets.labels), ctx.needed)
            for first, end, _, own in _pieces(x, targets):
                chunk = _Chunk(own, weight, bias, options.steps)
                z = chunk.z.sub_(logs[first:end, None]).exp_()
                place, here = _place(targets.labels[first:end] - options.first, z.size(-1))
                z.scatter_add_(1, place, -here[:, None].to(z.dtype))
                if targets.weights is not None:
                    z.mul_(targets.weights[first:end, None])
                made.add(first, end, own, chunk.back(z))
        if made is None:
            raise RuntimeError("backward of a loss in chunks runs once: its gradients were handed out already")
        ctx.made = None  # they are handed out without a copy
        return (*made.scaled(x, targets, scale), None, None, None)


def _place(labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(column [n, 1] of each target, whether this rank has it [n]); `labels` count from its first row."""
    here = (labels >= 0) & (labels < rows)
    return torch.where(here, labels, 0)[:, None], here


def _pieces(x: Tensor, targets: Targets) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first, end, sent, hidden states [end - first, D]) of each chunk."""
    for first, end, sent in targets.chunks:
        positions = targets.positions
        yield first, end, sent, x[first:end] if positions is None else x[positions[first:end]]


def chunked_cross_entropy_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: LossOptions
) -> Tensor:
    """SUM w * -log softmax(f(x W' + b))[label] over targets: a scalar of float32 at least, the same on all of the group.

    Shapes: x [P, D], weight [W, D], bias [W]. Gradients reach all three; where the vocabulary is divided, the gradient of `x`
    is this rank's part of a sum. Backward can run once.
    """
    return _ChunkedCrossEntropy.apply(x, weight, bias, targets, options, torch.is_grad_enabled())


@dataclass(frozen=True)
class LossChunks:
    """How the loss of a model is computed.

    tokens: of a chunk of logits, 0: logits are whole.
    vocabulary: rows of the head.
    steps: what the model does after its head.
    reason: why logits are whole although chunks would be worth their cost.
    """

    tokens: int
    vocabulary: int = 0
    steps: tuple[Step, ...] = ()
    reason: str = ""

    def describe(self) -> str:
        """A part of the line that names what runs."""
        why = f" ({self.reason})" if self.reason else ""
        return f"loss in chunks of {self.tokens} tokens" if self.tokens else f"loss on whole logits{why}"


def find_loss_chunks(model: nn.Module, parts: Parts, run: RunFile, device: str) -> LossChunks:
    """How the loss of `model` (whole, on meta, of `parts`) is computed on a device of this kind.

    Raises `ModelError` where the run file gives a number of tokens and the model's head allows no chunks. With `auto`,
    logits are whole then.
    """
    p = run.parallelism
    weight = None if parts.head is None else own_parameters(model.get_submodule(parts.head)).get("weight")
    asked = run.memory.loss_chunk_tokens
    if weight is None and asked in ("auto", 0):
        return LossChunks(0)
    vocabulary = 1 if weight is None else weight.shape[0]
    axes = model_axes(p)
    tokens = chunk_tokens(run, axes, vocabulary, device)
    if not tokens:
        return LossChunks(0)
    try:
        return LossChunks(tokens, vocabulary, steps_after_head(model, parts))
    except ModelError as error:
        if asked != "auto":
            raise
        return LossChunks(0, reason=error.what.rstrip("."))


_HEAD = "_shardwright_head"


class ChunkedHead:
    """A head that returns a `DeferredLoss` loss in place of logits where the targets were announced before; else logits.

    tp_group: the ranks that divide the vocabulary; None: the head is whole.
    """

    def __init__(
        self, head: nn.Linear, chunks: LossChunks, tp_group: TensorParallelGroup | None, *, recompute: bool
    ) -> None:
        first = 0 if tp_group is None else shard_range(chunks.vocabulary, tp_group.size, tp_group.rank)[0]
        self.options = LossOptions(chunks.steps, recompute, first, None if tp_group is None else tp_group.name)
        self._head: Any = head
        self._chunks, self._tp_group, self._logits = chunks, tp_group, head.forward
        self._announced: tuple[Tensor, Tensor | None, Targets | None] | None = None
        head.forward = self._forward  # type: ignore[method-assign, assignment]
        vars(head)[_HEAD] = self

    def announce(self, labels: Tensor | None, weights: Tensor | None, targets: Targets | None = None) -> None:
        """The next forward returns the loss of these labels and weights [B, T] on the CPU; without labels, logits.

        targets: of them, where they were made before.
        """
        self._announced = None if labels is None else (labels, weights, targets)

    def targets(self, labels: Tensor, weights: Tensor | None, multiple: int = 1) -> Targets:
        """The targets among these labels and weights [B, T], all on the CPU. multiple: see `Targets.of`."""
        return Targets.of(labels, weights, self._chunks.tokens, labels.device, self._tp_group is not None, multiple)

    def _forward(self, x: Tensor) -> Any:
        if self._announced is None:
            return self._logits(x)
        labels, weights, targets = self._announced
        self._announced = None
        if labels.shape != x.shape[:-1]:
            raise ValueError(f"hidden states of shape {tuple(x.shape)} for labels {tuple(labels.shape)}")
        if targets is None:
            even = x.dtype == torch.bfloat16 and self._tp_group is None
            targets = self.targets(labels, weights, backend_facts(x.device.type).targets_multiple if even else 1)
        targets = targets.on(x.device)
        if self._tp_group is not None:
            check_ids(targets.labels, self._chunks.vocabulary)
            x = copy_to_tp(x, self._tp_group)
        weight, bias = local_tensor(self._head.weight), self._head.bias
        bias = None if bias is None else local_tensor(bias)
        loss = chunked_cross_entropy_sum(x.flatten(0, -2), weight, bias, targets, self.options)
        return DeferredLoss(loss, self.options.steps)


def chunked_head(model: nn.Module) -> ChunkedHead | None:
    """The `ChunkedHead` on a module of `model`, if there is one (and this rank holds it)."""
    found = (vars(module).get(_HEAD) for module in model.modules())
    return next((head for head in found if head is not None), None)

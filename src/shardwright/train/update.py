"""One update: microbatches forward and backward, gradients reduced and clipped, one optimizer step.

`UpdateEngine` is what `train`, `check` and `bench` drive; it knows nothing of files, logs or signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.attention.packed_rows import PackedRows
from shardwright.config.rates import check_length
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import NonFiniteError, ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.loss.chunked_loss import chunked_head
from shardwright.loss.objective import cross_entropy_sum, forward_arguments, logits_of, own_loss
from shardwright.loss.output_head import DeferredLoss
from shardwright.mesh.device_mesh import make_mesh
from shardwright.models.build import build_model
from shardwright.models.model_parts import is_transformers
from shardwright.models.rotary import follows_length
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import context_shard, parallelize, plan_model
from shardwright.parallel.strategy import Microbatches, Strategy
from shardwright.train.optimizer import (
    SHARD_OPTIMIZERS,
    ShardedParam,
    learning_rate_factor,
    make_optimizer,
    sharded_params,
)
from shardwright.train.rng import seed_microbatch


@dataclass(frozen=True)
class UpdateResult:
    """What one update did. Every field is equal on all ranks.

    update: number of the update, from 0.
    loss: sum over targets / the batch's divisor, before the step.
    grad_norm: 2-norm of the whole gradient before clipping.
    clip_coefficient: the factor that gradients were multiplied with; 0 for a skipped update.
    learning_rate: of this step.
    target_tokens: of the whole update.
    skipped: loss or norm was not finite, so no weight was changed.
    stop: number of ranks that were asked to stop.
    """

    update: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    target_tokens: int
    skipped: bool
    stop: int


@dataclass
class Hooks:
    """Where measurements observe an update, and where `check --plant` changes it. No hook has an effect by default.

    on_phase: told that `step` enters the phase `reduce`, then `step`.
    on_batch: returns the batch to run in place of the one that was given.
    on_inputs: changes the model's arguments beside the token ids, in place, for one microbatch.
    on_loss: returns the loss of one microbatch of a batch, before it is divided.
    post_reduce: called when the gradients of an update are complete.
    on_norm: returns the gradient norm by which gradients are clipped.
    on_clip: returns the factor by which gradients are multiplied.
    on_result: returns the result of a step.
    """

    on_phase: Callable[[str], object] = lambda phase: None
    on_batch: Callable[[UpdateBatch], UpdateBatch] = lambda batch: batch
    on_inputs: Callable[[Microbatch, dict[str, Any]], object] = lambda microbatch, arguments: None
    on_loss: Callable[[Tensor, Microbatch, UpdateBatch], Tensor] = lambda loss, microbatch, batch: loss
    post_reduce: Callable[[], object] = lambda: None
    on_norm: Callable[[float], float] = lambda norm: norm
    on_clip: Callable[[float], float] = lambda coefficient: coefficient
    on_result: Callable[[UpdateResult], UpdateResult] = lambda result: result


class UpdateEngine:
    """A model under a layout, with its optimizer: `forward_backward(batch)`, then `step()`.

    Collective: every rank makes one and calls the same methods in the same order.

    parts: the parts of the unsplit model; parameters: its number of parameters.
    strategy: runs forward and backward under the layout.
    module: this rank's part of the model, with the names of the unsplit model.
    params: this rank's part of each trainable parameter, as the optimizer holds it.
    context: the tokens of each row that this rank holds; None for whole rows.
    counts_loss: whether this rank's loss enters the sum over ranks. Tensor-parallel ranks compute the same loss, one counts it.
    batch: the batch from `forward_backward` to the end of `step`, else None.
    hooks: see `Hooks`.
    """

    def __init__(self, run: RunFile, axes: Axes, device: torch.device, updates: int) -> None:
        self.run, self.axes, self.device, self.updates = run, axes, device, updates
        self.rank, self.hooks, t = dist.get_rank(), Hooks(), run.training
        self.mesh: DeviceMesh = make_mesh(axes, device)
        model = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
        self.parameters = sum(p.numel() for p in model.parameters())  # of the unsplit model
        plan = plan_model(model, run, device.type)
        self.parts, self.loss_chunks = plan.parts, plan.loss_chunks
        self.strategy: Strategy = parallelize(model, run, self.mesh, device, plan)
        self.module: nn.Module = self.strategy.module
        self.context = context_shard(run, self.mesh)
        coordinates = axes.coordinates(self.rank)
        self.params = sharded_params(self.module, t.optimizer in SHARD_OPTIMIZERS, coordinates, self.strategy.ties)
        if not self.params:
            raise ShardwrightError(
                "Every parameter is frozen.", "No parameter is left to train.", "Loosen model.freeze."
            )
        tables = [name for name, module in self.module.named_modules() if isinstance(module, nn.Embedding)]
        named = {*tables, self.parts.embedding, self.parts.head} - {None}
        self.optimizer = make_optimizer(t, self.params, [f"{name}.weight" for name in named])
        self.factor = learning_rate_factor(t, updates)
        self.counts_loss = coordinates["tp"] == 0
        self.batch: UpdateBatch | None = None
        self._cp_rank, self._checked = coordinates["cp"], False
        self._head, self._arguments = chunked_head(self.module), forward_arguments(self.module)
        self._by_length, self._own_loss = follows_length(model), own_loss(t.loss)
        self._divisor = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # this rank's sum over the update
        self._count = torch.zeros_like(self._loss)  # targets, as a loss of the user's own counts them

    def set_length(self, updates: int) -> None:
        """Sets the number of updates, where it became known only after a checkpoint was read.

        Raises `ConfigError` where the schedule of the learning rate does not fit.
        """
        check_length(self.run.training, updates)
        self.updates, self.factor = updates, learning_rate_factor(self.run.training, updates)

    # Forward and backward

    def forward_backward(self, batch: UpdateBatch) -> None:
        """Runs every microbatch of `batch`. Afterwards gradients are those of SUM(loss) / divisor over all ranks.

        A loss of the user's own says its divisor with its sums. Backward then divides by the batch's, and gradients are
        multiplied once by the ratio of both: on the way they have their usual size, and where both are equal they are
        bitwise the same.
        """
        batch = self.hooks.on_batch(batch)
        if batch.target_tokens < 1:
            raise ShardwrightError(f"Update {batch.update} has no target token.", "Its loss would be 0 / 0.")
        stale = [] if self._checked else [param.name for param in self.params if not param.is_current()]
        if stale:  # it would train nothing, silently
            raise ShardwrightError(f"The optimizer does not hold the memory of {stale[0]} ({len(stale)} parameters).")
        self._checked = True
        if not self.module.training:
            self.module.train()
        self.batch = batch
        self._loss.zero_()
        self._count.zero_()
        self.strategy.forward_backward(self._microbatches(batch))
        self.strategy.finish_gradients()
        self._divisor = batch.divisor
        if self._own_loss is not None:
            self._divisor = self._sum_own_count(batch)
            gradients = [gradient for _, gradient in self.gradients()]
            if self._divisor != batch.divisor and gradients:
                torch._foreach_mul_(gradients, batch.divisor / self._divisor)
        self.hooks.post_reduce()

    def _microbatches(self, batch: UpdateBatch) -> Microbatches:
        """`batch` as a strategy runs it."""
        microbatches, seed = batch.microbatches, self.run.training.seed

        def seed_forward(k: int, stage: int) -> None:
            seed_microbatch(seed, batch.update, microbatches[k].index, stage, self._cp_rank)

        def divided(loss: Tensor, k: int) -> Tensor:
            loss = self.hooks.on_loss(loss, microbatches[k], batch)
            self._loss += loss.detach()
            return loss / batch.divisor

        return Microbatches(
            count=len(microbatches),
            inputs=lambda k: self._inputs(microbatches[k]),
            before_forward=seed_forward,
            announce=lambda k: self._announce(microbatches[k]),
            loss=lambda output, k: divided(self.loss_of(output, microbatches[k]), k),
            loss_of_model=lambda k: divided(self.loss_sum(microbatches[k]), k),
        )

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Forward of this microbatch and the sum of its loss; zero on a rank of a pipeline without the last stage."""
        ids, arguments = self._inputs(microbatch)
        self._announce(microbatch)
        output = self.strategy(ids, **arguments)
        return torch.zeros_like(self._loss) if output is None else self.loss_of(output, microbatch)

    def _inputs(self, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
        """This rank's token ids [B, T / cp] of a microbatch, and the model's other arguments.

        Packed rows: positions [B, T / cp] within documents, and the documents of whole rows, on every stage and rank. A model
        whose rotary frequencies follow the length of a document is told where each row ends, by positions of 0 behind it.
        """
        ids, arguments = microbatch.input_ids, dict(self._arguments)
        context, documents = self.context, self._documents(microbatch)
        if documents is not None:
            positions = documents.position_ids
            arguments["position_ids"] = positions if context is None else context.part(positions)
            arguments["documents"] = documents if is_transformers(self.module) else documents.on_device
        elif context is not None:
            arguments["position_ids"] = context.position_ids(ids.shape[1], self.device)
        elif self._by_length and microbatch.lengths is not None:
            rows = PackedRows.of_lengths(microbatch.lengths, ids.shape[1], self.device)
            arguments["position_ids"] = rows.position_ids
        self.hooks.on_inputs(microbatch, arguments)
        ids = ids if context is None else context.part(ids)
        return ids.to(self.device, non_blocking=True), arguments

    def _documents(self, microbatch: Microbatch) -> PackedRows | None:
        if microbatch.documents is None:
            return None
        if self.run.data.batching != "pack":
            raise ShardwrightError(
                f"Microbatch {microbatch.index} has documents, with data.batching {self.run.data.batching}.",
                "The model's attention was left as it is: documents of one row would see each other.",
                "Set data.batching to pack.",
            )
        return PackedRows(microbatch.documents, self.device)

    def _targets(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """(labels, their weights), [B, T / cp], of this rank's positions of a microbatch."""
        labels, weights = microbatch.labels, microbatch.weights
        if self.context is None:
            return labels, weights
        return self.context.part(labels), None if weights is None else self.context.part(weights)

    def _announce(self, microbatch: Microbatch) -> None:
        """Tells a head that computes the loss itself the targets of the next forward."""
        if self._head is not None:
            self._head.announce(*self._targets(microbatch))

    def loss_of(self, output: Any, microbatch: Microbatch) -> Tensor:
        """Sum of the loss over this rank's targets of a microbatch (a scalar, with its graph), from the model's output."""
        logits = logits_of(output)
        if isinstance(logits, DeferredLoss):
            return logits.finished()
        labels, weights = self._targets(microbatch)
        labels = labels.to(self.device, non_blocking=True)
        weights = None if weights is None else weights.to(self.device, non_blocking=True)
        if self._own_loss is None:
            return cross_entropy_sum(logits, labels, weights)
        loss, count = self._own_loss(logits, labels, weights)
        self._count += count
        return loss

    def _sum_own_count(self, batch: UpdateBatch) -> float:
        """Targets of the update over all data ranks, as the user's own loss counts them."""
        count = self._count * self.counts_loss
        dist.all_reduce(count)
        if not count > 0:
            raise ShardwrightError(
                f"training.loss {self.run.training.loss} counts {count.item()} targets in update {batch.update}.",
                "The loss sum is divided by this count.",
                "Return the number of targets, or the sum of their weights, as the second value.",
            )
        return count.item()

    # Gradients and the step

    def gradients(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """This rank's part of every gradient, as plain tensors; parameters without a gradient are left out."""
        for param in self.params:
            gradient = param.gradient()
            if gradient is not None:
                yield param, gradient

    def step(self, stop: bool = False) -> UpdateResult:
        """Clips over all parameters and updates them once; for a non-finite value, does what on_non_finite says.

        `stop`: this rank was asked to stop; the result says how many were, so that all act on the same update.
        Raises `NonFiniteError` on every rank alike.
        """
        batch, t = self.batch, self.run.training
        if batch is None:
            raise ShardwrightError("step() without forward_backward().")
        self.hooks.on_phase("reduce")
        norm, loss, stops = self.reduce_scalars(stop)
        norm = self.hooks.on_norm(norm)
        self.hooks.on_phase("step")
        finite = math.isfinite(norm) and math.isfinite(loss)
        rate = t.learning_rate * self.factor(batch.update)
        coefficient = 1.0 if t.max_grad_norm is None else min(1.0, t.max_grad_norm / (norm + 1e-6))
        if finite:
            self._apply(self.hooks.on_clip(coefficient), rate)
        self.zero_grad()
        self.batch = None
        if not finite and t.on_non_finite == "stop":
            raise self._non_finite(batch, norm, loss)
        return self.hooks.on_result(
            UpdateResult(
                update=batch.update,
                loss=loss / self._divisor,
                grad_norm=norm,
                clip_coefficient=coefficient if finite else 0.0,
                learning_rate=rate,
                target_tokens=batch.target_tokens,
                skipped=not finite,
                stop=stops,
            )
        )

    def reduce_scalars(self, stop: bool) -> tuple[float, float, int]:
        """(gradient norm, loss sum, ranks asked to stop) over all ranks, in one reduction; collective."""
        counted = [gradient for param, gradient in self.gradients() if param.counts]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            wide = torch.float64 if counted[0].dtype == torch.float64 else torch.float32
            norms = torch._foreach_norm(counted, 2, dtype=wide)
            for device in {norm.device for norm in norms}:  # with shards on the host, 0-dim parameters are on the GPU
                here = torch.stack([norm for norm in norms if norm.device == device])
                part = here.double().square().sum()
                square = square + (
                    part if device == self.device else part.pin_memory().to(self.device, non_blocking=True)
                )
        sums = torch.stack([square, self._loss * self.counts_loss, torch.full_like(square, float(stop))])
        dist.all_reduce(sums)
        squares, loss, stops = sums.tolist()
        return math.sqrt(squares) if squares >= 0 else math.nan, loss, int(stops)

    def _apply(self, coefficient: float, rate: float) -> None:
        gradients = []
        for param, gradient in self.gradients():
            gradients.append(gradient)
            if param.tensor is not param.parameter:
                param.tensor.grad = gradient
        if coefficient < 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for param in self.params:
            param.parameter.grad = None
            param.tensor.grad = None

    def close(self) -> None:
        """Frees the memory of weights, gradients and optimizer at once. The engine can't be used afterwards.

        Without this call, Python's garbage collector frees them, at some later time: the modules of a model that is split,
        checkpointed or compiled hold themselves.
        """
        self.zero_grad()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.params.clear()
        self.strategy.close()

    def _non_finite(self, batch: UpdateBatch, norm: float, loss: float) -> NonFiniteError:
        """The error that names the ranks; collective, since the ranks tell each other about their own loss."""
        flags = [torch.zeros((), device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, (~self._loss.isfinite()).float())
        ranks = [rank for rank, flag in enumerate(flags) if flag.item()]
        where = (
            f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient (every rank's loss is finite)"
        )
        return NonFiniteError(
            f"Update {batch.update}: {where} is not finite (loss sum {loss}, gradient norm {norm}).",
            "All ranks stopped before the optimizer step, so the weights are those of the update before.",
            "Look at the rows of this update; lower the learning rate; or set training.on_non_finite to skip.",
        )

    # Evaluation

    @torch.no_grad()
    def evaluate(self, batches: Iterable[UpdateBatch]) -> tuple[float, int]:
        """(loss per target, targets) over all data ranks: one sum over targets, divided once; collective."""
        self.module.eval()
        total, targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        weight = 0.0
        self._count.zero_()
        for batch in batches:
            targets, weight = targets + batch.target_tokens, weight + batch.divisor
            for microbatch in batch.microbatches:
                total += self.loss_sum(microbatch)
        self.strategy.release()
        sums = torch.stack([total, self._count]) * self.counts_loss
        dist.all_reduce(sums)
        self.module.train()
        loss, count = sums.tolist()
        return loss / (weight if self._own_loss is None else count), targets

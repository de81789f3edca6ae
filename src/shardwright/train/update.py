"""One update: microbatches forward and backward, gradients agreed on, clipped, and one optimizer step.

`Engine` is what `train`, `check` and `bench` drive; it knows nothing of files, logs or signals.
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
from torch.distributed.tensor import DTensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.config.rates import check_length
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import NonFiniteError, ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.loss.chunked_loss import chunked_head, find_loss_chunks
from shardwright.loss.objective import cross_entropy_sum, forward_arguments, logits_of, own_loss
from shardwright.loss.output_head import Deferred
from shardwright.mesh.device_mesh import make_mesh
from shardwright.models.build import build_model
from shardwright.models.model_parts import find_parts, is_transformers
from shardwright.models.rotary import follows_length
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import context_place, parallelize
from shardwright.parallel.ddp import Replicated
from shardwright.parallel.fsdp import Sharded
from shardwright.parallel.pipeline.schedule_runner import Pipelined
from shardwright.train.optimizer import (
    LOCAL,
    ShardedParam,
    learning_rate_factor,
    local_parameters,
    make_optimizer,
)
from shardwright.train.rng import seed_microbatch


@dataclass(frozen=True)
class UpdateResult:
    """What one update did; equal on every rank.

    loss: sum over targets / the batch's divisor, before the step. grad_norm: 2-norm of the whole gradient before clipping.
    clip_coefficient: what gradients were multiplied with. skipped: not finite, so nothing was changed.
    stop: the number of ranks that were asked to stop.
    """

    update: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    target_tokens: int
    skipped: bool
    stop: int


class Engine:
    """A model under a layout, with its optimizer: `forward_backward(batch)`, then `step()`.

    Collective: every rank makes one and calls the same methods in the same order.
    """

    def __init__(self, run: RunFile, axes: Axes, device: torch.device, updates: int) -> None:
        self.run, self.axes, self.device, self.updates = run, axes, device, updates
        self.rank = dist.get_rank()
        self.mesh: DeviceMesh = make_mesh(axes, device)
        model = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
        self.parameters = sum(p.numel() for p in model.parameters())  # of the unsplit model
        self.loss_chunks = find_loss_chunks(model, run, device.type)
        self.parallel = parallelize(model, run, self.mesh, device, self.loss_chunks)
        self._head = chunked_head(self.parallel.module)
        self.module: nn.Module = self.parallel.module
        t = run.training
        plain = t.optimizer in LOCAL
        place = axes.coordinates(self.rank)
        self._part = place["cp"]
        self._counts_loss = place["tp"] == 0  # tensor-parallel peers hold the same loss
        self.locals: list[ShardedParam] = local_parameters(self.module, plain, place)
        if isinstance(self.parallel, Pipelined):
            for local in self.locals:
                local.counts = local.counts and local.name not in self.parallel.copies
        if not self.locals:
            raise ShardwrightError("Every parameter is frozen.", "There is nothing to train.", "Loosen model.freeze.")
        self.optimizer = make_optimizer(t, self.locals, self._embeddings())
        self.factor = learning_rate_factor(t, updates)
        self._place = context_place(run, self.mesh)
        self._arguments = forward_arguments(self.module)
        self._by_length = follows_length(model)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._own_loss = own_loss(run.training.loss)
        self._count = torch.zeros_like(self._loss)  # targets, as a loss of the user's own counts them
        self._divisor = 0.0
        self._batch: UpdateBatch | None = None
        self._checked = False
        self.enter: Callable[[str], object] = lambda phase: None
        """Told when `step` reaches its reduction (`reduce`) and the optimizer (`step`)."""

    def set_length(self, updates: int) -> None:
        """Tells how many updates the run has, where that was known only after a checkpoint was read.

        Raises `ConfigError` where the schedule of the learning rate does not fit.
        """
        check_length(self.run.training, updates)
        self.updates, self.factor = updates, learning_rate_factor(self.run.training, updates)

    def _embeddings(self) -> list[str]:
        parts = find_parts(self.module)
        names = [parts.embedding, parts.head]
        tables = [name for name, module in self.module.named_modules() if isinstance(module, nn.Embedding)]
        return [f"{name}.weight" for name in {*names, *tables} if name is not None]

    @property
    def named_locals(self) -> dict[str, ShardedParam]:
        """Trainable parameters by their name in the unsplit model."""
        return {local.name: local for local in self.locals}

    def _inputs(self, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
        """This rank's token ids [B, T / cp] of a microbatch, and what else the model is given.

        Packed rows: positions [B, T / cp] within documents, and the documents of whole rows, on every stage and rank. A model
        whose rotary frequencies follow the length of a document is told where each row ends, by positions of 0 behind it.
        """
        ids, arguments = microbatch.input_ids, dict(self._arguments)
        place, documents = self._place, self._documents(microbatch)
        if documents is not None:
            positions = documents.position_ids
            arguments["position_ids"] = positions if place is None else place.part(positions)
            arguments["documents"] = documents if is_transformers(self.module) else documents.on_device
        elif place is not None:
            arguments["position_ids"] = place.position_ids(ids.shape[1], self.device)
        elif self._by_length and microbatch.lengths is not None:
            rows = PackedRows.of_lengths(microbatch.lengths, ids.shape[1], self.device)
            arguments["position_ids"] = rows.position_ids
        ids = ids if place is None else place.part(ids)
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

    def targets_of(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """(labels, their weights), [B, T / cp], of this rank's positions of a microbatch."""
        labels, weights = microbatch.labels, microbatch.weights
        if self._place is None:
            return labels, weights
        return self._place.part(labels), None if weights is None else self._place.part(weights)

    def _announce(self, microbatch: Microbatch) -> None:
        """Tells a head that makes its loss itself what the targets of the next forward are."""
        if self._head is not None:
            self._head.announce(*self.targets_of(microbatch))

    def loss_of(self, output: Any, microbatch: Microbatch) -> Tensor:
        """Sum of the loss over this rank's targets of a microbatch (a scalar, with its graph), from the model's output."""
        logits = logits_of(output)
        if isinstance(logits, Deferred):
            return logits.finished()
        labels, weights = self.targets_of(microbatch)
        labels = labels.to(self.device, non_blocking=True)
        weights = None if weights is None else weights.to(self.device, non_blocking=True)
        if self._own_loss is None:
            return cross_entropy_sum(logits, labels, weights)
        loss, count = self._own_loss(logits, labels, weights)
        self._count += count
        return loss

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Forward of this microbatch and the sum of its loss; zero on a rank of a pipeline without the last stage."""
        ids, arguments = self._inputs(microbatch)
        self._announce(microbatch)
        output = self.parallel(ids, **arguments)
        return torch.zeros_like(self._loss) if output is None else self.loss_of(output, microbatch)

    def forward_backward(self, batch: UpdateBatch) -> None:
        """Runs every microbatch of `batch`; gradients of SUM(loss) / divisor add up and are reduced by SUM.

        A loss of the user's own says its divisor with its sums. Backward then divides by the batch's, and gradients are
        multiplied once by what that is of the divisor: they have their usual size on the way, and are bitwise the same
        where both are equal.
        """
        if batch.target_tokens < 1:
            raise ShardwrightError(f"Update {batch.update} has no target token.", "Its loss would be 0 / 0.")
        if not self._checked:
            self._check_optimizer()
        if not self.module.training:
            self.module.train()
        self._batch = batch
        self._loss.zero_()
        self._count.zero_()
        if isinstance(self.parallel, Pipelined):
            self._run_pipeline(self.parallel, batch)
        else:
            self._run_microbatches(self.parallel, batch)
        self.parallel.finish_gradients()
        self._divisor = batch.divisor
        if self._own_loss is not None:
            self._divisor = self._agreed_count(batch)
            gradients = [gradient for _, gradient in self.gradients()]
            if self._divisor != batch.divisor and gradients:
                torch._foreach_mul_(gradients, batch.divisor / self._divisor)

    def _agreed_count(self, batch: UpdateBatch) -> float:
        """Targets of the update over all data ranks, as the user's own loss counts them."""
        count = self._count * self._counts_loss
        dist.all_reduce(count)
        if not count > 0:
            raise ShardwrightError(
                f"training.loss {self.run.training.loss} counts {count.item()} targets in update {batch.update}.",
                "Its loss sum is divided by them.",
                "Return the number of targets, or the sum of their weights, as the second value.",
            )
        return count.item()

    def _run_microbatches(self, parallel: Replicated | Sharded, batch: UpdateBatch) -> None:
        for microbatch in batch.microbatches:
            seed_microbatch(self.run.training.seed, batch.update, microbatch.index, part=self._part)
            with parallel.microbatch(last=microbatch is batch.microbatches[-1]):
                loss = self.loss_sum(microbatch)
                self._loss += loss.detach()
                (loss / batch.divisor).backward()

    def _run_pipeline(self, pipeline: Pipelined, batch: UpdateBatch) -> None:
        microbatches, seed = batch.microbatches, self.run.training.seed

        def loss(output: Any, k: int) -> Tensor:
            value = self.loss_of(output, microbatches[k])
            self._loss += value.detach()
            return value / batch.divisor

        def start(k: int, stage: int) -> None:
            seed_microbatch(seed, batch.update, microbatches[k].index, stage, self._part)
            self._announce(microbatches[k])

        inputs = [self._inputs(microbatch) for microbatch in microbatches]
        pipeline.forward_backward(
            [ids for ids, _ in inputs],
            seed=start,
            loss=loss,
            arguments=[arguments for _, arguments in inputs],
        )

    def _check_optimizer(self) -> None:
        """Refuses an optimizer that holds other memory than the model: it would train nothing, silently."""
        stale = [local.name for local in self.locals if not local.is_current()]
        if stale:
            raise ShardwrightError(f"The optimizer does not hold the memory of {stale[0]} ({len(stale)} parameters).")
        self._checked = True

    def gradients(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """This rank's part of every gradient, as plain tensors; parameters without one are left out."""
        for local in self.locals:
            gradient = local.gradient()
            if gradient is not None:
                yield local, gradient

    def _reduce_scalars(self, stop: bool) -> tuple[float, float, int]:
        """(gradient norm, loss sum, ranks asked to stop) over all ranks, in one reduction."""
        counted = [g for local, g in self.gradients() if local.counts]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            wide = torch.float64 if counted[0].dtype == torch.float64 else torch.float32
            norms = torch.stack([norm.to(self.device) for norm in torch._foreach_norm(counted, 2, dtype=wide)])
            square = norms.double().square().sum()
        asked = torch.full_like(square, float(stop))
        agreed = torch.stack([square, self._loss * self._counts_loss, asked])
        dist.all_reduce(agreed)
        squares, loss, stops = agreed.tolist()
        return math.sqrt(squares) if squares >= 0 else math.nan, loss, int(stops)

    def step(self, stop: bool = False) -> UpdateResult:
        """Clips over all parameters and updates them once; on a non-finite value, does what on_non_finite says.

        `stop`: this rank was asked to stop; the result says how many were, so that all act on the same update.
        Raises `NonFiniteError` on every rank alike.
        """
        batch, t = self._batch, self.run.training
        if batch is None:
            raise ShardwrightError("step() without forward_backward().")
        self.enter("reduce")
        norm, loss, stops = self._reduce_scalars(stop)
        self.enter("step")
        finite = math.isfinite(norm) and math.isfinite(loss)
        rate = t.learning_rate * self.factor(batch.update)
        coefficient = 1.0 if t.max_grad_norm is None else min(1.0, t.max_grad_norm / (norm + 1e-6))
        if finite:
            self._apply(coefficient, rate)
        self.zero_grad()
        self._batch = None
        if not finite and t.on_non_finite == "stop":
            raise self._non_finite(batch, norm, loss)
        return UpdateResult(
            update=batch.update,
            loss=loss / self._divisor,
            grad_norm=norm,
            clip_coefficient=coefficient if finite else 0.0,
            learning_rate=rate,
            target_tokens=batch.target_tokens,
            skipped=not finite,
            stop=stops,
        )

    def _apply(self, coefficient: float, rate: float) -> None:
        tensors = []
        for local, gradient in self.gradients():
            tensors.append(gradient)
            if local.tensor is not local.parameter:
                local.tensor.grad = gradient
        if coefficient < 1.0 and tensors:
            torch._foreach_mul_(tensors, coefficient)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for local in self.locals:
            local.parameter.grad = None
            local.tensor.grad = None

    def _non_finite(self, batch: UpdateBatch, norm: float, loss: float) -> NonFiniteError:
        """The error that says where it arose; collective, since the ranks tell each other about their own loss."""
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
        self.parallel.release()
        agreed = torch.stack([total, self._count]) * self._counts_loss
        dist.all_reduce(agreed)
        self.module.train()
        loss, count = agreed.tolist()
        return loss / (weight if self._own_loss is None else count), targets

    def full(self, tensor: Tensor) -> Tensor:
        """The unsplit tensor on every rank; collective."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

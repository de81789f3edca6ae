"""One update: microbatches forward and backward, gradients reduced and clipped, one optimizer step.

`UpdateEngine` is what `train`, `check` and `bench` drive; it knows nothing of files, logs or signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.attention.whole_rows import one_document_each
from shardwright.config.rates import check_length
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import NonFiniteError, ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.loss.objective import cross_entropy_sum, logits_of, own_loss
from shardwright.loss.output_head import DeferredLoss
from shardwright.mesh.device_mesh import make_mesh
from shardwright.mesh.process_group import set_float32_products
from shardwright.models.build import build_model
from shardwright.models.model_parts import is_transformers
from shardwright.models.rotary import follows_length
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import context_shard, parallelize, plan_model
from shardwright.parallel.strategy import Microbatches, Strategy
from shardwright.train.decision import (
    DeviceDecision,
    Numbers,
    PendingResult,
    clip_coefficient,
    norm_of,
    quotient,
    scale,
    step_unless,
    why_the_host_waits,
)
from shardwright.train.decision import (
    UpdateResult as UpdateResult,
)
from shardwright.train.hooks import Hooks
from shardwright.train.inputs import Inputs
from shardwright.train.optimizer import (
    SHARD_OPTIMIZERS,
    ShardedParam,
    learning_rate_factor,
    make_optimizer,
    sharded_params,
)
from shardwright.train.rng import seed_microbatch

Ended = Callable[[Any, float, float, float], UpdateResult]
"""From an update's divisor, gradient norm, loss sum and stop requests to its result."""


class UpdateEngine:
    """A model under a layout, with its optimizer: `forward_backward(batch)`, then `step()`.

    Collective: every rank makes one and calls the same methods in the same order.

    parts: the parts of the unsplit model; parameters: its number of parameters.
    strategy: runs forward and backward under the layout.
    module: this rank's part of the model, with the names of the unsplit model.
    params: this rank's part of each trainable parameter, as the optimizer holds it.
    context: the tokens of each row that this rank holds; None for whole rows.
    inputs: makes the model's inputs of a microbatch.
    counts_loss: whether this rank's loss enters the sum over ranks. Tensor-parallel ranks compute the same loss, one counts it.
    batch: the batch from `forward_backward` to the end of `step`, else None.
    masks: the context of each forward.
    hooks: see `Hooks`.
    """

    def __init__(self, run: RunFile, axes: Axes, device: torch.device, updates: int) -> None:
        self.run, self.axes, self.device, self.updates = run, axes, device, updates
        set_float32_products(exact=run.precision.float32_products == "exact")
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
        self.masks: Callable[[], AbstractContextManager[None]] = (
            one_document_each if is_transformers(model) and run.data.batching != "pack" else nullcontext
        )
        self.inputs = Inputs(run, self.module, device, self.context, follows_length(model))
        self._own_loss = own_loss(t.loss)
        self._divisor: float | Tensor = 0.0
        self._stepped, self._waits = False, why_the_host_waits(device, self.optimizer, (p.tensor for p in self.params))
        self._halted: Tensor | None = None  # where on_non_finite is stop: whether an update was not finite
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
        self._loss = torch.zeros_like(self._loss)  # a pending result keeps that of its own update
        self._count.zero_()
        with self.masks():
            self.strategy.forward_backward(self._microbatches(batch))
        self.strategy.finish_gradients()
        self._divisor = batch.divisor
        if self._own_loss is not None:
            self._divide_by_own_count(batch)
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
            inputs=lambda k: self.inputs.model(microbatches[k], self.hooks.on_inputs),
            before_forward=seed_forward,
            announce=lambda k: self.inputs.announce(microbatches[k]),
            loss=lambda output, k: divided(self.loss_of(output, microbatches[k]), k),
            loss_of_model=lambda k: divided(self.loss_sum(microbatches[k]), k),
        )

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Forward of this microbatch and the sum of its loss; zero on a rank of a pipeline without the last stage."""
        ids, arguments = self.inputs.model(microbatch, self.hooks.on_inputs)
        self.inputs.announce(microbatch)
        output = self.strategy(ids, **arguments)
        return torch.zeros_like(self._loss) if output is None else self.loss_of(output, microbatch)

    def loss_of(self, output: Any, microbatch: Microbatch) -> Tensor:
        """Sum of the loss over this rank's targets of a microbatch (a scalar, with its graph), from the model's output."""
        logits = logits_of(output)
        if isinstance(logits, DeferredLoss):
            return logits.finished()
        labels, weights = self.inputs.labels(microbatch)
        if self._own_loss is None:
            return cross_entropy_sum(logits, labels, weights)
        loss, count = self._own_loss(logits, labels, weights)
        self._count += count
        return loss

    def _divide_by_own_count(self, batch: UpdateBatch) -> None:
        """Makes the divisor the targets of the update over all data ranks, as the user's own loss counts them."""
        count = self._count * self.counts_loss
        dist.all_reduce(count)
        gradients = [gradient for _, gradient in self.gradients()]
        if self._decides_late():
            self._divisor = count
            scale(gradients, quotient(batch.divisor, count))
            return
        self._divisor = self._checked_count(count.item(), batch.update)
        if self._divisor != batch.divisor and gradients:
            torch._foreach_mul_(gradients, batch.divisor / self._divisor)

    def _checked_count(self, count: float, update: int) -> float:
        """`count`, or a `ShardwrightError` where the user's own loss counts no target."""
        if not count > 0:
            raise ShardwrightError(
                f"training.loss {self.run.training.loss} counts {count} targets in update {update}.",
                "The loss sum is divided by this count.",
                "Return the number of targets, or the sum of their weights, as the second value.",
            )
        return count

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
        return self.launch_step(stop).result()

    def launch_step(self, stop: bool = False) -> PendingResult:
        """`step` that does not wait for a GPU where the device itself can decide; see `waits_because`.

        Before weights are saved, the caller must read the result. After a non-finite update under on_non_finite stop, later
        updates change nothing either.
        """
        batch = self.batch
        if batch is None:
            raise ShardwrightError("step() without forward_backward().")
        self.hooks.on_phase("reduce")
        sums, rate = self.reduce_scalars(stop), self.run.training.learning_rate * self.factor(batch.update)
        ended = partial(self._ended, batch, rate, self._loss)
        step = self._step_on_device if self._decides_late() else self._step_on_host
        pending = step(batch.update, sums, rate, ended)
        self.zero_grad()
        self.batch = None
        return pending

    def waits_because(self) -> str:
        """Why each update is decided on the host; empty where it is decided on the device, from the second update on."""
        hooks = self.hooks
        changed = hooks.on_norm is not Hooks.on_norm or hooks.on_clip is not Hooks.on_clip
        return "hooks change the clipping" if changed else self._waits

    def _decides_late(self) -> bool:
        return self._stepped and not self.waits_because()

    def _step_on_host(self, update: int, sums: Tensor, rate: float, ended: Ended) -> PendingResult:
        squares, loss, stops = sums.tolist()
        norm = self.hooks.on_norm(norm_of(squares))
        self.hooks.on_phase("step")
        if math.isfinite(norm) and math.isfinite(loss):
            self._apply(self.hooks.on_clip(clip_coefficient(norm, self.run.training.max_grad_norm)), rate)
            self._stepped = True
        return PendingResult(partial(ended, self._divisor, norm, loss, stops))

    def _step_on_device(self, update: int, sums: Tensor, rate: float, ended: Ended) -> PendingResult:
        t, divisor = self.run.training, self._divisor
        decision = DeviceDecision.of(sums, divisor if isinstance(divisor, Tensor) else None, t.max_grad_norm)
        skip = decision.skip if self._halted is None else decision.skip | self._halted
        if t.on_non_finite == "stop":
            self._halted = skip
        numbers = Numbers(torch.cat([sums, torch.atleast_1d(divisor)]) if isinstance(divisor, Tensor) else sums)
        self.hooks.on_phase("step")
        self._apply(decision.coefficient, rate, skip)

        def read() -> UpdateResult:
            squares, loss, stops, *count = numbers.read()
            return ended(self._checked_count(count[0], update) if count else divisor, norm_of(squares), loss, stops)

        return PendingResult(read, numbers, lambda: self.hooks.on_phase("reduce"))

    def _ended(
        self, batch: UpdateBatch, rate: float, own_loss: Tensor, divisor: float, norm: float, loss: float, stops: float
    ) -> UpdateResult:
        """The result of an update. own_loss: sum of this rank. loss: sum over all ranks."""
        t, finite = self.run.training, math.isfinite(norm) and math.isfinite(loss)
        if not finite and t.on_non_finite == "stop":
            self._halted = None  # whoever goes on in spite of the error trains again
            raise self._non_finite(batch, own_loss, norm, loss)
        return self.hooks.on_result(
            UpdateResult(
                update=batch.update,
                loss=loss / divisor,
                grad_norm=norm,
                clip_coefficient=clip_coefficient(norm, t.max_grad_norm) if finite else 0.0,
                learning_rate=rate,
                target_tokens=batch.target_tokens,
                skipped=not finite,
                stop=int(stops),
            )
        )

    def reduce_scalars(self, stop: bool) -> Tensor:
        """(squared gradient norm, loss sum, ranks asked to stop) over all ranks, in float64; one reduction, collective."""
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
        return sums

    def _apply(self, coefficient: float | Tensor, rate: float, skip: Tensor | None = None) -> None:
        gradients = []
        for param, gradient in self.gradients():
            gradients.append(gradient)
            if param.tensor is not param.parameter:
                param.tensor.grad = gradient
        if isinstance(coefficient, Tensor):
            scale(gradients, coefficient)
        elif coefficient < 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        step_unless(self.optimizer, skip)

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

    def _non_finite(self, batch: UpdateBatch, own_loss: Tensor, norm: float, loss: float) -> NonFiniteError:
        """The error that names the ranks; collective, since the ranks tell each other about their own loss."""
        flags = [torch.zeros((), device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, (~own_loss.isfinite()).float())
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
            with self.masks():
                for microbatch in batch.microbatches:
                    total += self.loss_sum(microbatch)
        self.strategy.release()
        sums = torch.stack([total, self._count]) * self.counts_loss
        dist.all_reduce(sums)
        self.module.train()
        loss, count = sums.tolist()
        return loss / (weight if self._own_loss is None else count), targets

"""The reference: one process, plain autograd and torch.optim, written without the code that it checks.

B rows of a microbatch, T positions, V vocabulary. The reference shares with the engine how a model is built, how rows are read
and how a microbatch is seeded; objective, division, clipping, optimizer groups and learning rates are its own. Parameters,
gradients and states are float64, whatever the run's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from shardwright.config.schema import RunFile, Training
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.models import build_model, find_parts, materialise
from shardwright.models.build import quiet_transformers
from shardwright.models.dropout import has_dropout, silence_dropout
from shardwright.models.model_parts import is_transformers
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.tools.check.force_float64 import force_float64
from shardwright.tools.check.record import MicrobatchNote, Notes, Record, Scalars
from shardwright.tools.check.reference_documents import alone, mistaken_losses, target_weight, targets_inside
from shardwright.tools.check.reference_muon import ReferenceMuon
from shardwright.tools.check.rows import Changes, CheckedRows
from shardwright.train.rng import seed_microbatch

PROBE_ELEMENTS = 25_000_000
"""Elements of gradients of single microbatches that the diagnosis gets, over all microbatches: 200 MB."""


def excluded_from_decay(name: str, dims: int, patterns: list[str]) -> bool:
    """Whether weight decay skips a parameter: vectors and scalars always, others by pattern."""
    return dims < 2 or any(fnmatch(name, pattern) for pattern in patterns)


class Reference:
    """A model, its rows and its optimizer in one process; `record` writes the updates."""

    def __init__(self, run: RunFile, changes: Changes) -> None:
        self.run, self.training = run, run.training
        self.rows = CheckedRows(run, changes, data_rank=0, data_ranks=1)
        self.model = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
        materialise(self.model, run.model, seed=run.training.seed, device=torch.device("cpu"))
        for p in self.model.parameters():
            p.data = p.data.double()
        self.model.train()
        if changes.no_dropout:
            silence_dropout(self.model)
        # dropout masks are drawn for whole rows; padding may be part of the input of a module of a user's own
        drawn = not is_transformers(self.model) or has_dropout(self.model)
        self._whole_rows = run.data.batching == "pad" and drawn
        self.named = dict(self.model.named_parameters())
        self.trained = {name: p for name, p in self.named.items() if p.requires_grad}
        self.limit = self.training.max_grad_norm
        module, _, name = self.training.loss.partition(":")
        self.own_loss = getattr(importlib.import_module(module), name) if name else None
        self.optimizer = self._optimizer()
        self.schedule = self._schedule(self.optimizer)
        self._limit_is_settled = False
        self._first: dict[str, Any] = {}

    def _optimizer(self) -> torch.optim.Optimizer:
        t = self.training
        skip = [p for n, p in self.trained.items() if excluded_from_decay(n, p.dim(), t.no_decay)]
        rest = [p for n, p in self.trained.items() if not excluded_from_decay(n, p.dim(), t.no_decay)]
        groups = [{"params": rest, "weight_decay": t.weight_decay}, {"params": skip, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if t.optimizer == "muon":
            return ReferenceMuon(self._muon_groups(groups), lr=t.learning_rate, **t.optimizer_kwargs)
        kind: Any
        options: dict[str, Any] = {}
        if t.optimizer == "adamw":
            kind = torch.optim.AdamW
            options = {"betas": (t.adam_beta1, t.adam_beta2), "eps": t.adam_epsilon, "foreach": False}
        elif t.optimizer == "sgd":
            kind, options = torch.optim.SGD, {"foreach": False}
        else:
            module, _, name = t.optimizer.partition(":")
            kind = getattr(importlib.import_module(module), name)
        optimizer: torch.optim.Optimizer = kind(groups, lr=t.learning_rate, **{**options, **t.optimizer_kwargs})
        return optimizer

    def _muon_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`groups` split into the matrices that get orthogonal steps and the rest: vectors, embeddings, the head."""
        parts, tables = find_parts(self.model), set()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) or name in (parts.embedding, parts.head):
                tables |= {id(p) for p in module.parameters()}
        split = []
        for group in groups:
            matrices = [p for p in group["params"] if p.dim() == 2 and id(p) not in tables]
            rest = [p for p in group["params"] if p.dim() != 2 or id(p) in tables]
            split += [{**group, "params": own, "orthogonal": o} for own, o in ((matrices, True), (rest, False)) if own]
        return split

    def _schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        t = self.training
        return get_scheduler(
            t.lr_scheduler_type,
            optimizer,
            num_warmup_steps=t.warmup_steps,
            num_training_steps=self.rows.order.total_updates,
            scheduler_specific_kwargs=t.lr_scheduler_kwargs,
        )

    def _learning_rates(self, steps: int) -> tuple[float, ...]:
        """The learning rates of the first `steps` scheduler steps."""
        stub = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.training.learning_rate)
        schedule, rates = self._schedule(stub), []
        for _ in range(steps):
            rates.append(stub.param_groups[0]["lr"])
            stub.step()
            schedule.step()
        return tuple(rates)

    def _logits(self, ids: Tensor, **arguments: Tensor) -> Tensor:
        """[B, T, V] for input ids [B, T]."""
        if is_transformers(self.model):
            output = self.model(input_ids=ids, use_cache=False, **arguments)
        else:
            output = self.model(ids, **arguments)
        if isinstance(output, Tensor):
            return output
        return output["logits"] if isinstance(output, dict) else output.logits

    def _microbatch_logits(self, microbatch: Microbatch) -> Tensor:
        """[B, T, V]: of each document run alone, without padding; of whole rows where `_whole_rows` is set."""
        return self._logits(microbatch.input_ids) if self._whole_rows else alone(microbatch, self._logits)

    def _loss_sum(
        self, update: int, microbatch: Microbatch, labels: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, float]:
        """(sum of weight x cross entropy over the targets in `labels` [B, T], row by row, sum of the weights).

        A loss of the user's own returns both.
        """
        seed_microbatch(self.training.seed, update, microbatch.index)
        logits = self._microbatch_logits(microbatch)
        if self.own_loss is not None:
            loss, count = self.own_loss(logits, labels, weights)
            return loss, float(count)
        each = torch.ones(labels.shape) if weights is None else weights
        rows = (
            nn.functional.cross_entropy(own, targets, ignore_index=IGNORE_INDEX, reduction="none") @ weight
            for own, targets, weight in zip(logits.double(), labels, each.double())
        )
        return torch.stack(list(rows)).sum(), each.double()[labels != IGNORE_INDEX].sum().item()

    def _gradients(
        self, batch: UpdateBatch, count: float
    ) -> Iterator[tuple[Microbatch, float, float, dict[str, Tensor]]]:
        """(microbatch, its loss sum, its divisor, the gradient of that sum / count) one after another.

        The division comes before backward, as in the run: in float32 another scale would be rounded in another way.
        """
        for microbatch in batch.microbatches:
            self.model.zero_grad()
            with force_float64(self.run):
                loss, own_count = self._loss_sum(batch.update, microbatch, microbatch.labels, microbatch.weights)
                if loss.requires_grad:
                    (loss / count).backward()
            own = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
            yield microbatch, loss.item(), own_count, own

    def _probe_names(self, microbatches: int) -> set[str]:
        """The smallest parameters, as many as `PROBE_ELEMENTS` allows for every microbatch."""
        left, chosen = PROBE_ELEMENTS // microbatches, set()
        for name, p in sorted(self.trained.items(), key=lambda item: item[1].numel()):
            left -= p.numel()
            if left < 0:
                break
            chosen.add(name)
        return chosen

    def record(self, record: Record, updates: int) -> None:
        """Writes `updates` updates to `record`.

        Where clipping is on but the first gradient is within the limit, `limit` becomes half of that gradient's norm.
        """
        record.write_tensors(0, "param", self.named)
        for number in range(updates):
            self._update(record, number)
        record.write_notes(self._notes())

    def _update(self, record: Record, number: int) -> None:
        batch = targets_inside(self.rows.update(number))
        targets = tuple(int((m.labels != IGNORE_INDEX).sum()) for m in batch.microbatches)
        total: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        probe: dict[int, dict[str, Tensor]] = {}
        chosen = self._probe_names(len(targets)) if number == 0 else set()
        sums: list[float] = []
        divisors: list[float] = []
        if number == 0:
            self._note_first(batch)
        likely = sum(target_weight(m, m.labels) for m in batch.microbatches)
        for microbatch, loss, own_count, gradients in self._gradients(batch, likely):
            sums.append(loss)
            divisors.append(own_count)
            for name, gradient in gradients.items():
                total[name] += gradient
            if number == 0:
                zero = {n: torch.zeros_like(self.trained[n]) for n in chosen - gradients.keys()}
                probe[microbatch.index] = zero | {n: g * likely for n, g in gradients.items() if n in chosen}
        count = sum(divisors)
        for name, p in self.trained.items():
            if count != likely:
                total[name] *= likely / count
            p.grad = total[name]
        record.write_tensors(number + 1, "grad", total)
        if number == 0:
            record.write_probe(probe)
            self._first |= {
                "microbatch_targets": targets,
                "microbatch_divisors": tuple(divisors),
                "microbatch_loss_sums": tuple(sums),
            }
        norm, coefficient = self._clip()
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        notes = (MicrobatchNote(0, m.index, m.row_ids, n) for m, n in zip(batch.microbatches, targets))
        record.write_scalars(
            number + 1, Scalars(sum(targets), sum(sums) / count, norm, coefficient, rate, tuple(notes))
        )
        record.write_tensors(number + 1, "param", self.named)
        for kind, tensors in self._states().items():
            record.write_tensors(number + 1, kind, tensors)

    def _clip(self) -> tuple[float, float]:
        """(norm before clipping, coefficient); gradients are clipped in place."""
        parameters = [p for p in self.trained.values() if p.grad is not None]
        norm = torch.sqrt(sum((p.grad.square().sum() for p in parameters), torch.zeros(()).double())).item()  # type: ignore[union-attr]
        if self.limit is None:
            return norm, 1.0
        if not self._limit_is_settled and norm <= self.limit:
            self.limit = norm / 2
        self._limit_is_settled = True
        torch.nn.utils.clip_grad_norm_(parameters, self.limit)
        return norm, min(1.0, self.limit / (norm + 1e-6))

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of the optimizer's state by kind and parameter."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in self.trained.items():
            for kind, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found.setdefault(kind, {})[name] = value
        return found

    @torch.no_grad()
    def _note_first(self, batch: UpdateBatch) -> None:
        """Notes losses and counts of the first update under mistaken labels."""
        count, losses = sum(target_weight(m, m.labels) for m in batch.microbatches), {}
        for words, shift in (("shifted again", 1), ("not shifted", -1)):
            total = own = 0.0
            for microbatch in batch.microbatches:
                labels = torch.full_like(microbatch.labels, IGNORE_INDEX)
                if shift > 0:
                    labels[:, :-1] = microbatch.labels[:, 1:]
                else:
                    labels[:, 1:] = microbatch.labels[:, :-1]
                total += self._loss_sum(batch.update, microbatch, labels, microbatch.weights)[0].item()
                own += target_weight(microbatch, labels)
            losses[words] = total / count
            losses[f"{words}, divided by their own {own:g}"] = total / (own or 1.0)
        if is_transformers(self.model):
            positions = getattr(self.model.config, "max_position_embeddings", None)
            losses |= dict(mistaken_losses(batch, self._logits, positions, count))
        counts = {
            "tokens that are not padding (labels before the shift)": batch.real_tokens,
            "positions (rows x max_length)": batch.slots,
        }
        self._first |= {"other_losses": losses, "other_counts": counts}

    def _notes(self) -> Notes:
        t, parts, first = self.training, find_parts(self.model), self._first
        steps = 3 * len(first["microbatch_targets"]) + 2
        group = self.optimizer.param_groups[0]
        betas = group.get("betas", (t.adam_beta1, t.adam_beta2))
        return Notes(
            names=tuple(self.named),
            optimizer=t.optimizer,
            weight_decay=t.weight_decay,
            adam={"beta1": betas[0], "beta2": betas[1], "epsilon": float(group.get("eps", t.adam_epsilon))},
            momentum=float(group.get("momentum", 0.0)),
            no_decay=tuple(n for n, p in self.trained.items() if excluded_from_decay(n, p.dim(), t.no_decay)),
            frozen=tuple(name for name in self.named if name not in self.trained),
            tied=parts.tied,
            blocks=parts.blocks,
            learning_rates=self._learning_rates(steps),
            **first,
        )


def run_reference(run: RunFile, changes: Changes, directory: Path, updates: int) -> tuple[Record, Training]:
    """(record of `updates` updates in this process, the training section with the gradient norm limit that was used)."""
    record = Record(directory)
    quiet_transformers()
    reference = Reference(run, changes)
    reference.record(record, updates)
    return record, run.training.model_copy(update={"max_grad_norm": reference.limit})

"""Faults to plant into the candidate, to see that `check` finds and names them. Each is called what its diagnosis is called.

They patch one engine in one process of a check, through its public methods where they can, and touch nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ConfigError, did_you_mean
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.models import find_parts
from shardwright.parallel.ddp import Replicated
from shardwright.parallel.pipeline.schedule_runner import Pipelined
from shardwright.train.update import Engine

Fault = Callable[[Engine], None]


def _microbatches(engine: Engine) -> int:
    t = engine.run.training
    return t.global_batch_size // (t.per_device_train_batch_size * engine.axes.data_ranks)


def _scale_gradients(factor: Callable[[Engine], float], only: str = "") -> Fault:
    """Gradients times a factor after they were reduced; `only` restricts it to names with this prefix."""

    def fault(engine: Engine) -> None:
        original = engine.forward_backward

        def forward_backward(batch: UpdateBatch) -> None:
            original(batch)
            for local, gradient in engine.gradients():
                if local.name.startswith(only):
                    gradient.mul_(factor(engine))

        engine.forward_backward = forward_backward  # type: ignore[method-assign]

    return fault


def _scale_losses(factor: Callable[[Engine, Microbatch, UpdateBatch], float], value: bool) -> Fault:
    """Each microbatch's loss times a factor, in its gradient and, with `value`, in its value too."""

    def fault(engine: Engine) -> None:
        original = engine.loss_of

        def loss_of(output: Any, microbatch: Microbatch) -> Tensor:
            loss = original(output, microbatch)
            if engine._batch is None:  # not within an update
                return loss
            scale = factor(engine, microbatch, engine._batch)
            return loss * scale if value else loss.detach() + (loss - loss.detach()) * scale

        engine.loss_of = loss_of  # type: ignore[method-assign]

    return fault


def _divisor(*microbatches: Microbatch) -> float:
    """What the loss of these microbatches alone would be divided by."""
    each = (
        m.labels != IGNORE_INDEX if m.weights is None else m.weights.double() * (m.labels != IGNORE_INDEX)
        for m in microbatches
    )
    return sum(float(weights.sum()) for weights in each) or 1.0


def _shifted_again(engine: Engine) -> None:
    original = engine.targets_of

    def targets_of(microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        labels = torch.full_like(microbatch.labels, IGNORE_INDEX)
        labels[:, :-1] = microbatch.labels[:, 1:]
        return original(replace(microbatch, labels=labels))

    engine.targets_of = targets_of  # type: ignore[method-assign]


def _change_inputs(change: Callable[[Engine, Microbatch, dict[str, Any]], None]) -> Fault:
    """Changes what the model is told of packed rows beside their ids."""

    def fault(engine: Engine) -> None:
        if engine.run.data.batching != "pack":
            raise ConfigError("This fault needs packed rows.", "", "Set data.batching to pack.")
        original = engine._inputs

        def inputs(microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
            ids, arguments = original(microbatch)
            change(engine, microbatch, arguments)
            return ids, arguments

        engine._inputs = inputs  # type: ignore[method-assign]

    return fault


def _one_document(engine: Engine, microbatch: Microbatch, arguments: dict[str, Any]) -> None:
    assert microbatch.documents is not None
    arguments["documents"] = PackedRows(microbatch.documents.clamp(max=0), engine.device)


def _positions_of_rows(engine: Engine, microbatch: Microbatch, arguments: dict[str, Any]) -> None:
    places = torch.arange(microbatch.input_ids.shape[1], device=engine.device).expand(microbatch.input_ids.shape)
    arguments["position_ids"] = places if engine._place is None else engine._place.part(places)


def _targets_across(engine: Engine) -> None:
    original = engine.forward_backward

    def crossing(microbatch: Microbatch) -> Microbatch:
        numbers, labels = microbatch.documents, microbatch.labels.clone()
        if numbers is None:
            raise ConfigError("This fault needs packed rows.", "", "Set data.batching to pack.")
        last = (numbers[:, :-1] != numbers[:, 1:]) & (numbers[:, 1:] >= 0)
        labels[:, :-1] = torch.where(last, microbatch.input_ids[:, 1:], labels[:, :-1])
        return replace(microbatch, labels=labels)

    def forward_backward(batch: UpdateBatch) -> None:
        original(replace(batch, microbatches=tuple(map(crossing, batch.microbatches))))

    engine.forward_backward = forward_backward  # type: ignore[method-assign]


def _real_tokens_as_targets(engine: Engine) -> None:
    original = engine.forward_backward
    engine.forward_backward = lambda batch: original(  # type: ignore[method-assign]
        replace(batch, target_tokens=batch.real_tokens, target_weight=None)
    )


def _not_synchronised(engine: Engine) -> None:
    if not isinstance(engine.parallel, Replicated):
        _scale_losses(lambda e, m, b: float(e.axes.data_rank(e.rank) == 0), value=False)(engine)
        return
    original = engine.parallel.microbatch
    engine.parallel.microbatch = lambda last: original(last=False)  # type: ignore[method-assign]
    engine.parallel.finish_gradients = lambda: None  # type: ignore[method-assign]


def _change_norm(change: Callable[[Engine, float], float]) -> Fault:
    def fault(engine: Engine) -> None:
        original = engine._reduce_scalars

        def agree(stop: bool) -> tuple[float, float, int]:
            norm, loss, stops = original(stop)
            return change(engine, norm), loss, stops

        engine._reduce_scalars = agree  # type: ignore[method-assign]

    return fault


def _local_norm(engine: Engine, norm: float) -> float:
    squares = (g.double().square().sum().item() for local, g in engine.gradients() if local.counts)
    return sum(squares) ** 0.5


def _change_result(change: Callable[[Engine, Any], Any]) -> Fault:
    def fault(engine: Engine) -> None:
        original = engine.step
        engine.step = lambda stop=False: change(engine, original(stop))  # type: ignore[method-assign]

    return fault


def _change_coefficient(change: Callable[[float], float]) -> Fault:
    def fault(engine: Engine) -> None:
        original = engine._apply
        engine._apply = lambda coefficient, rate: original(change(coefficient), rate)  # type: ignore[method-assign]

    return fault


def _one_use_of_a_tied_weight(engine: Engine) -> None:
    """The embedding gives no gradient; in a pipeline with a copy at each end, the ends do not tell each other theirs."""
    parts, parallel = find_parts(engine.module), engine.parallel
    planted = torch.zeros(())
    if isinstance(parallel, Pipelined) and parallel.ties.names:
        parallel._exchange = lambda p: None  # type: ignore[method-assign]
        planted += 1
    elif parts.tied and parts.embedding is not None:
        table: Any = engine.module.get_submodule(parts.embedding)
        look_up = table.forward
        table.forward = lambda ids: look_up(ids).detach()
        planted += 1
    planted = planted.to(engine.device)
    dist.all_reduce(planted)
    if not planted:
        raise ConfigError("--plant tying_lost needs a model with tied weights.", "", "Use examples/gpt2-tiny.yaml.")


def _weights_put_back(engine: Engine) -> None:
    original = engine.optimizer.step

    def step(*args: Any) -> None:
        kept = [local.tensor.detach().clone() for local in engine.locals]
        original(*args)
        with torch.no_grad():
            for local, value in zip(engine.locals, kept):
                local.tensor.copy_(value)

    engine.optimizer.step = step  # type: ignore[assignment]


def _set_decay(value: Callable[[Engine], float]) -> Fault:
    def fault(engine: Engine) -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = value(engine)

    return fault


def _decay_through_gradient(engine: Engine) -> None:
    original = engine.optimizer.step
    decayed: dict[int, float] = {}
    for group in engine.optimizer.param_groups:
        decayed |= {id(p): group["weight_decay"] for p in group["params"]}
        group["weight_decay"] = 0.0

    def step(*args: Any) -> None:
        for group in engine.optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad + decayed[id(p)] * p.detach()
        original(*args)

    engine.optimizer.step = step  # type: ignore[assignment]


def _rate_of(step: Callable[[Engine, int], int]) -> Fault:
    def fault(engine: Engine) -> None:
        original = engine.factor
        engine.factor = lambda update: original(step(engine, update))

    return fault


def _keep_gradients(engine: Engine) -> None:
    engine.zero_grad = lambda: None  # type: ignore[method-assign]


def _forget_state(engine: Engine) -> None:
    original = engine.optimizer.step

    def step(*args: Any) -> None:
        engine.optimizer.state.clear()
        original(*args)

    engine.optimizer.step = step  # type: ignore[assignment]


@torch.no_grad()
def _other_start(engine: Engine) -> None:
    engine.locals[-1].tensor.add_(0.01)


def _own_weights_on_rank_1(engine: Engine) -> None:
    original = engine.optimizer.step

    def step(*args: Any) -> None:
        original(*args)
        if engine.rank == 1:
            with torch.no_grad():
                engine.locals[-1].tensor.add_(1e-4)

    engine.optimizer.step = step  # type: ignore[assignment]


def _one_unit(engine: Engine) -> None:
    block = find_parts(engine.module).blocks[1]
    _scale_gradients(lambda e: e.axes.data_ranks, only=f"{block}.")(engine)


def _change_embedded(change: Callable[[Tensor], Tensor]) -> Fault:
    """Changes what the embedding gives, [B, T, D], on the ranks that hold it."""

    def fault(engine: Engine) -> None:
        name = find_parts(engine.module).embedding
        if name is None:
            raise ConfigError("This fault needs a model with an embedding that Transformers knows.")
        engine.module.get_submodule(name).register_forward_hook(lambda module, args, out: change(out))

    return fault


FAULTS: dict[str, Fault] = {
    "summed_twice": _scale_gradients(lambda e: e.axes.data_ranks),
    "averaged": _scale_gradients(lambda e: 1 / e.axes.data_ranks),
    "divided_again": _scale_gradients(lambda e: 1 / _microbatches(e)),
    "sign": _scale_gradients(lambda e: -1.0),
    "never_divided": _scale_losses(lambda e, m, b: b.divisor, value=True),
    "wrong_target_count": _real_tokens_as_targets,
    "mean_of_microbatch_means": _scale_losses(
        lambda e, m, b: b.divisor / _divisor(m) / _microbatches(e) / e.axes.data_ranks, value=True
    ),
    "mean_of_rank_means": _scale_losses(
        lambda e, m, b: b.divisor / _divisor(*b.microbatches) / e.axes.data_ranks, value=False
    ),
    "last_microbatch_only": _scale_losses(lambda e, m, b: float(m is b.microbatches[-1]), value=False),
    "no_reduction": _not_synchronised,
    "labels_shifted_twice": _shifted_again,
    "documents_see_each_other": _change_inputs(_one_document),
    "positions_run_on": _change_inputs(_positions_of_rows),
    "target_across_boundary": _targets_across,
    "depends_on_neighbours": _change_embedded(lambda x: x + x.mean(0, keepdim=True)),
    "depends_on_width": _change_embedded(lambda x: x * (1 + x.shape[1] / 1000)),
    "loss_report": _change_result(lambda e, result: replace(result, loss=result.loss / e.axes.data_ranks)),
    "norm_not_reduced": _change_norm(_local_norm),
    "norm_counted_twice": _change_norm(lambda e, norm: norm * e.axes.data_ranks**0.5),
    "norm_after_clipping": _change_result(
        lambda e, result: replace(result, grad_norm=result.grad_norm * result.clip_coefficient)
    ),
    "clipping_missing": _change_coefficient(lambda coefficient: 1.0),
    "clipping_twice": _change_coefficient(lambda coefficient: coefficient**2),
    "tying_lost": _one_use_of_a_tied_weight,
    "stale_optimizer": _weights_put_back,
    "decay_on_excluded": _set_decay(lambda e: e.run.training.weight_decay),
    "decay_missing": _set_decay(lambda e: 0.0),
    "decay_in_gradient": _decay_through_gradient,
    "schedule_step": _rate_of(lambda e, update: update * _microbatches(e)),
    "gradients_not_zeroed": _keep_gradients,
    "state_reset": _forget_state,
    "one_unit": _one_unit,
    "different_start": _other_start,
    "diverged_replicas": _own_weights_on_rank_1,
    "same_rows": lambda engine: None,  # the rows are chosen before there is an engine: see candidate.record_updates
}


def known_fault(name: str) -> str:
    """`name`, if it is a fault that can be planted. Raises `ConfigError` with the nearest name otherwise."""
    if name not in FAULTS:
        raise ConfigError(
            f"--plant {name} is not known.", "", did_you_mean(name, FAULTS) or f"Valid: {', '.join(FAULTS)}."
        )
    return name


def plant(name: str, engine: Engine) -> None:
    """Puts the fault `name` into `engine`."""
    FAULTS[known_fault(name)](engine)

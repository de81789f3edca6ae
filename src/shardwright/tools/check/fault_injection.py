"""Faults to plant into the candidate, to see that `check` finds and names them. Each has the name of its diagnosis.

They change one engine in one process of a check, through its hooks (`train.update.Hooks`), the hooks of torch's optimizers and
public attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ConfigError, did_you_mean
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.parallel.strategy import Ties
from shardwright.train.update import UpdateEngine

Fault = Callable[[UpdateEngine], None]


def _hook(name: str, change: Callable[..., Any]) -> Fault:
    """Sets the hook `name` of an engine to `change`, which gets the engine as its first argument."""
    return lambda engine: setattr(engine.hooks, name, partial(change, engine))


def _microbatches(engine: UpdateEngine) -> int:
    t = engine.run.training
    return t.global_batch_size // (t.per_device_train_batch_size * engine.axes.data_ranks)


def _scale_gradients(factor: Callable[[UpdateEngine], float], only: str = "") -> Fault:
    """Gradients times a factor after they were reduced; `only` restricts it to names with this prefix."""

    def scale(engine: UpdateEngine) -> None:
        for param, gradient in engine.gradients():
            if param.name.startswith(only):
                gradient.mul_(factor(engine))

    return _hook("post_reduce", scale)


def _scale_losses(factor: Callable[[UpdateEngine, Microbatch, UpdateBatch], float], value: bool) -> Fault:
    """Each microbatch's loss times a factor, in its gradient and, with `value`, in its value too."""

    def scaled(engine: UpdateEngine, loss: Tensor, microbatch: Microbatch, batch: UpdateBatch) -> Tensor:
        scale = factor(engine, microbatch, batch)
        return loss * scale if value else loss.detach() + (loss - loss.detach()) * scale

    return _hook("on_loss", scaled)


def _divisor(*microbatches: Microbatch) -> float:
    """The divisor of a loss over these microbatches alone."""
    total = 0.0
    for m in microbatches:
        targets = m.labels != IGNORE_INDEX
        total += float((targets if m.weights is None else m.weights.double() * targets).sum())
    return total or 1.0


def _change_microbatches(change: Callable[[Microbatch], Microbatch]) -> Fault:
    return _hook("on_batch", lambda e, batch: replace(batch, microbatches=tuple(map(change, batch.microbatches))))


def _shifted_again(microbatch: Microbatch) -> Microbatch:
    labels = torch.full_like(microbatch.labels, IGNORE_INDEX)
    labels[:, :-1] = microbatch.labels[:, 1:]
    return replace(microbatch, labels=labels)


def _documents(microbatch: Microbatch) -> Tensor:
    if microbatch.documents is None:
        raise ConfigError("This fault needs packed rows.", "", "Set data.batching to pack.")
    return microbatch.documents


def _targets_across(microbatch: Microbatch) -> Microbatch:
    """The last token of a document has the first of the next one as its target."""
    numbers, labels = _documents(microbatch), microbatch.labels.clone()
    last = (numbers[:, :-1] != numbers[:, 1:]) & (numbers[:, 1:] >= 0)
    labels[:, :-1] = torch.where(last, microbatch.input_ids[:, 1:], labels[:, :-1])
    return replace(microbatch, labels=labels)


def _one_document(engine: UpdateEngine, microbatch: Microbatch, arguments: dict[str, Any]) -> None:
    arguments["documents"] = PackedRows(_documents(microbatch).clamp(max=0), engine.device)


def _positions_of_rows(engine: UpdateEngine, microbatch: Microbatch, arguments: dict[str, Any]) -> None:
    shape = _documents(microbatch).shape
    places = torch.arange(shape[1], device=engine.device).expand(shape)
    arguments["position_ids"] = places if engine.context is None else engine.context.part(places)


def _not_synchronised(engine: UpdateEngine) -> None:
    if engine.run.parallelism.data_parallel != "ddp" or engine.axes.pp > 1:
        _scale_losses(lambda e, m, b: float(e.axes.data_rank(e.rank) == 0), value=False)(engine)
        return
    ddp: Any = engine.strategy
    microbatch = ddp.microbatch
    ddp.microbatch = lambda last: microbatch(last=False)
    ddp.reduce_gradients = lambda: None


def _local_norm(engine: UpdateEngine, norm: float) -> float:
    return sum(g.double().square().sum().item() for param, g in engine.gradients() if param.counts) ** 0.5


def _one_use_of_a_tied_weight(engine: UpdateEngine) -> None:
    """The embedding gives no gradient; where two pipeline ranks hold the tied weight, neither sends its gradient."""
    parts, strategy = engine.parts, engine.strategy
    planted = torch.zeros((), device=engine.device)
    if strategy.ties.names:
        strategy.ties = Ties()
        planted += 1
    elif parts.tied and parts.embedding is not None:
        table: Any = engine.module.get_submodule(parts.embedding)
        look_up = table.forward
        table.forward = lambda ids: look_up(ids).detach()
        planted += 1
    dist.all_reduce(planted)
    if not planted:
        raise ConfigError("--plant tying_lost needs a model with tied weights.", "", "Use examples/gpt2-tiny.yaml.")


def _weights_put_back(engine: UpdateEngine) -> None:
    kept: list[Tensor] = []

    @torch.no_grad()
    def put_back(*_: Any) -> None:
        for param, value in zip(engine.params, kept):
            param.tensor.copy_(value)

    def keep(*_: Any) -> None:
        kept[:] = [param.tensor.detach().clone() for param in engine.params]

    engine.optimizer.register_step_pre_hook(keep)
    engine.optimizer.register_step_post_hook(put_back)


def _set_decay(value: Callable[[UpdateEngine], float]) -> Fault:
    def fault(engine: UpdateEngine) -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = value(engine)

    return fault


def _decay_through_gradient(engine: UpdateEngine) -> None:
    decayed: dict[int, float] = {}
    for group in engine.optimizer.param_groups:
        decayed |= {id(p): group["weight_decay"] for p in group["params"]}
        group["weight_decay"] = 0.0

    def add_decay(*_: Any) -> None:
        for group in engine.optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad + decayed[id(p)] * p.detach()

    engine.optimizer.register_step_pre_hook(add_decay)


def _wrong_schedule_step(engine: UpdateEngine) -> None:
    factor = engine.factor
    engine.factor = lambda update: factor(update * _microbatches(engine))


def _keep_gradients(engine: UpdateEngine) -> None:
    engine.zero_grad = lambda: None  # type: ignore[method-assign]


def _forget_state(engine: UpdateEngine) -> None:
    engine.optimizer.register_step_pre_hook(lambda *_: engine.optimizer.state.clear())


@torch.no_grad()
def _other_start(engine: UpdateEngine) -> None:
    engine.params[-1].tensor.add_(0.01)


def _own_weights_on_rank_1(engine: UpdateEngine) -> None:
    @torch.no_grad()
    def drift(*_: Any) -> None:
        if engine.rank == 1:
            engine.params[-1].tensor.add_(1e-4)

    engine.optimizer.register_step_post_hook(drift)


def _one_unit(engine: UpdateEngine) -> None:
    block = engine.parts.blocks[1]
    _scale_gradients(lambda e: e.axes.data_ranks, only=f"{block}.")(engine)


def _change_embedded(change: Callable[[Tensor], Tensor]) -> Fault:
    """Changes the output of the embedding, [B, T, D], on the ranks that hold it."""

    def fault(engine: UpdateEngine) -> None:
        name = engine.parts.embedding
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
    "wrong_target_count": _hook(
        "on_batch", lambda e, batch: replace(batch, target_tokens=batch.real_tokens, target_weight=None)
    ),
    "mean_of_microbatch_means": _scale_losses(
        lambda e, m, b: b.divisor / _divisor(m) / _microbatches(e) / e.axes.data_ranks, value=True
    ),
    "mean_of_rank_means": _scale_losses(
        lambda e, m, b: b.divisor / _divisor(*b.microbatches) / e.axes.data_ranks, value=False
    ),
    "last_microbatch_only": _scale_losses(lambda e, m, b: float(m is b.microbatches[-1]), value=False),
    "no_reduction": _not_synchronised,
    "labels_shifted_twice": _change_microbatches(_shifted_again),
    "documents_see_each_other": _hook("on_inputs", _one_document),
    "positions_run_on": _hook("on_inputs", _positions_of_rows),
    "target_across_boundary": _change_microbatches(_targets_across),
    "depends_on_neighbours": _change_embedded(lambda x: x + x.mean(0, keepdim=True)),
    "depends_on_width": _change_embedded(lambda x: x * (1 + x.shape[1] / 1000)),
    "loss_report": _hook("on_result", lambda e, result: replace(result, loss=result.loss / e.axes.data_ranks)),
    "norm_not_reduced": _hook("on_norm", _local_norm),
    "norm_counted_twice": _hook("on_norm", lambda e, norm: norm * e.axes.data_ranks**0.5),
    "norm_after_clipping": _hook(
        "on_result", lambda e, result: replace(result, grad_norm=result.grad_norm * result.clip_coefficient)
    ),
    "clipping_missing": _hook("on_clip", lambda e, coefficient: 1.0),
    "clipping_twice": _hook("on_clip", lambda e, coefficient: coefficient**2),
    "tying_lost": _one_use_of_a_tied_weight,
    "stale_optimizer": _weights_put_back,
    "decay_on_excluded": _set_decay(lambda e: e.run.training.weight_decay),
    "decay_missing": _set_decay(lambda e: 0.0),
    "decay_in_gradient": _decay_through_gradient,
    "schedule_step": _wrong_schedule_step,
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


def plant(name: str, engine: UpdateEngine) -> None:
    """Puts the fault `name` into `engine`."""
    FAULTS[known_fault(name)](engine)

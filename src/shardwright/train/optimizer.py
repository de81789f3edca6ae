"""Optimizers over this rank's shards, weight-decay groups by name, and learning rates as functions of the update.

AdamW, SGD and our Muon work on plain local tensors that share memory with the sharded parameters: one fused or foreach call
over all of them, without DTensor's dispatch. An optimizer of the user's own gets the model's parameters, since such an
optimizer may need whole matrices. Decision 0004.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwright.checkpoint.restore import OptimizerChange
from shardwright.checkpoint.settings import Change
from shardwright.config.schema import Training
from shardwright.errors import ConfigError, did_you_mean
from shardwright.layout.import_path import import_object
from shardwright.mesh.device_mesh import FLATTENED
from shardwright.mesh.shard_geometry import from_local, local_tensor
from shardwright.models.model_parts import canonical_name
from shardwright.parallel.strategy import Ties
from shardwright.train.muon import Muon

_CLASSES: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": Muon,
}
SHARD_OPTIMIZERS = tuple(_CLASSES)
"""Optimizers of our own list, which work on plain tensors over shards."""
OPTIMIZER_KEYS = {"training.optimizer", "training.optimizer_kwargs", "model.freeze"}
"""Keys of the run file that decide which state the optimizer keeps, and for which parameters."""
_SET_ELSEWHERE = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments of schedules that other keys of the run file set."""
_ROUNDING = 8 * sys.float_info.epsilon
"""Rounding error of a factor of 1 that a few operations of float64 have made."""


@dataclass
class ShardedParam:
    """This rank's part of one trainable parameter.

    name: fully qualified, as in the unsplit model.
    parameter: the model's.
    tensor: what the optimizer holds: the parameter itself, or a plain view of its shard.
    counts: whether this rank's part enters the gradient norm. Of ranks with equal parts, one rank's part enters.
    """

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    counts: bool

    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient as a plain tensor, or None where backward left none."""
        return None if self.parameter.grad is None else local_tensor(self.parameter.grad)

    def is_current(self) -> bool:
        """Whether the optimizer's tensor is the model's memory; re-sharding and re-creation give the model other memory."""
        local, held = local_tensor(self.parameter), local_tensor(self.tensor)
        return held.data_ptr() == local.data_ptr() and held.shape == local.shape

    def wrap(self, local: Tensor) -> Tensor:
        """A tensor shaped like this rank's part, as a DTensor of the global shape where the parameter is sharded."""
        return from_local(local, self.parameter)


def split_axes(parameter: nn.Parameter) -> set[str]:
    """The mesh axes over which a parameter is divided. On every other axis but pp each rank holds all of it."""
    if not isinstance(parameter, DTensor):
        return set()
    dims = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements)
    names = [name for name, placement in dims if not isinstance(placement, Replicate)]
    return {axis for name in names for axis in FLATTENED.get(name, (name,))}


def sharded_params(
    module: nn.Module, plain_views: bool, coordinates: Mapping[str, int], ties: Ties
) -> list[ShardedParam]:
    """Every trainable parameter of `module` once, in the order of the model (tied ones under their first name).

    plain_views: give the optimizer views of shards. coordinates: of this rank on the axes. Of ranks that hold the same part
    of a parameter, the first rank's part enters the norm; of a tied pair over two pipeline ranks, the part of the rank that
    `ties` names.
    """
    found = []
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        divided, name = split_axes(p), canonical_name(name)
        first = all(at == 0 for axis, at in coordinates.items() if axis != "pp" and axis not in divided)
        tensor = nn.Parameter(p.to_local().detach()) if plain_views and isinstance(p, DTensor) else p
        found.append(ShardedParam(name, p, tensor, first and not ties.is_counted_elsewhere(name)))
    return found


def decays(name: str, shape: Iterable[int], patterns: Iterable[str]) -> bool:
    """Whether weight decay applies to this parameter: by its name and its unsplit shape, never by the shape of the shard."""
    return len(tuple(shape)) >= 2 and not any(fnmatch(name, pattern) for pattern in patterns)


def make_optimizer(
    training: Training, parameters: list[ShardedParam], not_matrices: Iterable[str] = ()
) -> torch.optim.Optimizer:
    """The optimizer of the run file over `parameters`, in groups by weight decay (and, for muon, by kind of step).

    `not_matrices` names parameters that are matrices by shape only (embedding, head): muon gives these matrices AdamW steps.
    Raises `ConfigError` for an unknown name or arguments that the class does not take.
    """
    t, apart = training, set(not_matrices)
    grouped: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for p in parameters:
        decayed = decays(p.name, p.parameter.shape, t.no_decay)
        orthogonal = t.optimizer == "muon" and p.parameter.dim() == 2 and p.name not in apart
        # foreach and fused steps take plain tensors or DTensors, not both at once
        grouped.setdefault((decayed, orthogonal, isinstance(p.tensor, DTensor)), []).append(p.tensor)
    groups: list[dict[str, Any]] = []
    for (decayed, orthogonal, _), tensors in sorted(grouped.items(), reverse=True):
        groups.append({"params": tensors, "weight_decay": t.weight_decay if decayed else 0.0})
        if t.optimizer == "muon":
            groups[-1]["orthogonal"] = orthogonal
    options: dict[str, Any] = {"lr": t.learning_rate}
    kind = class_of(t.optimizer)
    if t.optimizer == "adamw":
        options |= {"betas": (t.adam_beta1, t.adam_beta2), "eps": t.adam_epsilon, "fused": True}
    elif t.optimizer == "sgd":
        options |= {"fused": True}
    elif t.optimizer == "muon":
        by_tensor = {id(p.tensor): p for p in parameters}
        options |= {"wrap": lambda tensor, local: by_tensor[id(tensor)].wrap(local)}
        options |= {"fused": all(p.tensor.is_cuda for p in parameters)}
    try:
        return kind(groups, **{**options, **t.optimizer_kwargs})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"training.optimizer_kwargs: {str(error).rstrip('.')}.", f"These arguments are passed to {t.optimizer}."
        ) from None


def check_optimizer(training: Training) -> None:
    """Raises the `ConfigError` that `make_optimizer` would, before any process starts."""
    matrix, vector = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
    make_optimizer(
        training, [ShardedParam("matrix", matrix, matrix, True), ShardedParam("vector", vector, vector, True)]
    )


def optimizer_change(changed: Iterable[Change], now: str) -> OptimizerChange:
    """Whether `changed` settings change the class of the optimizer, which is now `now`, or only its options."""
    keys = {change.key: change for change in changed}
    if name := keys.get("training.optimizer"):
        try:
            if class_of(name.before) is not class_of(now):
                return "class"
        except ConfigError:  # the optimizer of the checkpoint is not installed any more
            return "class"
    return "options" if OPTIMIZER_KEYS & keys.keys() else "none"


def class_of(path: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of an optimizer: of our own list, or at `package.module:Class`. Raises `ConfigError` for any other name."""
    if path in _CLASSES:
        return _CLASSES[path]
    if ":" not in path:
        raise ConfigError(
            f"training.optimizer = {path!r} is not known.",
            did_you_mean(path, SHARD_OPTIMIZERS),
            "Or name package.module:Class.",
        )
    return import_object(path, "training.optimizer")


def learning_rate_factor(training: Training, updates: int) -> Callable[[int], float]:
    """The factor on learning_rate at each update (0-based): a pure function, so that a checkpoint needs no scheduler state.

    Names and curves are those of `transformers.get_scheduler`. Raises `ConfigError` for an unknown name and for schedules
    that follow the loss.
    """
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    name, kwargs = training.lr_scheduler_type, training.lr_scheduler_kwargs
    known = [kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy")]
    if name not in known:
        raise ConfigError(
            f"training.lr_scheduler_type = {name!r} is not known.",
            "The learning rate must be a function of the update alone, so that a resumed run continues it.",
            did_you_mean(name, known),
        )
    arguments = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters.keys() - _SET_ELSEWHERE
    if unknown := sorted(kwargs.keys() - arguments):
        raise ConfigError(
            f"training.lr_scheduler_kwargs: {name} does not know `{unknown[0]}`.",
            f"The arguments of {name} are: {', '.join(sorted(arguments)) or 'none'}.",
            f"Remove `{unknown[0]}`.",
        )
    # the schedules divide the learning rates min_lr and lr_end by the optimizer's learning rate
    stub = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    try:
        schedule = get_scheduler(
            name,
            stub,
            num_warmup_steps=training.warmup_steps,
            num_training_steps=updates,
            scheduler_specific_kwargs=kwargs,
        )
        factor = schedule.lr_lambdas[0]
        wrong = next((u for u in _sample(updates) if not 0 <= factor(u) <= 1 + _ROUNDING), None)
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise ConfigError(f"training.lr_scheduler_kwargs for {name}: {error}") from None
    if wrong is not None:
        raise ConfigError(
            f"training.lr_scheduler_kwargs for {name}: update {wrong} would have "
            f"{factor(wrong):.4g} times training.learning_rate.",
            "training.learning_rate must be the highest rate of a schedule.",
            "Lower the rate in these arguments, or raise training.learning_rate.",
        )
    return factor


def _sample(updates: int) -> Iterable[int]:
    """About 1,000 updates spread over a run, the first and the last among them; every update of a short run."""
    return sorted({*range(0, updates, max(1, updates // 1000)), max(0, updates - 1)})

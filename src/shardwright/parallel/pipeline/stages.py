"""Stages of a pipeline, split from a Transformers causal LM on meta. Parameters keep the names of the unsplit model.

Each stage runs the model's own forward, so that masks, rotary tables and the kinds of attention stay the model's business. A
module of another stage is replaced by `Absent`, through which hidden states pass unchanged. A model may do more between its
blocks than pass hidden states on: `plan_split` runs a copy without weights to find out, before any process starts.

B rows, T positions, D width of hidden states.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.backends.tp_collectives import TensorParallelGroup, slice_of_rank, zero_pad_slice
from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.layout.pipeline_schedules import head_blocks, split_blocks
from shardwright.models.materialise import materialise
from shardwright.models.model_parts import Parts
from shardwright.torch_private import copy_module, is_view, own_buffers, own_modules, own_parameters

PROBE_TOKENS = 4


class Absent(nn.Module):
    """Replaces a module of another stage: returns hidden states unchanged, and 0 for ids (a position table adds its result).

    It keeps the plain attributes of the module (`attention_type`, `layer_idx`), which a model's loop may read. seen: gets the
    name of this module at each call.
    """

    def __init__(self, replaced: nn.Module, name: str = "", seen: list[str] | None = None) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(replaced).items() if isinstance(v, (str, int, float)) and k != "training"}
        vars(self).update(plain)
        self._name, self._seen = name, seen

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._seen is not None:
            self._seen.append(self._name)
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


@dataclass(frozen=True)
class PipelineSplit:
    """Which modules each stage holds, by name.

    before: modules used before the first block (embedding, position table, their dropout).
    blocks: the blocks of each stage.
    after: modules used after the last block (norm, head).
    tied: parameters that the first and the last stage both hold. The last stage keeps the module of such a parameter too,
    unused, so that the parameter has its name there.
    width: D.
    """

    before: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    tied: tuple[str, ...]
    width: int

    def held(self, stage: int) -> set[str]:
        """Names of the modules of `stage`."""
        first, last = stage == 0, stage == len(self.blocks) - 1
        tied = (name.rpartition(".")[0] for name in self.tied)
        return {*(self.before if first else ()), *self.blocks[stage], *((*self.after, *tied) if last else ())}

    @property
    def all(self) -> set[str]:
        """Names of the modules that not every stage holds."""
        return {*self.before, *self.after, *chain(*self.blocks)}

    def parts_of(self, parts: Parts, stages: Collection[int]) -> Parts:
        """`parts` of the unsplit model without what the `stages` do not hold."""
        held = {name for stage in stages for name in self.held(stage)}
        names = {"embedding": parts.embedding, "norm": parts.norm, "head": parts.head}
        return Parts(
            blocks=tuple(name for name in parts.blocks if name in held),
            **{key: name if name in held else None for key, name in names.items()},
            tied=parts.tied if len(self.blocks) - 1 in stages else (),
        )


class Stage(nn.Module):
    """Stage `index` of `count`: the forward of this part of the model, on ids [B, T] or hidden states [B, T, D].

    Returns hidden states [B, T, D]; the last stage returns the model's output. blocks: names of its blocks. peers: the
    tensor-parallel ranks under sequence parallelism, where each receives and sends its piece [B, T / tp, D].
    """

    def __init__(self, part: nn.Module, index: int, count: int, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.part, self.index, self.count, self.blocks = part, index, count, blocks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.tp_group: TensorParallelGroup | None = None

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        if self.tp_group is not None and not self.is_first:
            x = zero_pad_slice(x, 1, self.tp_group)
        arguments["input_ids" if self.is_first else "inputs_embeds"] = x
        if self.is_last:
            return self.part(**arguments)
        base: Any = self.part.base_model
        hidden: Tensor = base(**arguments)[0]
        if self.tp_group is not None:
            hidden = slice_of_rank(hidden, 1, self.tp_group)
        # a view cannot be detached in place, which zero-bubble schedules do
        return hidden.clone() if is_view(hidden) else hidden.contiguous()


def plan_split(model: nn.Module, parts: Parts, spec: Model, stages: int) -> PipelineSplit:
    """How `model` (from `build_model`, of `parts`) is split into `stages` stages of about equal work.

    Work is counted in matrix products: the head counts by its number of weights, the embedding is a lookup and counts nothing.
    Raises `ModelError`, by name, for a model that splitting would change, and `ConfigError` for too few blocks.
    """
    if getattr(model, "base_model", model) is model or not hasattr(model, "config") or parts.embedding is None:
        raise ModelError(
            f"{type(model).__name__} cannot be split into {stages} pipeline stages.",
            "pp_size > 1 needs a Transformers causal language model, whose parts are known by convention.",
            "Set parallelism.pp_size to 1.",
        )
    weights = [sum(p.numel() for p in model.get_submodule(b).parameters() if p.dim() > 1) for b in parts.blocks]
    head = 0 if parts.head is None else model.get_submodule(parts.head).weight.numel()  # type: ignore[operator]
    counts = split_blocks(len(parts.blocks), stages, head_blocks(sum(weights) // len(weights), head))
    width = int(model.get_submodule(parts.embedding).weight.shape[1])  # type: ignore[index]
    before, after = _outside(model, spec, parts, width)
    blocks = tuple(tuple(parts.blocks[end - n : end]) for end, n in zip(accumulate(counts), counts))
    split = PipelineSplit(before, blocks, after, (), width)
    split = replace(split, tied=_tied_over_stages(split, parts))
    for stage in range(stages):
        held = (model.get_submodule(name) for name in split.held(stage))
        if not any(p.requires_grad for module in held for p in module.parameters()):
            raise ModelError(
                f"model.freeze leaves pipeline stage {stage} of {stages} without a trained parameter.",
                "No gradient would come back through this stage.",
                "Lower parallelism.pp_size, or freeze less.",
            )
    return split


def _outside(model: nn.Module, spec: Model, parts: Parts, width: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(modules used before the blocks, modules used after them), found by running a copy in which all modules are absent.

    Raises `ModelError` where that copy changes hidden states: every stage would repeat the change.
    """
    inside = tuple(f"{name}." for name in parts.blocks)
    outer = [
        name
        for name, module in model.named_modules()
        if (own_parameters(module) or isinstance(module, nn.Dropout))
        and name not in parts.blocks
        and not name.startswith(inside)
    ]
    if holding := [name for name in outer if any(f"{other}.".startswith(f"{name}.") for other in parts.blocks)]:
        raise _refused(model, f"`{holding[0] or type(model).__name__}` holds parameters of its own around its blocks")
    seen: list[str] = []
    if not _passes_unchanged(model, spec, [*outer, *parts.blocks], seen, width):
        raise _refused(model, "it changes hidden states outside of its blocks, in a way that every stage would repeat")
    if tuple(name for name in seen if name in parts.blocks) != parts.blocks:
        raise _refused(model, "it does not run each block once, in order")
    first, last = seen.index(parts.blocks[0]), seen.index(parts.blocks[-1])
    before = [name for name in outer if name in seen[:first] or name == parts.embedding]
    after = [name for name in outer if name in seen[last:] or name == parts.head]
    lost = [name for name in outer if name not in (*before, *after) and own_parameters(model.get_submodule(name))]
    if lost or set(before) & set(after):
        where = (lost or sorted(set(before) & set(after)))[0]
        raise _refused(model, f"`{where}` is used neither only before its blocks nor only after them")
    return tuple(before), tuple(after)


def _passes_unchanged(model: nn.Module, spec: Model, names: list[str], seen: list[str], width: int) -> bool:
    """Whether hidden states pass unchanged through a copy of `model` without the modules `names`; `seen` gets their calls."""
    empty = _view(model, set(names), seen, everything=True)
    if any(buffer.is_meta for buffer in empty.buffers()):
        materialise(empty, spec.model_copy(update={"init": "random"}), seed=0, device=torch.device("cpu"))
    hidden = torch.randn(1, PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0))
    base: Any = empty.base_model
    try:
        with torch.no_grad():
            out = base(inputs_embeds=hidden, use_cache=False)[0]
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise _refused(model, f"its forward needs more than hidden states ({text})") from error
    return out.shape == hidden.shape and torch.equal(out, hidden)


def _refused(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be split into pipeline stages: {reason}.",
        "",
        "Set parallelism.pp_size to 1, or use another axis.",
    )


def _tied_over_stages(split: PipelineSplit, parts: Parts) -> tuple[str, ...]:
    """The first names of the parameters that the first and the last stage both hold. Refuses other ties between stages."""
    last, found = len(split.blocks) - 1, []
    for group in parts.tied:
        modules = [name.rpartition(".")[0] for name in group]
        stages = {
            stage
            for stage in range(last + 1)
            if any(f"{module}.".startswith(f"{held}.") for module in modules for held in split.held(stage))
        }
        if len(stages) > 1 and (stages != {0, last} or modules[0] not in split.before):
            raise ModelError(
                f"{' and '.join(group)} are one parameter, used on {len(stages)} pipeline stages.",
                "Only a tie between the embedding and the head can span stages.",
                "Untie the parameters, or set parallelism.pp_size to 1.",
            )
        found += [group[0]] if len(stages) > 1 else []
    return tuple(found)


def build_stages(model: nn.Module, split: PipelineSplit, mine: Collection[int]) -> tuple[Stage, ...]:
    """The stages `mine`, in order. Takes the modules that none of these stages holds out of `model` itself."""
    held = {name for stage in mine for name in split.held(stage)}
    for name in split.all - held:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        own_modules(owner)[leaf] = Absent(model.get_submodule(name), name)
    return tuple(
        Stage(_view(model, held - split.held(stage)), stage, len(split.blocks), split.blocks[stage])
        for stage in sorted(mine)
    )


def _view(
    module: nn.Module,
    absent: Collection[str],
    seen: list[str] | None = None,
    prefix: str = "",
    everything: bool = False,
) -> nn.Module:
    """`module` without the submodules `absent`. The modules around these are copied, all others are shared.

    Copies share parameters, buffers and hooks with their originals. everything: copy every remaining module, with buffers of
    its own, so that filling the buffers leaves `module` unchanged.
    """
    path = f"{prefix}." if prefix else ""
    if not everything and not any(name.startswith(path) for name in absent):
        return module
    children = {
        leaf: child
        if child is None
        else Absent(child, f"{path}{leaf}", seen)
        if f"{path}{leaf}" in absent
        else _view(child, absent, seen, f"{path}{leaf}", everything)
        for leaf, child in own_modules(module).items()
    }
    return copy_module(module, own_buffers(module) if everything else None, children)

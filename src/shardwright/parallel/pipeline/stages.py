"""Stages of a pipeline, cut from a Transformers causal LM on meta. Names of parameters stay those of the unsplit model.

A stage runs the model's own forward: masks, rotary tables, kinds of attention per block and what stands behind the head
stay the model's business. What another stage holds is replaced by a module that lets hidden states pass. That this is all
there is between the blocks is not believed but tried, on a copy without weights, before any process starts.

B rows, T positions, D width of hidden states.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.backends.tp_collectives import Peers, fill_in, take_piece
from shardwright.config.schema import Model
from shardwright.errors import ModelError
from shardwright.layout.pipeline_schedules import head_blocks, split_blocks
from shardwright.models.materialise import materialise
from shardwright.models.model_parts import Parts, find_parts
from shardwright.torch_private import copy_module, is_view, own_buffers, own_modules, own_parameters

PROBE_TOKENS = 4


class Absent(nn.Module):
    """Stands where another stage holds a module: hidden states pass unchanged, and for ids (a position table) 0 is added.

    It keeps the plain attributes of what it replaces (`attention_type`, `layer_idx`), which a model's loop may read.
    `seen`, where given, notes each call by name.
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
class Cut:
    """Which modules each stage holds, by name.

    before: used before the first block (embedding, position table, their dropout). after: used behind the last block (norm,
    head). blocks: of each stage. shared: the embedding, where the head is tied to it; the last stage keeps it too, unused,
    so that the parameter has its name. width: D.
    """

    before: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    shared: tuple[str, ...]
    width: int

    def held(self, stage: int) -> set[str]:
        """Names of the modules of `stage`."""
        first, last = stage == 0, stage == len(self.blocks) - 1
        return {
            *(self.before if first else ()),
            *self.blocks[stage],
            *((*self.after, *self.shared) if last else ()),
        }

    @property
    def all(self) -> set[str]:
        """Names of everything that some stage does not hold."""
        return {*self.before, *self.after, *(name for names in self.blocks for name in names)}


class Stage(nn.Module):
    """Stage `index` of `count`: forward of this part of the model, on ids [B, T] or hidden states [B, T, D].

    Returns hidden states [B, T, D], and on the last stage what the model returns. blocks: names of its blocks. peers: with
    sequence parallelism, the ranks of which each takes and gives its piece of the hidden states, [B, T / tp, D].
    """

    def __init__(self, part: nn.Module, index: int, count: int, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.part, self.index, self.count, self.blocks = part, index, count, blocks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.peers: Peers | None = None

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        if self.peers is not None and not self.is_first:
            x = fill_in(x, 1, self.peers)
        arguments["input_ids" if self.is_first else "inputs_embeds"] = x
        if self.is_last:
            return self.part(**arguments)
        base: Any = self.part.base_model
        hidden: Tensor = base(**arguments)[0]
        if self.peers is not None:
            hidden = take_piece(hidden, 1, self.peers)
        # a view cannot be detached in place, which zero-bubble schedules do
        return hidden.clone() if is_view(hidden) else hidden.contiguous()


def plan_cut(model: nn.Module, spec: Model, stages: int) -> Cut:
    """How `model` (from `build_model`) is cut into `stages` stages of about equal work.

    Blocks are balanced by matrix products: the head weighs as many blocks as its weights say, the embedding is a lookup
    and weighs nothing. Raises `ModelError` for a model that this way of cutting would change, by name, and `ConfigError`
    for too few blocks.
    """
    parts = find_parts(model)
    if getattr(model, "base_model", model) is model or not hasattr(model, "config") or parts.embedding is None:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into {stages} pipeline stages.",
            "pp_size > 1 needs a Transformers causal language model, whose parts are known by convention.",
            "Set parallelism.pp_size to 1.",
        )
    weights = [sum(p.numel() for p in model.get_submodule(b).parameters() if p.dim() > 1) for b in parts.blocks]
    head = 0 if parts.head is None else model.get_submodule(parts.head).weight.numel()  # type: ignore[operator]
    counts = split_blocks(len(parts.blocks), stages, head_blocks(sum(weights) // len(weights), head))
    width = int(model.get_submodule(parts.embedding).weight.shape[1])  # type: ignore[index]
    before, after = _outside(model, spec, parts, width)
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    blocks = tuple(tuple(parts.blocks[end - n : end]) for end, n in zip(ends, counts))
    cut = Cut(before, blocks, after, (), width)
    cut = replace(cut, shared=_shared(cut, parts))
    _check_trained(model, cut)
    return cut


def _outside(model: nn.Module, spec: Model, parts: Parts, width: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(modules used before the blocks, modules used behind them), found by running a copy in which all of them are absent.

    Raises `ModelError` where hidden states do not come out as they went in: the model does something between its parts
    that every stage would repeat.
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
    same = _probe(model, spec, [*outer, *parts.blocks], seen, width)
    if not same:
        raise _refused(model, "it changes hidden states outside of its blocks, in a way that every stage would repeat")
    if tuple(name for name in seen if name in parts.blocks) != parts.blocks:
        raise _refused(model, "it does not run each block once, in order")
    first, last = seen.index(parts.blocks[0]), seen.index(parts.blocks[-1])
    before = [name for name in outer if name in seen[:first] or name == parts.embedding]
    after = [name for name in outer if name in seen[last:] or name == parts.head]
    lost = [name for name in outer if name not in (*before, *after) and own_parameters(model.get_submodule(name))]
    if lost or set(before) & set(after):
        where = (lost or sorted(set(before) & set(after)))[0]
        raise _refused(model, f"`{where}` belongs neither to its beginning nor to its end")
    return tuple(before), tuple(after)


def _probe(model: nn.Module, spec: Model, names: list[str], seen: list[str], width: int) -> bool:
    """Whether hidden states pass unchanged through a copy of `model` without any of `names`; `seen` gets their calls."""
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
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}.",
        "",
        "Set parallelism.pp_size to 1, or use another axis.",
    )


def _shared(cut: Cut, parts: Parts) -> tuple[str, ...]:
    """The modules of the first stage whose parameters the last stage needs too; refuses other ties between stages."""
    stages = len(cut.blocks)
    shared: list[str] = []
    for group in parts.tied:
        owners = [name.rpartition(".")[0] for name in group]
        places = {
            stage
            for stage in range(stages)
            for owner in owners
            if any(owner == held or owner.startswith(f"{held}.") for held in cut.held(stage))
        }
        if len(places) > 1 and (places != {0, stages - 1} or owners[0] not in cut.before):
            raise ModelError(
                f"{' and '.join(group)} are one parameter, used on {len(places)} pipeline stages.",
                "Only a tie between the embedding and the head is carried over stages.",
                "Untie them, or set parallelism.pp_size to 1.",
            )
        if len(places) > 1:
            shared += [owner for owner in owners if owner in cut.before]
    return tuple(shared)


def _check_trained(model: nn.Module, cut: Cut) -> None:
    """Refuses a stage without a trained parameter: nothing would come back through it, and its rank has no optimizer."""
    for stage in range(len(cut.blocks)):
        held = (model.get_submodule(name) for name in cut.held(stage))
        if not any(p.requires_grad for module in held for p in module.parameters()):
            raise ModelError(
                f"model.freeze leaves pipeline stage {stage} of {len(cut.blocks)} without a trained parameter.",
                "Each stage's rank needs something to train.",
                "Lower parallelism.pp_size, or freeze less.",
            )


def cut_stages(model: nn.Module, cut: Cut, mine: Collection[int]) -> tuple[Stage, ...]:
    """The stages `mine`, in order. What none of them holds is taken out of `model` itself."""
    held = {name for stage in mine for name in cut.held(stage)}
    for name in cut.all - held:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        own_modules(owner)[leaf] = Absent(model.get_submodule(name), name)
    return tuple(
        Stage(_view(model, held - cut.held(stage)), stage, len(cut.blocks), cut.blocks[stage]) for stage in sorted(mine)
    )


def _view(
    module: nn.Module,
    absent: Collection[str],
    seen: list[str] | None = None,
    prefix: str = "",
    everything: bool = False,
) -> nn.Module:
    """`module` without the submodules `absent`: what is around them is copied, all else is shared.

    Copies share parameters, buffers and hooks with what they copy. everything: copy every module that is left, with
    buffers of its own, so that giving them values leaves `module` as it is.
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


def stage_parts(parts: Parts, cut: Cut, stages: Collection[int]) -> Parts:
    """`parts` without what the `stages` do not hold."""
    held = {name for stage in stages for name in cut.held(stage)}

    def here(name: str | None) -> str | None:
        return name if name in held else None

    whole = 0 in stages and len(cut.blocks) - 1 in stages
    last = len(cut.blocks) - 1 in stages
    return Parts(
        blocks=tuple(name for name in parts.blocks if name in held),
        embedding=here(parts.embedding),
        norm=here(parts.norm),
        head=here(parts.head),
        tied=parts.tied if last or whole else (),
    )


def tied_over_stages(parts: Parts, cut: Cut) -> list[str]:
    """Names of the parameters that first and last stage both hold, as the unsplit model calls them."""
    return [group[0] for group in parts.tied if group[0].rpartition(".")[0] in cut.shared]

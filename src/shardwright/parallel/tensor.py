"""Tensor parallelism, with sequence parallelism: which layer gets which style, and where sequences are cut.

The plan is Transformers' own (`_tp_plan`) or a user's `{pattern: style}`. Column-wise and row-wise layers of one module
(attention, MLP) make a region: its input is exchanged once on entry, its output once behind the row-wise layer. With
sequence parallelism everything in the blocks but regions works on T / tp positions a rank. Sequences are cut before the
first block and made whole behind the last one, so that what a model does around its blocks (positions, masks, final
reshapes) sees whole ones; this costs two messages of [B, T, D] per microbatch more than cutting at embedding and head.
Whole parameters that see only part of the work (`partial`) get their gradients summed once per update.

B rows, T positions, D width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.pytorch_utils import Conv1D

from shardwright.errors import ModelError, ShardwrightError, did_you_mean
from shardwright.models.adapters import Parts
from shardwright.parallel import exchange
from shardwright.parallel.exchange import Peers
from shardwright.parallel.styles import Column, Done, Entry, Head, Row, Vocabulary, change_input, fan

ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
COLUMN, ROW = ("colwise", "colwise_gather_output", "vocabulary"), ("rowwise", "rowwise_split_input")
EMBEDDING, SUMMED, WHOLE = "embedding_rowwise", "replicated_with_grad_allreduce", "replicate"
STYLES = (*COLUMN, *ROW, EMBEDDING, SUMMED, WHOLE, *ALIASES)

OWN_PLANS: dict[str, dict[str, str]] = {
    # Fused query, key and value [D, 3 D]: divided as they lie, made whole, and attention done by every rank alike.
    "gpt2": {
        "*.h.*.attn.c_attn": "colwise_gather_output",
        "*.h.*.attn.c_proj": "rowwise_split_input",
        "*.h.*.mlp.c_fc": "colwise",
        "*.h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans for families that Transformers has none for."""

GRADIENT_GAP = 0.02
"""Relative difference between the ranks' gradient norms of one whole parameter beyond which they were not the same work."""


def find_plan(model: nn.Module, parts: Parts, given: Mapping[str, str]) -> dict[str, str]:
    """Module name -> style, for every module that is divided; `given` (patterns) replaces the model's own plan.

    `*` stands for one part of a name. A model's own plan is extended: embedding and head are divided by vocabulary.
    Raises `ModelError` for a model without a plan, a pattern without a match, or a style that is not known.
    """
    patterns = dict(given) or _own_plan(model)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    plan: dict[str, str] = {}
    for pattern, asked in patterns.items():
        style = ALIASES.get(asked, asked)
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"\Z")
        matched = sorted(filter(regex.match, modules))
        parameters = sorted(filter(regex.match, held))
        if (matched or parameters) and (style not in STYLES or parameters):
            raise ModelError(
                f"{(matched or parameters)[0]}: the tensor-parallel style `{asked}` cannot be run on it.",
                "Its gradients are not known to come out right."
                if style not in STYLES
                else "It is no module.",
                did_you_mean(asked, STYLES)
                or f"Styles are {', '.join(STYLES)}. Or set parallelism.tp_size to 1.",
            )
        if given and not matched:
            raise ModelError(
                f"parallelism.tp_plan: `{pattern}` matches no module.", "", did_you_mean(pattern, modules)
            )
        plan |= dict.fromkeys(matched, style)
    if not given:
        plan |= {name: EMBEDDING for name in (parts.embedding,) if name}
        plan |= {name: "vocabulary" for name in (parts.head,) if name}
    return {name: style for name, style in plan.items() if style != WHOLE}


def _own_plan(model: nn.Module) -> dict[str, str]:
    config = getattr(model, "config", None)
    plan = dict(getattr(model, "_tp_plan", None) or OWN_PLANS.get(getattr(config, "model_type", ""), {}))
    if not plan:
        name = type(model).__name__
        raise ModelError(
            f"{name} has no tensor-parallel plan.",
            "Neither Transformers nor Shardwright says which of its layers can be divided, and how.",
            "Give one as parallelism.tp_plan, or set parallelism.tp_size to 1.",
        )
    return plan


def check_plan(model: nn.Module, parts: Parts, plan: Mapping[str, str], tp_size: int) -> None:
    """Raises `ModelError` for a layer that cannot be divided as the plan says, by name, before anything is changed."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        linear = isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in (
            nn.Linear.forward,
            Conv1D.forward,
        )
        if not (isinstance(module, nn.Embedding) if style == EMBEDDING else linear or style == SUMMED):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which `{style}` cannot divide.",
                "Column- and row-wise styles divide nn.Linear and Conv1D, embedding_rowwise divides nn.Embedding.",
                "Leave it out of parallelism.tp_plan, or set parallelism.tp_size to 1.",
            )
        if style == SUMMED:
            continue
        if style in (EMBEDDING, "vocabulary"):
            rows = module.num_embeddings if isinstance(module, nn.Embedding) else fan(module)[1]
            if -(-rows // tp_size) * (tp_size - 1) >= rows:
                raise ModelError(
                    f"{name} has {rows} rows, of which tp_size = {tp_size} ranks would leave one without any."
                )
            continue
        inputs, outputs = fan(module)
        size, word = (outputs, "output") if style in COLUMN else (inputs, "input")
        if size % tp_size:
            raise ModelError(
                f"{name} has {size} {word} features, not divisible by tp_size = {tp_size}.",
                "Pieces of different size do not fit between column- and row-wise layers.",
                "Set parallelism.tp_size to a divisor, or leave the layer out of parallelism.tp_plan.",
            )
    _check_ties(parts, plan)


def _check_ties(parts: Parts, plan: Mapping[str, str]) -> None:
    """A tied weight must be divided alike in all its places."""
    how = {EMBEDDING: "rows", **dict.fromkeys(COLUMN, "rows"), **dict.fromkeys(ROW, "columns")}
    for names in parts.tied:
        cuts = {name: how.get(plan.get(name.rpartition(".")[0], ""), "whole") for name in names}
        if len(set(cuts.values())) > 1:
            raise ModelError(
                f"{names[0]} and {names[1]} are one tensor, but tp_plan divides only one of them.",
                "A tied weight has one layout.",
                "Give the embedding embedding_rowwise and the head vocabulary, or neither.",
            )


def check_tensor_plan(model: nn.Module, parts: Parts, given: Mapping[str, str], tp_size: int) -> None:
    """Everything that `TensorParallel` would refuse about `model` (on meta), without ranks. Raises `ModelError`."""
    plan = find_plan(model, parts, given)
    check_plan(model, parts, plan, tp_size)
    _regions(model, parts, plan, strict=not given)


def _regions(model: nn.Module, parts: Parts, plan: Mapping[str, str], strict: bool) -> set[str]:
    """Modules inside blocks whose column- and row-wise layers share one exchange on entry.

    That holds where nothing else in the module has parameters. `strict` (a model's own plan): refuses one that has,
    unless its column-wise layers all give whole outputs, since what lies between gets partial gradients.
    """
    found = set()
    parents = {name.rpartition(".")[0] for name, style in plan.items() if style in ROW}
    for parent in sorted(parents - {""} - set(parts.blocks)):
        if not any(parent.startswith(f"{block}.") for block in parts.blocks):
            continue
        children = {name: style for name, style in plan.items() if name.startswith(f"{parent}.")}
        columns = {style for style in children.values() if style in COLUMN}
        owned = tuple(f"{name}." for name in children)
        other = [
            f"{parent}.{name}"
            for name, p in model.get_submodule(parent).named_parameters()
            if not f"{parent}.{name}".startswith(owned)
        ]
        if not columns:
            continue
        if other and columns != {"colwise_gather_output"}:
            if strict:
                raise ModelError(
                    f"{other[0]} has no tensor-parallel style, but its module {parent} is divided by heads or features.",
                    "Each rank would see a part of its gradient only.",
                    "Give a whole parallelism.tp_plan in which it has one (replicated_with_grad_allreduce sums it).",
                )
            continue
        found.add(parent)
    return found


class TensorParallel:
    """A model whose layers are divided over `mesh` (one axis); sums what is partial at the end of an update."""

    def __init__(
        self, model: nn.Module, parts: Parts, mesh: DeviceMesh, given: Mapping[str, str], sequence: bool
    ) -> None:
        """Divides `model` (on meta) in place. `sequence`: with sequence parallelism. Raises as `check_tensor_plan`."""
        self.model, self.sequence = model, sequence
        self.peers = Peers(mesh.size(), mesh.get_local_rank(), mesh.get_group())
        self._plan = find_plan(model, parts, given)
        check_plan(model, parts, self._plan, mesh.size())
        self._blocks = parts.blocks
        regions = _regions(model, parts, self._plan, strict=not given)
        self.partial = self._partial_names(regions)
        done: Done = {}
        styles: dict[str, ParallelStyle] = {
            name: self._style(name, style, regions, done)
            for name, style in self._plan.items()
            if style != SUMMED
        }
        parallelize_module(model, mesh, styles)
        for name in sorted(regions):
            self._on_input(name, self._enter)
        if sequence:
            self._on_input(parts.blocks[0], self._cut_sequence)
            model.get_submodule(parts.blocks[-1]).register_forward_hook(self._whole_sequence)
        self._verified = False

    def _in_block(self, name: str) -> bool:
        return any(name.startswith(f"{block}.") for block in self._blocks)

    def _partial_names(self, regions: set[str]) -> tuple[str, ...]:
        """Whole parameters of which each rank computes a part of the gradient."""
        found = []
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name in own:
            module, _, leaf = name.rpartition(".")
            style = self._plan.get(module, "")
            divided = style and style != SUMMED and not (style in ROW and leaf == "bias")
            if divided:
                continue
            region = any(name.startswith(f"{parent}.") for parent in regions)
            on_pieces = self._in_block(name) and (not region or style in ROW)
            if any(name.startswith(f"{m}.") for m, s in self._plan.items() if s == SUMMED) or (
                self.sequence and on_pieces
            ):
                found.append(name)
        return tuple(found)

    def _style(self, name: str, style: str, regions: set[str], done: Done) -> ParallelStyle:
        if style == EMBEDDING:
            return Vocabulary(self.peers, done)
        inside = self._in_block(name)
        if style in ROW:
            leave = self._leave if inside else partial(exchange.sum_out, peers=self.peers)
            return Row(self.peers, done, leave, splits=style == "rowwise_split_input")
        entry: Entry | None = self._enter if inside else partial(exchange.copy_in, peers=self.peers)
        if name.rpartition(".")[0] in regions:
            entry = None
        if style == "vocabulary":
            return Head(self.peers, done, entry)
        return Column(self.peers, done, entry, gathers=style == "colwise_gather_output")

    def _on_input(self, name: str, change: Entry) -> None:
        self.model.get_submodule(name).register_forward_pre_hook(
            partial(change_input, change), with_kwargs=True
        )

    def _enter(self, x: Tensor) -> Tensor:
        """[B, T or T / tp, D] into divided work: [B, T, D]."""
        return exchange.gather_in(x, 1, self.peers) if self.sequence else exchange.copy_in(x, self.peers)

    def _leave(self, x: Tensor) -> Tensor:
        """Partial [B, T, D] out of divided work: [B, T or T / tp, D]."""
        return (
            exchange.sum_and_cut_out(x, 1, self.peers) if self.sequence else exchange.sum_out(x, self.peers)
        )

    def _cut_sequence(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T / tp, D]."""
        if x.size(1) % self.peers.size:
            raise ShardwrightError(
                f"A sequence of {x.size(1)} positions is not divisible by tp_size = {self.peers.size}.",
                "sequence_parallel gives each rank equally many positions.",
                "Use a multiple, or set parallelism.sequence_parallel to false.",
            )
        return exchange.cut(x, 1, self.peers)

    def _whole_sequence(self, module: nn.Module, args: Any, output: Any) -> Any:
        """[B, T / tp, D] -> [B, T, D], behind the last block."""
        if isinstance(output, Tensor):
            return exchange.gather_same(output, 1, self.peers)
        return (exchange.gather_same(output[0], 1, self.peers), *output[1:])

    def _whole_gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(partial, equal): this rank's gradients of parameters that are whole on this axis."""
        partial_ones, equal = {}, {}
        for name, p in self.model.named_parameters():
            if p.grad is None or (isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())):
                continue
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            (partial_ones if name in self.partial else equal)[name] = gradient
        return partial_ones, equal

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sums the partial gradients of whole parameters over the axis, in one message for each dtype.

        In the first update also verifies that all other gradients of whole parameters are equal. Raises
        `ShardwrightError` on all ranks alike. Collective.
        """
        summed, equal = self._whole_gradients()
        for dtype in sorted({g.dtype for g in summed.values()}, key=str):
            gradients = [g for g in summed.values() if g.dtype == dtype and g.numel()]
            if not gradients:
                continue
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.peers.group)
            for gradient, value in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(value.view_as(gradient))
        if not self._verified:
            self._verify(equal)

    def _verify(self, gradients: dict[str, Tensor]) -> None:
        self._verified = True
        if not gradients:
            return
        norms = torch.stack(
            [g.double().norm() if g.numel() else g.new_zeros(()).double() for g in gradients.values()]
        )
        low, high = norms.clone(), norms.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.peers.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.peers.group)
        for name, least, most in zip(gradients, low.tolist(), high.tolist()):
            if most - least > GRADIENT_GAP * most:
                raise ShardwrightError(
                    f"The gradient of {name} differs between tensor-parallel ranks (norms {least:.6g} to {most:.6g}).",
                    "It is whole on every rank, so it must see the same work on all; here it stands in divided work.",
                    f"Give its module the style {SUMMED} in parallelism.tp_plan, or divide it.",
                )

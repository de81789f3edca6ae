"""Tensor parallelism with sequence parallelism: applies the plan of `tp_plan.py` to a model.

The column- and row-wise layers of one module (attention, MLP) make a *region*: its input is gathered or copied once on entry,
its output summed once after the row-wise layer. With sequence parallelism the rest of each block works on T / tp positions a
rank. Sequences are cut before the first block and gathered after the last block, so that the model's own code around the
blocks (positions, masks, final reshapes) sees whole sequences. This costs two messages of [B, T, D] per microbatch more than
cutting at embedding and head. Between pipeline stages only pieces are sent: around the blocks of a stage stand tensors of the
whole size that hold one piece. Parameters that are whole on every rank but see only part of the work (`partial`) get their
gradients summed once per update.

B rows, T positions, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwright.backends import tp_collectives
from shardwright.backends.tp_collectives import TensorParallelGroup
from shardwright.config.schema import RunFile
from shardwright.errors import ShardwrightError
from shardwright.mesh.shard_geometry import local_tensor
from shardwright.models.dropout import has_dropout
from shardwright.models.model_parts import Parts
from shardwright.parallel.pipeline.stages import Stage
from shardwright.parallel.tensor.styles import (
    Change,
    ColumnParallelLinear,
    Replaced,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    change_input,
    change_output,
)
from shardwright.parallel.tensor.tp_plan import COLUMN, EMBEDDING, ROW, SUMMED, VOCABULARY, TensorPlan
from shardwright.parallel.tensor.tp_rng import RNGStreams
from shardwright.torch_private import REDISTRIBUTE_LOGGER

GRADIENT_GAP = 0.02
"""Largest relative difference between the ranks' gradient norms of one whole parameter that equal work can give."""


class TensorParallel:
    """A model whose layers are divided over `mesh` (one axis). Sums partial gradients at the end of an update.

    tp_group: the ranks of the axis. sequence: whether sequence parallelism is on. partial: names of the whole parameters
    of which each rank computes a part of the gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        plan: TensorPlan,
        mesh: DeviceMesh,
        run: RunFile,
        stages: Sequence[Stage] = (),
        attention: Sequence[str] = (),
    ) -> None:
        """Divides `model` (on meta) in place.

        parts: of this model. plan, attention: of the unsplit model; attention: the modules that attend. stages: this rank's
        pipeline stages.
        """
        plan = plan.held_by(model)
        self.model, self.sequence = model, run.parallelism.sequence_parallel is not False
        self.tp_group = TensorParallelGroup(mesh.size(), mesh.get_local_rank(), mesh.get_group())
        self._styles, self._regions, self._blocks = plan.styles, plan.regions, parts.blocks
        self._rng = RNGStreams(mesh.get_local_rank(), mesh.device_type) if has_dropout(model) else None
        undivided = self._undivided_attention(attention)
        self.partial = self._partial_parameters(undivided)
        # shared by all blocks, so that all compile to one graph
        self._hooks: dict[tuple[str, Change], Callable[..., Any]] = {}
        replaced: Replaced = {}
        styles: dict[str, ParallelStyle] = {
            name: self._style(name, style, replaced) for name, style in plan.styles.items() if style != SUMMED
        }
        parallelize_module(model, mesh, styles)
        for name in sorted(plan.regions):
            self._on_input(name, self._enter_region)
        for name in undivided:
            self._on_input(name, self._gather_sequence)
            self._on_output(name, self._split_sequence)
        for name in parts.blocks if self._rng is not None else ():
            block = model.get_submodule(name)
            block.forward = partial(self._run_block, block.forward)
        if self.sequence and not stages:
            self._cut_around(parts.blocks, first=True, last=True)
        for stage in stages if self.sequence else ():
            stage.tp_group = self.tp_group
            self._cut_around(stage.blocks, stage.is_first, stage.is_last)
        self._verified = False
        # torch warns when it makes strided shards whole in two gathers; they carry no sums, so nothing can differ
        logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)

    def divides(self, name: str) -> bool:
        """Whether the output features of the module `name` are divided, so that each rank has some rows of its weight."""
        return self._styles.get(name) in COLUMN

    # Which work is divided

    def _undivided_attention(self, attention: Sequence[str]) -> tuple[str, ...]:
        """The attention modules here that are not divided: every rank does their work alike, on whole sequences."""
        if not self.sequence:
            return ()
        here = {name for name, module in self.model.named_modules() if any(True for _ in module.parameters())}
        return tuple(name for name in attention if name in here and not _inside(name, self._regions))

    def _partial_parameters(self, undivided: Sequence[str]) -> tuple[str, ...]:
        """Whole parameters of which each rank computes a part of the gradient."""
        summed, found = [name for name, style in self._styles.items() if style == SUMMED], []
        for name in (name for name, p in self.model.named_parameters() if p.requires_grad):
            module, _, leaf = name.rpartition(".")
            style = self._styles.get(module, "")
            if style and style != SUMMED and not (style in ROW and leaf == "bias"):
                continue  # divided
            on_pieces = self._in_block(name) and (style in ROW or not _inside(module, self._regions))
            if _inside(module, summed) or (self.sequence and on_pieces and not _inside(module, undivided)):
                found.append(name)
        return tuple(found)

    def _in_block(self, name: str) -> bool:
        return any(name.startswith(f"{block}.") for block in self._blocks)

    def _style(self, name: str, style: str, replaced: Replaced) -> ParallelStyle:
        if style == EMBEDDING:
            return VocabParallelEmbedding(self.tp_group, replaced)
        inside = self._in_block(name)
        if style in ROW:
            leave = self._leave_region if inside else partial(tp_collectives.reduce_from_tp, tp_group=self.tp_group)
            return RowParallelLinear(self.tp_group, replaced, leave, splits=style == "rowwise_split_input")
        entry: Change | None = (
            self._enter_region if inside else partial(tp_collectives.copy_to_tp, tp_group=self.tp_group)
        )
        if name.rpartition(".")[0] in self._regions:
            entry = None
        if style == VOCABULARY:
            return VocabParallelHead(self.tp_group, replaced, entry)
        gathers = style == "colwise_gather_output"
        return ColumnParallelLinear(self.tp_group, replaced, entry, self._gather_features if gathers else None)

    # What happens to tensors on the way

    def _on_input(self, name: str, change: Change) -> None:
        hook = self._hooks.setdefault(("input", change), partial(change_input, change))
        self.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def _on_output(self, name: str, change: Change) -> None:
        hook = self._hooks.setdefault(("output", change), partial(change_output, change))
        self.model.get_submodule(name).register_forward_hook(hook)

    def _run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block with dropout: its residual stream is divided by positions or whole, and so are its masks."""
        assert self._rng is not None
        self._draw(divided=self.sequence)
        try:
            return forward(*args, **kwargs)
        finally:
            self._rng.common()

    def _draw(self, divided: bool) -> None:
        if self._rng is not None:
            self._rng.divided() if divided else self._rng.common()

    def _enter_region(self, x: Tensor) -> Tensor:
        """[B, T or T / tp, D] into divided work: [B, T, D]."""
        self._draw(divided=True)
        return (
            tp_collectives.gather_from_sequence_parallel(x, 1, self.tp_group)
            if self.sequence
            else tp_collectives.copy_to_tp(x, self.tp_group)
        )

    def _leave_region(self, x: Tensor) -> Tensor:
        """Partial [B, T, D] out of divided work: [B, T or T / tp, D]."""
        self._draw(divided=self.sequence)
        if self.sequence:
            return tp_collectives.reduce_scatter_to_sequence_parallel(x, 1, self.tp_group)
        return tp_collectives.reduce_from_tp(x, self.tp_group)

    def _gather_features(self, x: Tensor) -> Tensor:
        """A divided output made whole, for work that every rank does alike."""
        self._draw(divided=False)
        return tp_collectives.gather_from_tp(x, -1, self.tp_group)

    def _gather_sequence(self, x: Tensor) -> Tensor:
        """[B, T / tp, D] -> [B, T, D], for work that every rank does alike."""
        return tp_collectives.gather_from_tp(x, 1, self.tp_group)

    def _cut_sequence(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T / tp, D]."""
        if x.size(1) % self.tp_group.size:
            raise ShardwrightError(
                f"A sequence of {x.size(1)} positions is not divisible by tp_size = {self.tp_group.size}.",
                "sequence_parallel gives each rank equally many positions.",
                "Use a multiple, or set parallelism.sequence_parallel to false.",
            )
        return self._split_sequence(x)

    def _split_sequence(self, x: Tensor) -> Tensor:
        return tp_collectives.scatter_to_tp(x, 1, self.tp_group)

    def _cut_around(self, blocks: Sequence[str], first: bool, last: bool) -> None:
        """Makes `blocks` work on pieces of sequences. first, last: they include the model's first or last block."""
        enter = self._cut_sequence if first else partial(tp_collectives.slice_of_rank, dim=1, tp_group=self.tp_group)
        leave = self._gather_sequence if last else partial(tp_collectives.zero_pad_slice, dim=1, tp_group=self.tp_group)
        self._on_input(blocks[0], enter)
        self._on_output(blocks[-1], leave)

    # Gradients

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sums the partial gradients of whole parameters over the axis, in one message for each dtype.

        In the first update also verifies that all other gradients of whole parameters are equal. Raises
        `ShardwrightError` on all ranks alike. Collective.
        """
        whole = {
            name: local_tensor(p.grad)
            for name, p in self.model.named_parameters()
            if p.grad is not None and not (isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()))
        }
        summed = [whole[name] for name in self.partial if name in whole and whole[name].numel()]
        for dtype in sorted({g.dtype for g in summed}, key=str):
            gradients = [g for g in summed if g.dtype == dtype]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.tp_group.group)
            for gradient, value in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(value.view_as(gradient))
        if not self._verified:
            self._verified = True
            self._verify({name: gradient for name, gradient in whole.items() if name not in self.partial})

    def _verify(self, gradients: dict[str, Tensor]) -> None:
        """Compares the norms of `gradients` between ranks."""
        if not gradients:
            return
        norms = torch.stack([g.double().norm() if g.numel() else g.new_zeros(()).double() for g in gradients.values()])
        low, high = norms.clone(), norms.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.tp_group.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.tp_group.group)
        for name, least, most in zip(gradients, low.tolist(), high.tolist()):
            if most - least > GRADIENT_GAP * most:
                raise ShardwrightError(
                    f"The gradient of {name} differs between tensor-parallel ranks (norms {least:.6g} to {most:.6g}).",
                    "This parameter is whole on every rank, but its module works on divided tensors.",
                    f"Give its module the style {SUMMED} in parallelism.tp_plan, or divide it.",
                )


def _inside(name: str, modules: Iterable[str]) -> bool:
    """Whether `name` is one of `modules` or below one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)

"""Tensor parallelism, with sequence parallelism: which layer gets which style, and where sequences are cut.

The plan is Transformers' own (`_tp_plan`) or a user's `{pattern: style}`. Column-wise and row-wise layers of one module
(attention, MLP) make a region: its input is exchanged once on entry, its output once behind the row-wise layer. With
sequence parallelism everything in the blocks but regions works on T / tp positions a rank. Sequences are cut before the
first block and made whole behind the last one, so that what a model does around its blocks (positions, masks, final
reshapes) sees whole ones; this costs two messages of [B, T, D] per microbatch more than cutting at embedding and head.
Between pipeline stages only pieces travel: around the blocks of a stage stand tensors of the whole size with one piece in them.
Whole parameters that see only part of the work (`partial`) get their gradients summed once per update.

B rows, T positions, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwright.backends import tp_collectives
from shardwright.backends.tp_collectives import Peers
from shardwright.config.schema import RunFile
from shardwright.errors import ShardwrightError
from shardwright.models.model_parts import Parts
from shardwright.parallel.pipeline.stages import Stage
from shardwright.parallel.tensor.styles import Column, Done, Entry, Head, Row, Vocabulary, change_input
from shardwright.parallel.tensor.tp_plan import COLUMN, EMBEDDING, ROW, SUMMED, VOCABULARY, TensorPlan
from shardwright.parallel.tensor.tp_rng import Streams, drops
from shardwright.torch_private import REDISTRIBUTE_LOGGER

GRADIENT_GAP = 0.02
"""Relative difference between the ranks' gradient norms of one whole parameter beyond which they were not the same work."""


class TensorParallel:
    """A model whose layers are divided over `mesh` (one axis); sums what is partial at the end of an update."""

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
        self._undivided = self._attention_on_wholes(attention, plan.regions)
        self.peers = Peers(mesh.size(), mesh.get_local_rank(), mesh.get_group())
        self._styles, self._blocks = plan.styles, parts.blocks
        self.partial = self._partial_names(plan.regions)
        self._streams = Streams(mesh.get_local_rank(), mesh.device_type) if drops(model) else None
        done: Done = {}
        styles: dict[str, ParallelStyle] = {
            name: self._style(name, style, plan.regions, done)
            for name, style in self._styles.items()
            if style != SUMMED
        }
        parallelize_module(model, mesh, styles)
        for name in sorted(plan.regions):
            self._on_input(name, self._enter)
        for name in self._undivided:
            self._on_input(name, partial(tp_collectives.gather_same, dim=1, peers=self.peers))
            self.model.get_submodule(name).register_forward_hook(self._leave_undivided)
        for name in parts.blocks if self._streams is not None else ():
            block = model.get_submodule(name)
            block.forward = partial(self._run_block, block.forward)
        if self.sequence and not stages:
            self._cut_around(parts.blocks, first=True, last=True)
        for stage in stages if self.sequence else ():
            stage.peers = self.peers
            self._cut_around(stage.blocks, stage.is_first, stage.is_last)
        self._verified = False
        # torch warns when it makes strided shards whole in two gathers; they carry no sums, so nothing can differ
        logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)

    def divides(self, name: str) -> bool:
        """Whether the output features of the module `name` are divided, so that each rank has some rows of its weight."""
        return self._styles.get(name) in COLUMN

    def _attention_on_wholes(self, attention: Sequence[str], regions: frozenset[str]) -> tuple[str, ...]:
        """The modules here that attend and are not divided: every rank does their work alike, on whole sequences."""
        if not self.sequence:
            return ()
        here = {name for name, module in self.model.named_modules() if any(True for _ in module.parameters())}
        return tuple(
            name
            for name in attention
            if name in here and not any(f"{name}.".startswith(f"{region}.") for region in regions)
        )

    def _leave_undivided(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Whole [B, T, D], equal on all ranks, -> [B, T / tp, D]."""
        if isinstance(output, Tensor):
            return tp_collectives.cut(output, 1, self.peers)
        return (tp_collectives.cut(output[0], 1, self.peers), *output[1:])

    def _in_block(self, name: str) -> bool:
        return any(name.startswith(f"{block}.") for block in self._blocks)

    def _partial_names(self, regions: frozenset[str]) -> tuple[str, ...]:
        """Whole parameters of which each rank computes a part of the gradient."""
        found = []
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name in own:
            module, _, leaf = name.rpartition(".")
            style = self._styles.get(module, "")
            divided = style and style != SUMMED and not (style in ROW and leaf == "bias")
            if divided:
                continue
            region = any(name.startswith(f"{parent}.") for parent in regions)
            alike = any(name.startswith(f"{module}.") for module in self._undivided)
            on_pieces = self._in_block(name) and (not region or style in ROW) and not alike
            if any(name.startswith(f"{m}.") for m, s in self._styles.items() if s == SUMMED) or (
                self.sequence and on_pieces
            ):
                found.append(name)
        return tuple(found)

    def _style(self, name: str, style: str, regions: frozenset[str], done: Done) -> ParallelStyle:
        if style == EMBEDDING:
            return Vocabulary(self.peers, done)
        inside = self._in_block(name)
        if style in ROW:
            leave = self._leave if inside else partial(tp_collectives.sum_out, peers=self.peers)
            return Row(self.peers, done, leave, splits=style == "rowwise_split_input")
        entry: Entry | None = self._enter if inside else partial(tp_collectives.copy_in, peers=self.peers)
        if name.rpartition(".")[0] in regions:
            entry = None
        if style == VOCABULARY:
            return Head(self.peers, done, entry)
        return Column(self.peers, done, entry, self._whole if style == "colwise_gather_output" else None)

    def _on_input(self, name: str, change: Entry) -> None:
        self.model.get_submodule(name).register_forward_pre_hook(partial(change_input, change), with_kwargs=True)

    def _run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block that drops: its residual stream is divided by positions or whole, and so are its masks."""
        assert self._streams is not None
        self._draw(divided=self.sequence)
        try:
            return forward(*args, **kwargs)
        finally:
            self._streams.common()

    def _draw(self, divided: bool) -> None:
        if self._streams is not None:
            self._streams.divided() if divided else self._streams.common()

    def _enter(self, x: Tensor) -> Tensor:
        """[B, T or T / tp, D] into divided work: [B, T, D]."""
        self._draw(divided=True)
        return tp_collectives.gather_in(x, 1, self.peers) if self.sequence else tp_collectives.copy_in(x, self.peers)

    def _whole(self, x: Tensor) -> Tensor:
        """A divided output made whole, for work that every rank does alike."""
        self._draw(divided=False)
        return tp_collectives.gather_same(x, -1, self.peers)

    def _leave(self, x: Tensor) -> Tensor:
        """Partial [B, T, D] out of divided work: [B, T or T / tp, D]."""
        self._draw(divided=self.sequence)
        return (
            tp_collectives.sum_and_cut_out(x, 1, self.peers) if self.sequence else tp_collectives.sum_out(x, self.peers)
        )

    def _cut_sequence(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T / tp, D]."""
        if x.size(1) % self.peers.size:
            raise ShardwrightError(
                f"A sequence of {x.size(1)} positions is not divisible by tp_size = {self.peers.size}.",
                "sequence_parallel gives each rank equally many positions.",
                "Use a multiple, or set parallelism.sequence_parallel to false.",
            )
        return tp_collectives.cut(x, 1, self.peers)

    def _cut_around(self, blocks: Sequence[str], first: bool, last: bool) -> None:
        """Makes `blocks` work on pieces; `first`, `last`: they are the model's first, its last."""
        enter = self._cut_sequence if first else partial(tp_collectives.take_piece, dim=1, peers=self.peers)
        leave = tp_collectives.gather_same if last else tp_collectives.fill_in
        self._on_input(blocks[0], enter)
        self.model.get_submodule(blocks[-1]).register_forward_hook(partial(self._leave_blocks, leave))

    def _leave_blocks(self, leave: Callable[..., Tensor], module: nn.Module, args: Any, output: Any) -> Any:
        """[B, T / tp, D] -> [B, T, D], behind the last of some blocks."""
        if isinstance(output, Tensor):
            return leave(output, 1, self.peers)
        return (leave(output[0], 1, self.peers), *output[1:])

    def _whole_gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(partial, equal): this rank's gradients of parameters that are whole on this axis."""
        partial_ones: dict[str, Tensor] = {}
        equal: dict[str, Tensor] = {}
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
        norms = torch.stack([g.double().norm() if g.numel() else g.new_zeros(()).double() for g in gradients.values()])
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

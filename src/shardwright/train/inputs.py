"""What this rank's model gets of each microbatch: made on the host, beside training, and copied to the device without waiting.

On a GPU everything that depends on values (where documents lie, which positions have a target) is found by the loader's thread
on the host, and lies in pinned memory before its update begins. So nothing is computed from what lies on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.attention.packed_rows import PackedRows
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ShardwrightError
from shardwright.loss.chunked_loss import Targets, chunked_head
from shardwright.loss.objective import forward_arguments
from shardwright.models.model_parts import is_transformers
from shardwright.parallel.context.shard import ContextShard


@dataclass(frozen=True)
class HostInputs:
    """One microbatch as this rank needs it, on the host. T: tokens of a row on this rank.

    ids, labels, weights: [B, T]. positions: [B, T], None: from 0. documents: of whole rows. targets: for a loss in chunks.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor | None
    positions: Tensor | None
    documents: PackedRows | None
    targets: Targets | None

    def pinned(self) -> HostInputs:
        """The same in pinned memory."""
        moved: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        documents = None if self.documents is None else self.documents.pinned()
        return replace(
            self, **moved, documents=documents, targets=self.targets and self.targets.mapped(Tensor.pin_memory)
        )


@dataclass(frozen=True)
class ReadyMicrobatch(Microbatch):
    """A microbatch with its inputs, made ahead. made_of: the microbatch that the inputs were made of."""

    inputs: HostInputs | None = None
    made_of: Microbatch | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether the inputs are still those of this microbatch: a hook may have replaced a field."""
        made_of = {} if self.made_of is None else vars(self.made_of)
        return self.inputs is not None and all(vars(self)[name] is value for name, value in made_of.items())


class Inputs:
    """Makes the inputs of one rank's model. follows_length: its rotary frequencies follow the length of a document."""

    def __init__(
        self, run: RunFile, module: nn.Module, device: torch.device, context: ContextShard | None, follows_length: bool
    ) -> None:
        self._batching, self._device, self._context, self._by_length = (
            run.data.batching,
            device,
            context,
            follows_length,
        )
        self._arguments: Mapping[str, Any] = forward_arguments(module)
        self._transformers, self.head = is_transformers(module), chunked_head(module)

    def ready(self, batch: UpdateBatch) -> UpdateBatch:
        """`batch` with the inputs of all its microbatches in pinned memory, for a GPU. Called in the loader's thread."""
        if self._device.type != "cuda":
            return batch

        def made(microbatch: Microbatch) -> Microbatch:
            inputs = self.on_host(microbatch)
            if inputs.documents is not None:
                inputs.documents.prepare()
            if self.head is not None:
                inputs = replace(inputs, targets=self.head.targets(inputs.labels, inputs.weights))
            return ReadyMicrobatch(**vars(microbatch), inputs=inputs.pinned(), made_of=microbatch)

        return replace(batch, microbatches=tuple(map(made, batch.microbatches)))

    def on_host(self, microbatch: Microbatch) -> HostInputs:
        """The inputs of a microbatch, as they were made ahead or made now."""
        if isinstance(microbatch, ReadyMicrobatch) and microbatch.inputs is not None and microbatch.is_unchanged:
            return microbatch.inputs
        documents = self._documents(microbatch)
        positions, width = None, microbatch.input_ids.shape[1]
        if documents is not None:
            positions = documents.positions
        elif self._context is None and self._by_length and microbatch.lengths is not None:
            positions = PackedRows.of_lengths(microbatch.lengths, width, self._device).positions
        return HostInputs(
            ids=self._own(microbatch.input_ids),
            labels=self._own(microbatch.labels),
            weights=None if microbatch.weights is None else self._own(microbatch.weights),
            positions=None if positions is None else self._own(positions),
            documents=documents,
            targets=None,
        )

    def model(
        self, microbatch: Microbatch, change: Callable[[Microbatch, dict[str, Any]], object]
    ) -> tuple[Tensor, dict[str, Any]]:
        """This rank's token ids [B, T] of a microbatch on the device, and the model's other arguments, after `change` of them.

        Packed rows: positions [B, T] within documents, and the documents of whole rows, on every stage and rank. A model
        whose rotary frequencies follow the length of a document is told where each row ends, by positions of 0 behind it.
        """
        inputs, arguments = self.on_host(microbatch), dict(self._arguments)
        if inputs.positions is not None:
            arguments["position_ids"] = self.move(inputs.positions)
        elif self._context is not None:
            arguments["position_ids"] = self._context.position_ids(microbatch.input_ids.shape[1], self._device)
        if inputs.documents is not None:
            arguments["documents"] = inputs.documents if self._transformers else inputs.documents.on_device
        change(microbatch, arguments)
        return self.move(inputs.ids), arguments

    def labels(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """(labels, their weights), [B, T], of this rank's positions of a microbatch, on the device."""
        inputs = self.on_host(microbatch)
        return self.move(inputs.labels), None if inputs.weights is None else self.move(inputs.weights)

    def announce(self, microbatch: Microbatch) -> None:
        """Tells a head that computes the loss itself the targets of the next forward."""
        if self.head is not None:
            inputs = self.on_host(microbatch)
            self.head.announce(inputs.labels, inputs.weights, inputs.targets)

    def move(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device."""
        return tensor.to(self._device, non_blocking=True)

    def _own(self, rows: Tensor) -> Tensor:
        return rows if self._context is None else self._context.part(rows)

    def _documents(self, microbatch: Microbatch) -> PackedRows | None:
        if microbatch.documents is None:
            return None
        if self._batching != "pack":
            raise ShardwrightError(
                f"Microbatch {microbatch.index} has documents, with data.batching {self._batching}.",
                "The model's attention was left as it is: documents of one row would see each other.",
                "Set data.batching to pack.",
            )
        return PackedRows(microbatch.documents, self._device)

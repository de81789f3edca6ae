"""Hooks of an update: the only way in for measurements (`bench`), memory, heartbeats and fault injection (`check`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.train.decision import UpdateResult


@dataclass
class Hooks:
    """Where measurements observe an update, and where `check --plant` changes it. No hook has an effect by default.

    on_phase: told that `step` enters the phase `reduce`, then `step`.
    on_batch: returns the batch to run in place of the one that was given.
    on_inputs: changes the model's arguments beside the token ids, in place, for one microbatch.
    on_loss: returns the loss of one microbatch of a batch, before it is divided.
    post_reduce: called when the gradients of an update are complete.
    on_norm: returns the gradient norm by which gradients are clipped.
    on_clip: returns the factor by which gradients are multiplied.
    on_result: returns the result of a step.
    """

    on_phase: Callable[[str], object] = lambda phase: None
    on_batch: Callable[[UpdateBatch], UpdateBatch] = lambda batch: batch
    on_inputs: Callable[[Microbatch, dict[str, Any]], object] = lambda microbatch, arguments: None
    on_loss: Callable[[Tensor, Microbatch, UpdateBatch], Tensor] = lambda loss, microbatch, batch: loss
    post_reduce: Callable[[], object] = lambda: None
    on_norm: Callable[[float], float] = lambda norm: norm
    on_clip: Callable[[float], float] = lambda coefficient: coefficient
    on_result: Callable[[UpdateResult], UpdateResult] = lambda result: result
